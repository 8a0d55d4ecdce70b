"""What a hand-over adds to the time to first token: this service against single engines with the same threads.

All systems are up at once, since none of them spins when idle, and one request at a time runs on the whole machine:
every turn asks each system for the same cold prompt, in an order that rotates. So the two sides of a pair are a
second apart and share whatever the machine was doing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.bench import gate, load, phases, prompts, stats
from ops.bench.load import Answer
from ops.bench.noise import Meter, warning
from ops.bench.systems import Running, Say, SystemSpec

OUTPUT_TOKENS = 8
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    pairs: int = 30
    prompt_tokens: int = 1000
    seed: int = 1


@dataclass(slots=True)
class Made:
    systems: list[SystemSpec]
    answers: dict[str, list[Answer]] = field(default_factory=dict)  # by system, one a turn
    phase_means: dict[str, float] = field(default_factory=dict)  # seconds, of the service's own observations
    idle_cpu: dict[str, float] = field(default_factory=dict)
    foreign_cpu: float = 0.0
    breaches: list[str] = field(default_factory=list)


async def run(specs: Sequence[SystemSpec], plan: Plan, tokenizer: Any, say: Say, folder: Path) -> Made:
    """The last system is the one with the hand-over."""
    made = Made(list(specs), answers={spec.name: [] for spec in specs})
    async with contextlib.AsyncExitStack() as stack:
        running = []
        for spec in specs:  # one after another: starts would only slow each other down
            running.append(await stack.enter_async_context(Running(spec, say, folder / f"{spec.name}.log")))
            say(f"{spec.name}: ready after {running[-1].start_s:.0f} s, {running[-1].memory_gib():.1f} GiB")
        session = await stack.enter_async_context(load.open_session())
        for turn in range(WARM_UPS):
            await _turn(session, specs, plan, tokenizer, f"warm-up {turn}", turn)
        await asyncio.sleep(1.0)
        for each in running:
            before = each.cpu_seconds()
            await asyncio.sleep(2.0)
            made.idle_cpu[each.spec.name] = (each.cpu_seconds() - before) / 2.0
        before_phases = await phases.read(running[-1], WARM_UPS)
        meter = Meter(running)
        for turn in range(plan.pairs):
            answers = await _turn(session, specs, plan, tokenizer, f"turn {turn}", turn)
            for spec, answer in zip(specs, answers):
                made.answers[spec.name].append(answer)
                where = f"{spec.name}, turn {turn + 1}"
                made.breaches += gate.answer_breaches(where, [answer], plan.prompt_tokens, OUTPUT_TOKENS)
        made.foreign_cpu = meter.foreign()
        say(f"{plan.pairs} turns done, {len(made.breaches)} breaches")
        made.phase_means = phases.difference(before_phases, await phases.read(running[-1], WARM_UPS + plan.pairs))
        made.breaches += await _handed_over(session, specs[-1], plan)
    return made


async def _turn(
    session: httpx.AsyncClient, specs: Sequence[SystemSpec], plan: Plan, tokenizer: Any, label: str, turn: int
) -> list[Answer]:
    """One prompt, every system once; answers in the order of `specs`."""
    text = prompts.make(tokenizer, plan.prompt_tokens, plan.seed, label, 0)
    answers: dict[int, Answer] = {}
    for step in range(len(specs)):
        which = (turn + step) % len(specs)
        body = load.body_of(specs[which].model, text, OUTPUT_TOKENS)
        answers[which] = await load.ask(session, specs[which].url, body, turn)
    return [answers[index] for index in range(len(specs))]


async def _handed_over(session: httpx.AsyncClient, spec: SystemSpec, plan: Plan) -> list[str]:
    ferry = (await session.get(f"{spec.url}/status")).raise_for_status().json()["ferry"]
    sent = plan.pairs * plan.prompt_tokens
    return gate.hand_over_breaches(spec.name, int(ferry["tokens_moved"]), int(ferry["tokens_recomputed"]), sent)


def build(made: Made) -> dict[str, Any]:
    ours = made.systems[-1]
    second = [gap for answer in made.answers[ours.name] for gap in answer.gaps_s[:1]]
    ttft = {name: [answer.ttft_s for answer in answers] for name, answers in made.answers.items()}
    rows = []
    for spec in made.systems[:-1]:
        pairs = list(zip(ttft[ours.name], ttft[spec.name]))
        rows.append(
            {
                "against": spec.name,
                "title": spec.title,
                "ratio": stats.paired_ratio(pairs),
                "difference_s": stats.paired_difference(pairs),
            }
        )
    return {
        "systems": {
            spec.name: {
                "title": spec.title,
                "ttft_p50_s": stats.p50(ttft[spec.name]),
                "ttft_p95_s": stats.p95(ttft[spec.name]),
                "ttft_mean_s": sum(ttft[spec.name]) / len(ttft[spec.name]),
                "idle_cpu": made.idle_cpu[spec.name],
                "ttft_s": ttft[spec.name],
            }
            for spec in made.systems
        },
        "foreign_cpu": made.foreign_cpu,
        "overhead": rows,
        "phases": phases.rows(
            made.phase_means,
            stats.mean(ttft[ours.name]),
            stats.mean(second) if second else 0.0,
        ),
    }


def table(report: dict[str, Any]) -> str:
    plan: Plan = report["plan"]
    lines = [
        f"Cold prompts of {plan.prompt_tokens} tokens, one request at a time, {plan.pairs} turns; gate green.",
        "",
        "| system | TTFT p50 ms | TTFT p95 ms | TTFT mean ms | idle cores |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['title']} | {row['ttft_p50_s'] * 1e3:.1f} | {row['ttft_p95_s'] * 1e3:.1f} "
        f"| {row['ttft_mean_s'] * 1e3:.1f} | {row['idle_cpu']:.2f} |"
        for row in report["systems"].values()
    ]
    lines += ["", "| TTFT of pageferry against | ratio | difference ms |", "|---|---:|---:|"]
    for row in report["overhead"]:
        difference = row["difference_s"]
        cell = f"{difference.value * 1e3:.1f} [{difference.low * 1e3:.1f}, {difference.high * 1e3:.1f}]"
        lines.append(f"| {row['title']} | {row['ratio'].text(3)} | {cell} |")
    lines += ["", "| phase of pageferry's first token | mean ms |", "|---|---:|"]
    lines += [f"| {row['phase']} | {row['mean_s'] * 1e3:.1f} |" for row in report["phases"]]
    return "\n".join([*lines, "", "Brackets: 95 % interval, Student's t over turns.", warning(report["foreign_cpu"])])
