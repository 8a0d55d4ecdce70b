"""From visits to figures: per system and concurrency, and as ratios of pairs with intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench import stats
from ops.bench.compare import Visit
from ops.bench.load import Wave
from ops.bench.noise import warning
from ops.bench.stats import Interval, Statistic


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the tables. `samples` gives what a wave has of it: one number, or one a request."""

    key: str
    title: str
    unit: str
    scale: float
    digits: int
    higher_is_better: bool
    samples: Callable[[Wave], list[float]]
    statistic: Statistic


def _speed(wave: Wave) -> list[float]:
    return [wave.tokens_per_s]


def _ttft(wave: Wave) -> list[float]:
    return [answer.ttft_s for answer in wave.answers]


def _tpot(wave: Wave) -> list[float]:
    return [answer.tpot_s for answer in wave.answers]


def _gaps(wave: Wave) -> list[float]:
    return [gap for answer in wave.answers for gap in answer.gaps_s]


def _events_a_read(wave: Wave) -> list[float]:
    return [answer.num_events / answer.num_reads for answer in wave.answers if answer.num_reads]


FIGURES = (
    Figure("tokens_per_s", "tok/s", "", 1.0, 1, True, _speed, stats.p50),
    Figure("ttft_p50", "TTFT p50", "ms", 1e3, 0, False, _ttft, stats.p50),
    Figure("ttft_p95", "TTFT p95", "ms", 1e3, 0, False, _ttft, stats.p95),
    Figure("ttft_p99", "TTFT p99", "ms", 1e3, 0, False, _ttft, stats.p99),
    Figure("tpot_p50", "TPOT p50", "ms", 1e3, 1, False, _tpot, stats.p50),
    Figure("gap_p50", "gap p50", "ms", 1e3, 1, False, _gaps, stats.p50),
    Figure("gap_p95", "gap p95", "ms", 1e3, 1, False, _gaps, stats.p95),
    Figure("gap_p99", "gap p99", "ms", 1e3, 1, False, _gaps, stats.p99),
    Figure("gap_max", "gap max", "ms", 1e3, 0, False, _gaps, max),
    Figure("events_a_read", "events a read", "", 1.0, 2, False, _events_a_read, stats.mean),
)


def waves_of(visits: Sequence[Visit], system: str, concurrency: int) -> list[Wave]:
    """In the order of the rounds."""
    mine = sorted((v for v in visits if v.system == system), key=lambda v: v.round)
    return [visit.waves[concurrency] for visit in mine]


def per_system(visits: Sequence[Visit], system: str, concurrency: int) -> dict[str, dict[str, float]]:
    """Each figure's median over rounds, and its least and greatest round."""
    waves = waves_of(visits, system, concurrency)
    out = {}
    for figure in FIGURES:
        rounds = [figure.statistic(figure.samples(wave)) for wave in waves]
        out[figure.key] = {"median": stats.p50(rounds), "min": min(rounds), "max": max(rounds)}
    return out


def ratios(visits: Sequence[Visit], a: str, b: str, concurrency: int) -> dict[str, Interval]:
    """a / b, figure by figure, paired by round."""
    ours, theirs = waves_of(visits, a, concurrency), waves_of(visits, b, concurrency)
    found = {}
    for figure in FIGURES:
        samples = [figure.samples(wave) for wave in ours], [figure.samples(wave) for wave in theirs]
        try:
            found[figure.key] = stats.rounds_ratio(*samples, figure.statistic)
        except stats.NotPositive:  # a stream that comes in one piece has no time between tokens
            found[figure.key] = stats.Interval(math.nan, math.nan, math.nan, len(ours))
    return found


def pairs_of(systems: Sequence[str]) -> list[tuple[str, str]]:
    """What is compared with what: each later system with the first one, and the last two prefill/decode systems."""
    pairs = [(name, systems[0]) for name in systems[1:]]
    split = [name for name in systems[1:] if not name.startswith("vllm")]
    pairs += [(split[j], split[i]) for j in range(len(split)) for i in range(j)]
    return pairs


def build(visits: Sequence[Visit], systems: Sequence[str], concurrencies: Sequence[int]) -> dict[str, Any]:
    return {
        "systems": {
            name: {
                "start_s": stats.p50([v.start_s for v in visits if v.system == name]),
                "memory_gib": max(v.memory_gib for v in visits if v.system == name),
                "idle_cpu": stats.p50([v.idle_cpu for v in visits if v.system == name]),
                "foreign_cpu_max": max(c for v in visits if v.system == name for c in v.foreign_cpu.values()),
                "concurrency": {str(c): per_system(visits, name, c) for c in concurrencies},
            }
            for name in systems
        },
        "ratios": [
            {"a": a, "b": b, "concurrency": c, **ratios(visits, a, b, c)}
            for a, b in pairs_of(systems)
            for c in concurrencies
        ],
    }


def table(figures: dict[str, Any], titles: dict[str, str]) -> str:
    """Two Markdown tables: medians over rounds, and ratios with their intervals."""
    heads = [f"{figure.title}{f' {figure.unit}' if figure.unit else ''}" for figure in FIGURES]
    lines = [f"| concurrency | system | {' | '.join(heads)} |", "|---:|---|" + "---:|" * len(heads)]
    systems = figures["systems"]
    concurrencies = list(next(iter(systems.values()))["concurrency"])
    for concurrency in concurrencies:
        for name, system in systems.items():
            found = system["concurrency"][concurrency]
            cells = [f"{found[f.key]['median'] * f.scale:.{f.digits}f}" for f in FIGURES]
            lines.append(f"| {concurrency} | {titles[name]} | {' | '.join(cells)} |")
    lines += ["", f"| concurrency | ratio | {' | '.join(figure.title for figure in FIGURES)} |"]
    lines.append("|---:|---|" + "---:|" * len(FIGURES))
    for row in figures["ratios"]:
        cells = [row[figure.key].text() for figure in FIGURES]
        lines.append(f"| {row['concurrency']} | {row['a']} / {row['b']} | {' | '.join(cells)} |")
    lines += [
        "",
        "Ratios: tok/s above 1 is faster; all else below 1 is better. Brackets: 95 % interval, Student's t on the "
        f"log ratios of {figures['ratios'][0][FIGURES[0].key].num} rounds.",
    ]
    lines += ["", "| system | answers after s | memory GiB | idle cores | others used at most, cores |"]
    lines.append("|---|---:|---:|---:|---:|")
    lines += [
        f"| {titles[name]} | {system['start_s']:.0f} | {system['memory_gib']:.1f} | {system['idle_cpu']:.2f} "
        f"| {system['foreign_cpu_max']:.2f} |"
        for name, system in systems.items()
    ]
    lines += ["", warning(max(system["foreign_cpu_max"] for system in systems.values()))]
    return "\n".join(lines).rstrip()
