"""Judging a checkpoint and writing the verdict into it; what a verdict is stands in `cluster/quality.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from cluster.quality import FILE_NAME, VERSION, Interval, Measures, State, Verdict, content_sha256

# Bound -> the figure it limits. The upper end of its interval must hold, not just the mean.
BOUNDS = {"max_kl": "kl", "max_flips": "flips", "max_ppl": "ppl", "max_ppl_ratio": "ppl_ratio"}


def parse_bounds(texts: Iterable[str]) -> dict[str, float]:
    """`["max_kl=0.05", "max_flips=0.1,max_ppl_ratio=1.02"]` to a mapping. ValueError names what cannot be read."""
    bounds: dict[str, float] = {}
    for item in (part for text in texts for part in text.split(",") if part):
        name, _, value = item.partition("=")
        if name not in BOUNDS:
            raise ValueError(f"--require {item}: no bound {name!r}; known: {', '.join(BOUNDS)}")
        try:
            bounds[name] = float(value)
        except ValueError:
            raise ValueError(f"--require {item}: {value!r} is not a number; write {name}=0.05") from None
    return bounds


def unmet_bounds(measures: Measures, bounds: dict[str, float]) -> tuple[str, ...]:
    """One line for each bound that the interval's upper end exceeds (NaN exceeds everything)."""
    lines = []
    for name, limit in bounds.items():
        found: Interval = getattr(measures, BOUNDS[name])
        if not found.high <= limit:
            lines.append(f"{name}={limit:g}: {found.mean:.4g}, interval {found.low:.4g} to {found.high:.4g}")
    return tuple(lines)


def judge(verdict: Verdict, bounds: dict[str, float]) -> Verdict:
    """The same measures under (new) bounds. An unjudged checkpoint stays unjudged."""
    if verdict.measures is None:
        return verdict
    unmet = unmet_bounds(verdict.measures, bounds)
    if not bounds:
        state, reason = State.MEASURED, "compared with its original; no bounds were given, so it is not called good"
    elif unmet:
        state, reason = State.REJECTED, "; ".join(unmet)
    else:
        state, reason = State.ACCEPTED, "every bound holds at the upper end of its interval"
    changed = {"state": state, "reason": reason, "bounds": dict(bounds), "unmet": unmet}
    return Verdict(**{**{name: getattr(verdict, name) for name in verdict.__dataclass_fields__}, **changed})


def verdict_json(verdict: Verdict, checkpoint_sha256: str) -> bytes:
    body = {"version": VERSION, "checkpoint_sha256": checkpoint_sha256, **asdict(verdict)}
    return (json.dumps(body, indent=1) + "\n").encode()


def store_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Writes quality.json for the checkpoint's bytes as they are now, whole or not at all."""
    partial = checkpoint / f".{FILE_NAME}.part"
    with partial.open("wb") as file:
        file.write(verdict_json(verdict, content_sha256(checkpoint)))
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, checkpoint / FILE_NAME)


UNJUDGED = Verdict(State.UNJUDGED, "not yet compared with its original: run `pageferry compress --evaluate TEXT`")
UNJUDGED_FILES = {FILE_NAME: verdict_json(UNJUDGED, "")}
