"""Do the intervals say what they claim? Repetitions of A/A, and of a planted slowdown, from rounds that were measured.

Two arms that are the same system give A/A pairs of log ratios. A repetition draws rounds with replacement, and swaps
the two sides of each at random, so that nothing but noise can make a difference.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ops.bench import stats


@dataclass(frozen=True, slots=True)
class Power:
    """`false_positives` of `repetitions` A/A comparisons of `rounds` rounds; `found` of as many with the slowdown."""

    rounds: int
    effect: float
    repetitions: int
    false_positives: int
    found: int

    def text(self) -> str:
        return (
            f"{self.repetitions} repetitions of {self.rounds} rounds: a difference was claimed in "
            f"{self.false_positives} of A/A, and a slowdown of {self.effect:.0%} was found in {self.found}"
        )


def run(
    logs: Sequence[float], effect: float = 0.02, repetitions: int = 20, rounds: int | None = None, seed: int = 1
) -> Power:
    """`logs`: log ratios of A/A rounds. `rounds` (default): as many as the spread needs for this effect."""
    if len(logs) < 4:
        raise ValueError(f"{len(logs)} A/A rounds; at least 4 are needed to know their spread")
    rounds = rounds or stats.rounds_needed(statistics.stdev(logs), effect)
    rng, shift, wrong, found = random.Random(seed), math.log1p(-effect), 0, 0
    for _ in range(repetitions):
        drawn = [rng.choice(logs) * rng.choice((-1, 1)) for _ in range(rounds)]
        null, slowed = stats.mean_interval(drawn), stats.mean_interval([x + shift for x in drawn])
        wrong += not null.low <= 0.0 <= null.high
        found += slowed.high < 0.0
    return Power(rounds, effect, repetitions, wrong, found)
