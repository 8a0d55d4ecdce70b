"""Quantiles, and ratios of paired measurements with 95 % bootstrap intervals. Pure and seeded."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
LOW, HIGH = 0.025, 0.975

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the 95 % percentile interval of its bootstrap; `num` is how many independent pairs it rests on."""

    value: float
    low: float
    high: float
    num: int

    def text(self, digits: int = 2) -> str:
        if math.isnan(self.value):
            return "not defined"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics; q in 0..1. Raises ValueError for no values."""
    if not values:
        raise ValueError("quantile of no values")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q is {q}, must be within 0..1")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def p50(values: Sequence[float]) -> float:
    return quantile(values, 0.50)


def p95(values: Sequence[float]) -> float:
    return quantile(values, 0.95)


class NotPositive(ValueError):
    """A ratio of nothing, such as the time between tokens that all came in one piece."""


def geometric_mean(values: Sequence[float]) -> float:
    if not values or min(values) <= 0:
        raise NotPositive(f"geometric mean needs numbers above 0, got {list(values)[:5]}")
    return math.exp(statistics.fmean(math.log(value) for value in values))


def _interval(value: float, drawn: list[float], num: int) -> Interval:
    drawn.sort()
    return Interval(value, quantile(drawn, LOW), quantile(drawn, HIGH), num)


def paired_ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval:
    """Geometric mean of a / b over pairs that were measured one beside the other; whole pairs are resampled."""
    logs = [math.log(a) - math.log(b) for a, b in pairs]
    if not logs:
        raise ValueError("ratio of no pairs")
    rng = random.Random(seed)
    drawn = [math.exp(statistics.fmean(rng.choices(logs, k=len(logs)))) for _ in range(RESAMPLES)]
    return _interval(math.exp(statistics.fmean(logs)), drawn, len(logs))


def paired_difference(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval:
    """Mean of a - b over pairs, in their unit."""
    differences = [a - b for a, b in pairs]
    if not differences:
        raise ValueError("difference of no pairs")
    rng = random.Random(seed)
    drawn = [statistics.fmean(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES)]
    return _interval(statistics.fmean(differences), drawn, len(differences))


def rounds_ratio(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], statistic: Statistic, seed: int = 0
) -> Interval:
    """Ratio of a statistic of two systems that were measured in the same rounds.

    `a[i]` and `b[i]` are the samples of round i (one number a request, or a single one such as tok/s). The value is
    the geometric mean over rounds of statistic(a[i]) / statistic(b[i]). Resampled on both levels: rounds, and the
    samples inside a round, so that few requests a round widen the interval as few rounds do.
    """
    if len(a) != len(b) or not a or not all(a) or not all(b):
        raise ValueError(f"rounds do not pair: {[len(x) for x in a]} samples against {[len(x) for x in b]}")
    rng = random.Random(seed)
    rounds = range(len(a))

    def once(samples: Sequence[float]) -> float:
        return statistic(samples if len(samples) == 1 else rng.choices(samples, k=len(samples)))

    drawn = []
    for _ in range(RESAMPLES):
        picked = rng.choices(rounds, k=len(rounds))
        drawn.append(geometric_mean([once(a[i]) / once(b[i]) for i in picked]))
    value = geometric_mean([statistic(a[i]) / statistic(b[i]) for i in rounds])
    return _interval(value, drawn, len(a))
