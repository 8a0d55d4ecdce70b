"""Quantiles and paired ratios.

1. A quantile interpolates, and its ends are the extremes.
2. A constant factor between pairs is found exactly, whatever the noise that both sides share.
3. Fewer samples widen an interval; the value lies inside its interval.
4. A 95 % interval holds the truth in 95 % of the cases, with three rounds as with twelve.
5. Rounds that do not pair are refused.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench import stats

POSITIVE = st.floats(0.01, 100.0)


@given(st.lists(POSITIVE, min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_lies_between_the_extremes(values: list[float], q: float) -> None:
    assert min(values) <= stats.quantile(values, q) <= max(values)
    assert stats.quantile(values, 0.0) == min(values) and stats.quantile(values, 1.0) == max(values)


def test_quantile_interpolates() -> None:
    assert stats.p50([1.0, 2.0, 4.0, 3.0]) == 2.5
    assert stats.p95([float(i) for i in range(101)]) == 95.0


@given(st.lists(POSITIVE, min_size=2, max_size=20), st.floats(0.1, 10.0))
def test_a_constant_factor_is_exact(values: list[float], factor: float) -> None:
    found = stats.paired_ratio([(value * factor, value) for value in values])
    assert found.value == pytest.approx(factor)
    assert found.low == pytest.approx(factor) and found.high == pytest.approx(factor)


def test_shared_noise_cancels_and_samples_narrow() -> None:
    rng = random.Random(7)
    machine = [rng.uniform(0.5, 2.0) for _ in range(200)]
    pairs = [(m * 1.05 * rng.uniform(0.98, 1.02), m * rng.uniform(0.98, 1.02)) for m in machine]
    few, many = stats.paired_ratio(pairs[:6]), stats.paired_ratio(pairs)
    assert many.low < 1.05 < many.high and many.high - many.low < 0.01
    assert few.high - few.low > many.high - many.low
    assert few.low <= few.value <= few.high and few.num == 6


def test_difference_is_in_the_unit() -> None:
    found = stats.paired_difference([(1.5, 1.0), (2.5, 2.0), (3.5, 3.0)])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    found = stats.paired_difference([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)])
    assert found.high - found.value == pytest.approx(4.3027 / 3**0.5)  # the t of two degrees of freedom
    assert math.isinf(stats.paired_ratio([(1.0, 2.0)]).high)


@pytest.mark.parametrize("num", [2, 3, 5, 12, 40])
def test_an_interval_covers_the_truth(num: int) -> None:
    rng = random.Random(num)
    found = [stats.mean_interval([rng.gauss(0.0, 1.0) for _ in range(num)]) for _ in range(4000)]
    assert 0.94 < sum(each.low < 0.0 < each.high for each in found) / len(found) < 0.96


def test_positions_of_a_text_are_resampled_together() -> None:
    rng = random.Random(3)
    texts = [[centre] * 50 for centre in (rng.gauss(0.0, 1.0) for _ in range(30))]
    found = stats.cluster_bootstrap(texts)
    half = 2.0 * statistics.stdev(text[0] for text in texts) / 30**0.5
    assert 0.7 * half < found.high - found.value < 1.3 * half  # 30 independent texts, not 1,500 positions
    with pytest.raises(ValueError, match="7 texts"):
        stats.cluster_bootstrap(texts[:7])


def test_rounds_ratio_pairs_by_round() -> None:
    base = [[10.0, 11.0, 12.0], [100.0, 110.0, 120.0]]  # the second round was ten times slower for everybody
    other = [[value * 2 for value in samples] for samples in base]
    found = stats.rounds_ratio(other, base, stats.p50)
    assert found.value == found.low == found.high == pytest.approx(2.0)
    single = stats.rounds_ratio([[2.0], [4.0]], [[1.0], [2.0]], stats.p50)
    assert single.value == pytest.approx(2.0) and single.low == pytest.approx(2.0)


@pytest.mark.parametrize("a, b", [([], []), ([[1.0]], [[1.0], [2.0]]), ([[1.0], []], [[1.0], [1.0]])])
def test_rounds_that_do_not_pair_are_refused(a: list[list[float]], b: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="do not pair"):
        stats.rounds_ratio(a, b, stats.p50)


def test_nothing_to_measure_is_refused() -> None:
    for act in (lambda: stats.quantile([], 0.5), lambda: stats.paired_ratio([]), lambda: stats.student_t(0)):
        with pytest.raises(ValueError):
            act()


def test_a_ratio_to_nothing_is_refused() -> None:
    with pytest.raises(stats.NotPositive):
        stats.rounds_ratio([[0.0], [1.0]], [[1.0], [1.0]], stats.p50)
