"""Fits the roofline's constants to measured times: those of published rates, or of a running service's benchmark.

The largest and the smallest load of a benchmark are fitted and every other one is predicted, so that the table shows
how far a fit can be trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.plan.facts import PlanError
from cluster.plan.roofline import Constants, Roofline

STEPS, NUDGE, GONE_US = 60, 1e-4, 1e-3
# The bandwidth stays as it was given: at one context length a slower memory and a dearer request look the same.
DECODE = ("layer_overhead_us", "request_overhead_us")
PREFILL = ("prefill_efficiency",)
SHARES = ("memory_efficiency", "prefill_efficiency")  # at most 1: more would be a wrong device entry


def least_squares(
    start: Mapping[str, float], residuals: Callable[[dict[str, float]], Sequence[float]], tie: float = 1e-4
) -> dict[str, float]:
    """Positive parameters that make the residuals small, by Levenberg-Marquardt on their logarithms.

    `tie`: weight of staying at `start`, which decides what the residuals leave open.
    """
    names = list(start)
    origin = np.log([max(start[name], GONE_US) for name in names])

    def at(logs: Any) -> Any:
        values = {name: min(math.exp(x), 1.0) if name in SHARES else math.exp(x) for name, x in zip(names, logs)}
        return np.array([*residuals(values), *(tie * (logs - origin))])

    logs, damping = origin.copy(), 1e-2
    here = at(logs)
    for _ in range(STEPS):
        slope = np.array([(at(logs + NUDGE * unit) - here) / NUDGE for unit in np.eye(len(names))]).T
        step = np.linalg.solve(slope.T @ slope + damping * np.eye(len(names)), -slope.T @ here)
        there = at(logs + np.clip(step, -1.0, 1.0))
        if there @ there < here @ here:
            logs, here, damping = logs + np.clip(step, -1.0, 1.0), there, damping / 3
        else:
            damping *= 4
    return {name: min(math.exp(x), 1.0) if name in SHARES else math.exp(x) for name, x in zip(names, logs)}


@dataclass(frozen=True)
class Point:
    """One measured time: a decode step of `batch` requests that hold `tokens` tokens together, or (`batch` 0) the
    prefill of one prompt of `tokens` tokens."""

    batch: int
    tokens: int
    seconds: float
    fitted: bool = True

    @property
    def name(self) -> str:
        return (
            f"decode step of {self.batch} requests, {self.tokens:,} tokens"
            if self.batch
            else f"prefill {self.tokens:,}"
        )

    def predicted(self, line: Roofline) -> float:
        if self.batch:
            return line.decode_step_seconds(self.batch, self.tokens)
        return line.prefill_seconds(self.tokens)


@dataclass(frozen=True)
class Calibration:
    decode: Constants
    prefill: Constants
    points: tuple[tuple[Point, float], ...]  # with the predicted seconds

    @property
    def worst_predicted(self) -> float | None:
        """The largest relative error among points that were not fitted; None when all were."""
        off = [abs(predicted / point.seconds - 1) for point, predicted in self.points if not point.fitted]
        return max(off, default=None)


def split(points: Sequence[Point]) -> list[Point]:
    """Marks the smallest and the largest of each kind as fitted, the others as tests."""
    marked = []
    for kind in (True, False):
        mine = sorted((p for p in points if bool(p.batch) is kind), key=lambda p: (p.batch, p.tokens))
        marked += [replace(p, fitted=i in (0, len(mine) - 1)) for i, p in enumerate(mine)]
    return marked


def calibrate(points: Sequence[Point], decode: Roofline, prefill: Roofline) -> Calibration:
    """Constants of both pools from the points marked as fitted. PlanError without a decode point."""
    if not any(p.batch and p.fitted for p in points):
        raise PlanError("the benchmark has no decode point: it needs an arm with requests that all ended well")
    lines = [_fitted(decode, [p for p in points if p.batch], DECODE)]
    # Launches and all-reduces of a layer take in prefill what they take in decode.
    prefill = replace(
        prefill, constants=replace(prefill.constants, layer_overhead_us=lines[0].constants.layer_overhead_us)
    )
    first = [p for p in points if not p.batch]
    lines.append(_fitted(prefill, first, PREFILL) if first else prefill)
    both = tuple((p, p.predicted(lines[0 if p.batch else 1])) for p in points)
    return Calibration(lines[0].constants, lines[1].constants, both)


def _fitted(line: Roofline, points: Sequence[Point], names: Sequence[str]) -> Roofline:
    start = {name: getattr(line.constants, name) or 1.0 for name in names}
    known = [p for p in points if p.fitted]

    def with_values(values: Mapping[str, float]) -> Roofline:
        return replace(line, constants=replace(line.constants, **values))

    fitted = least_squares(
        start, lambda values: [math.log(p.predicted(with_values(values)) / p.seconds) for p in known]
    )
    return with_values(fitted)


def read_points(file: Path, arm: str | None = None) -> list[Point]:
    """The points of one arm (default: the first) of a results file of `pageferry bench`.

    Each is `{"arm", "batch", "tokens", "seconds"}` under `calibration`. PlanError names the file and what is wrong.
    """
    try:
        rows = json.loads(file.read_text())["calibration"]
        arms = list(dict.fromkeys(row["arm"] for row in rows))
        if not arms:
            raise PlanError(f"{file} has no calibration points: no arm answered all its requests")
        if arm is not None and arm not in arms:
            raise PlanError(f"{file}: no arm {arm!r}; there are {', '.join(arms)}")
        points = [
            Point(int(row["batch"]), int(row["tokens"]), float(row["seconds"]))
            for row in rows
            if row["arm"] == (arm or arms[0])
        ]
    except PlanError:
        raise
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise PlanError(f"{file} is not a results file of `pageferry bench PLAN.yaml`: {error!r}") from None
    if any(p.batch < 0 or p.tokens < 1 or p.seconds <= 0 for p in points):
        raise PlanError(f"{file}: a calibration point needs batch >= 0, tokens >= 1 and seconds > 0")
    return split(points)
