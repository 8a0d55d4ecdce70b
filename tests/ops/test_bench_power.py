"""Intervals on rounds that were measured: A/A at the nominal rate, a planted slowdown found in the stated rounds.

The rounds are stored turns of real servers (`bench-overhead.json`): each system's turns are paired with the next ones.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from ops.bench import power, stats

RESULTS = Path(__file__).parents[2] / "ops" / "results"
RECORDED = power.pairs(json.loads((RESULTS / "bench-overhead.json").read_text()))


@pytest.mark.parametrize("logs", RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize("rounds", [8, 40, None])
def test_equal_systems_are_called_different_at_the_nominal_rate(logs: list[float], rounds: int | None) -> None:
    found = power.run(logs, repetitions=1000, rounds=rounds)
    assert 0.02 <= found.false_positives / 1000 <= 0.085
    assert power.run(logs, repetitions=20, rounds=rounds).false_positives <= 3


@pytest.mark.parametrize("logs", RECORDED.values(), ids=RECORDED)
def test_a_slowdown_of_two_percent_is_found_in_the_stated_rounds(logs: list[float]) -> None:
    stated = stats.rounds_needed(statistics.stdev(logs), 0.02)
    assert 0.75 <= power.run(logs, repetitions=400, rounds=stated).found / 400 <= 0.95
    assert power.run(logs, repetitions=400, rounds=stated // 10).found / 400 < 0.4, "fewer rounds do not find it"


@pytest.mark.parametrize("num", [3, 8, 30])
def test_what_can_be_found_is_found_in_four_of_five_runs(num: int) -> None:
    rng, effect = random.Random(num), stats.detectable(0.05, num)
    shift, found = math.log1p(effect), 0
    for _ in range(2000):
        found += stats.mean_interval([rng.gauss(shift, 0.05) for _ in range(num)]).low > 0
    assert 0.74 <= found / 2000 <= 0.86
    assert stats.rounds_needed(0.05, effect * 1.001) == num


def test_rounds_of_two_commits_are_compared_unpaired() -> None:
    rng, covered = random.Random(5), 0
    for _ in range(2000):
        a, b = ([math.exp(rng.gauss(0.0, spread)) for _ in range(6)] for spread in (0.1, 0.3))
        found = stats.unpaired_ratio(a, b)
        covered += found.low <= 1.0 <= found.high
    assert 0.93 < covered / 2000 < 0.975
    assert stats.unpaired_ratio([2.0, 2.0], [1.0, 1.0]).value == pytest.approx(2.0)


@pytest.mark.compiles  # twelve thousand resampled comparisons: too long for `make unit`
def test_the_stored_page_is_what_the_command_prints() -> None:
    printed = power.table(json.loads((RESULTS / "bench-overhead.json").read_text()))
    assert printed in (RESULTS / "bench-power.md").read_text()


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 A/A rounds"):
        power.run([0.1, 0.2, 0.3])
