"""Do the intervals say what they claim? Repetitions of A/A, and of a planted slowdown, from rounds that were measured.

Two arms that are the same system give A/A pairs of log ratios. A repetition draws rounds with replacement, and swaps
the two sides of each at random, so that nothing but noise can make a difference.

    python -m ops.bench.power ops/results/bench-overhead.json

A results file of a plan with an A/A arm, or the turns of `pageferry bench --overhead`, of which each system's turns are
paired with the next ones.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def pairs(tree: dict[str, Any]) -> dict[str, list[float]]:
    """Log ratios of A/A pairs by what was measured, of a results file."""
    if "systems" in tree:
        turns = {name: system["ttft_s"] for name, system in tree["systems"].items()}
        return {f"TTFT, {name}": [math.log(a / b) for a, b in zip(t[::2], t[1::2])] for name, t in turns.items()}
    from ops.bench import figures
    from ops.bench.plan import AGAIN, BASELINE

    wanted = [figure for figure in figures.COMPARED if figure.key in ("tokens_per_s", "ttft_p50", "tpot_p50")]
    return {
        f"{figure.title} {figure.key}, {load}": figures.log_ratios(tree, AGAIN, BASELINE, load, figure)
        for load in tree["loads"]
        for figure in wanted
    }


def table(tree: dict[str, Any], effect: float = 0.02) -> str:
    lines = [
        "| pairs of | pairs | spread of log ratios | rounds for 2 % | A/A called different, of 20 | of 2,000 "
        "| 2 % found, of 20 | of 2,000 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, logs in pairs(tree).items():
        few, many = run(logs, effect), run(logs, effect, repetitions=2000)
        shares = [f"{count / many.repetitions:.1%}" for count in (many.false_positives, many.found)]
        cells = f"{len(logs)} | {statistics.stdev(logs):.3f} | {few.rounds:,} | {few.false_positives} | {shares[0]}"
        lines.append(f"| {name} | {cells} | {few.found} | {shares[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
