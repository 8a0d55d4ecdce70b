"""Quantiles, and 95 % intervals: Student's t for paired measurements, a cluster bootstrap for positions of texts.

A ratio of paired measurements is a mean of log ratios, one a pair; its interval is that mean's by Student's t. With
three rounds a percentile bootstrap can only return the least and the greatest round, which is no 95 % interval.
Pure and seeded.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
LOW, HIGH = 0.025, 0.975
# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom.
T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
NORMAL95, NORMAL80 = 1.959964, 0.841621

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; `num` is how many independent pairs, rounds or texts it rests on."""

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


def p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


class NotPositive(ValueError):
    """A ratio of nothing, such as the time between tokens that all came in one piece."""


def student_t(degrees: int) -> float:
    """The two-sided 95 % point of Student's t. ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom are {degrees}, must be >= 1: an interval needs two pairs")
    if degrees <= len(T95):
        return T95[degrees - 1]
    return _student_point(NORMAL95, degrees)  # 4 digits right from 11 degrees on


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean with its Student-t interval; a single value has an infinite one. ValueError for no values."""
    if not values:
        raise ValueError("mean of no values")
    mean, num = statistics.fmean(values), len(values)
    # `statistics.stdev` sums fractions, which takes thirty times as long; resampling calls this a million times.
    squares = math.fsum((value - mean) ** 2 for value in values)
    half = student_t(num - 1) * math.sqrt(squares / (num - 1) / num) if num > 1 else math.inf
    return Interval(mean, mean - half, mean + half, num)


def log_ratio_interval(logs: Sequence[float]) -> Interval:
    """Geometric mean of ratios given by their logarithms, with the Student-t interval of the mean log ratio."""
    found = mean_interval(logs)
    low, high = (math.exp(x) if abs(x) < 700 else (math.inf if x > 0 else 0.0) for x in (found.low, found.high))
    return Interval(math.exp(found.value), low, high, found.num)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Geometric mean of a / b over pairs that were measured one beside the other."""
    return log_ratio_interval([math.log(a) - math.log(b) for a, b in pairs])


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Mean of a - b over pairs, in their unit."""
    return mean_interval([a - b for a, b in pairs])


def rounds_ratio(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], statistic: Statistic) -> Interval:
    """Ratio of a statistic of two systems that were measured in the same rounds.

    `a[i]` and `b[i]` are the samples of round i (one number a request, or a single one such as tok/s). The value is
    the geometric mean over rounds of statistic(a[i]) / statistic(b[i]); rounds are the independent units. Raises
    NotPositive where a statistic is zero.
    """
    if len(a) != len(b) or not a or not all(a) or not all(b):
        raise ValueError(f"rounds do not pair: {[len(x) for x in a]} samples against {[len(x) for x in b]}")
    of_a, of_b = [statistic(x) for x in a], [statistic(x) for x in b]
    if min(*of_a, *of_b) <= 0:
        raise NotPositive(f"a ratio needs numbers above 0, got {of_a} and {of_b}")
    return paired_ratio(list(zip(of_a, of_b)))


def cluster_bootstrap(clusters: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Mean over all values, with a percentile interval from resampling whole clusters (positions of one text are not
    independent). ValueError below 8 clusters with values: fewer cannot give a 95 % percentile interval."""
    sums = [(sum(values), len(values)) for values in clusters if values]
    if len(sums) < 8:
        raise ValueError(f"{len(sums)} texts; a bootstrap interval needs 8 at least")
    rng = random.Random(seed)
    drawn = []
    for _ in range(RESAMPLES):
        picked = rng.choices(sums, k=len(sums))
        drawn.append(sum(s for s, _ in picked) / sum(n for _, n in picked))
    value = sum(s for s, _ in sums) / sum(n for _, n in sums)
    return Interval(value, quantile(drawn, LOW), quantile(drawn, HIGH), len(sums))


def _student_point(z: float, degrees: int) -> float:
    """Student's t at the probability where the normal is `z`, by the Cornish-Fisher expansion."""
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def detectable(deviation: float, num: int) -> float:
    """The smallest relative difference that `num` paired rounds find in 80 % of runs, where the log ratios of equal
    systems have this standard deviation. Infinite below two rounds."""
    if num < 2:
        return math.inf
    points = student_t(num - 1) + _student_point(NORMAL80, num - 1)
    return math.expm1(points * deviation / math.sqrt(num))


def rounds_needed(deviation: float, effect: float) -> int:
    """The rounds that find a relative difference of `effect` in 80 % of runs. ValueError for no effect."""
    if effect <= 0:
        raise ValueError(f"effect is {effect}, must be above 0")
    num = 3
    while detectable(deviation, num) > effect:
        num += 1 + num // 32
    return num


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Geometric mean of a over that of b, of rounds that were not measured beside each other (Welch's interval)."""
    logs = [[math.log(x) for x in values] for values in (a, b)]
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if min(len(a), len(b)) < 2:
        return Interval(math.exp(mean), 0.0, math.inf, min(len(a), len(b)))
    parts = [statistics.variance(x) / len(x) for x in logs]
    total = sum(parts)
    degrees = total**2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, logs)) if total else 1.0
    half = student_t(max(1, math.floor(degrees))) * math.sqrt(total)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), min(len(a), len(b)))
