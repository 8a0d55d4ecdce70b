"""The A/B run: every round starts each system alone, gates it, loads it at each concurrency, and ends it.

Systems are started and stopped in every round, in an order that rotates, and never run side by side: an idle
prefill/decode system with NIXL keeps a core busy with its progress thread, and what is kept waiting for a turn would
be paid by whoever has it. The price is a minute of starting a round; the gain is that the difference between two
starts of one system is part of the interval.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ops.bench import gate, load, prompts
from ops.bench.load import Answer, Wave
from ops.bench.noise import Meter
from ops.bench.systems import Running, Say, StartError, SystemSpec

GATE_PROMPTS, GATE_TOKENS, GATE_PROMPT_TOKENS = 4, 16, 97
WARM_UP_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int = 3
    concurrencies: tuple[int, ...] = (1, 4, 8, 16)
    prompt_tokens: int = 256
    output_tokens: int = 32
    requests_min: int = 6
    requests_per_slot: int = 2  # of the concurrency
    seed: int = 1

    def num_requests(self, concurrency: int) -> int:
        return max(self.requests_min, self.requests_per_slot * concurrency)


@dataclass(slots=True)
class Visit:
    """One system in one round."""

    system: str
    round: int
    start_s: float = 0.0
    memory_gib: float = 0.0
    idle_cpu: float = 0.0  # cores that the ready system uses while nobody asks
    foreign_cpu: dict[int, float] = field(default_factory=dict)  # cores that others used, by concurrency
    waves: dict[int, Wave] = field(default_factory=dict)
    gate: list[list[Answer]] = field(default_factory=list)  # [repeat][prompt]
    breaches: list[str] = field(default_factory=list)


async def visit(spec: SystemSpec, plan: Plan, number: int, tokenizer: Any, say: Say, log: Path) -> Visit:
    made = Visit(spec.name, number)
    async with Running(spec, say, log) as running, load.open_session() as session:
        began = time.monotonic()
        await _warm_up(session, running, plan, tokenizer, number)
        made.start_s = running.start_s + time.monotonic() - began
        made.memory_gib = running.memory_gib()
        made.idle_cpu = await _idle(running)
        say(f"round {number + 1}, {spec.name}: answers after {made.start_s:.0f} s, {made.memory_gib:.1f} GiB")
        await _gate(session, running, made, plan, tokenizer)
        for concurrency in plan.concurrencies:
            label = f"round {number} at {concurrency}"
            texts = prompts.batch(tokenizer, plan.prompt_tokens, plan.seed, label, plan.num_requests(concurrency))
            meter = Meter([running])
            wave = await load.wave(session, spec.url, spec.model, texts, plan.output_tokens, concurrency)
            made.foreign_cpu[concurrency] = meter.foreign()
            made.waves[concurrency] = wave
            where = f"{spec.name}, round {number + 1}, concurrency {concurrency}"
            made.breaches += gate.answer_breaches(where, wave.answers, plan.prompt_tokens, plan.output_tokens)
        if spec.hands_over:
            made.breaches += await _hand_over_breaches(session, spec, made, plan)
    return made


async def _warm_up(session: aiohttp.ClientSession, running: Running, plan: Plan, tokenizer: Any, number: int) -> None:
    """Until one request of the measured shape has been answered: some systems report ready before their engines are."""
    spec, until = running.spec, time.monotonic() + WARM_UP_TIMEOUT_S
    texts = prompts.batch(tokenizer, plan.prompt_tokens, plan.seed, f"warm-up {number}", 3)
    for text in texts[:1] * 20:
        answer = await load.ask(session, spec.url, load.body_of(spec.model, text, 4))
        if not answer.error:
            break
        if time.monotonic() > until:
            raise StartError(f"{spec.title} does not answer: {answer.error}\n{running.tail()}")
        await asyncio.sleep(1.0)
    else:
        raise StartError(f"{spec.title} does not answer: {answer.error}\n{running.tail()}")
    await load.wave(session, spec.url, spec.model, texts[1:], plan.output_tokens, 2)


async def _idle(running: Running, seconds: float = 2.0) -> float:
    await asyncio.sleep(1.0)  # what the warm-up left is done
    before = running.cpu_seconds()
    await asyncio.sleep(seconds)
    return (running.cpu_seconds() - before) / seconds


async def _gate(session: aiohttp.ClientSession, running: Running, made: Visit, plan: Plan, tokenizer: Any) -> None:
    """Each prompt twice, one after another, with a cache salt of its own so that both are computed from the start."""
    spec = running.spec
    texts = prompts.batch(tokenizer, GATE_PROMPT_TOKENS, plan.seed, "gate", GATE_PROMPTS)
    for repeat in range(2):
        extra = {"cache_salt": f"gate-{repeat}"}
        wave = await load.wave(session, spec.url, spec.model, texts, GATE_TOKENS, 1, extra)
        where = f"{spec.name}, round {made.round + 1}, gate"
        made.breaches += gate.answer_breaches(where, wave.answers, GATE_PROMPT_TOKENS, GATE_TOKENS)
        made.gate.append(wave.answers)


async def _hand_over_breaches(session: aiohttp.ClientSession, spec: SystemSpec, made: Visit, plan: Plan) -> list[str]:
    """Reads what the service counts of itself: its decode must have taken over what was sent."""
    sent = 2 * GATE_PROMPTS * GATE_PROMPT_TOKENS
    sent += sum(len(wave.answers) for wave in made.waves.values()) * plan.prompt_tokens
    await asyncio.sleep(1.5)  # replicas and transfer actors report twice a second
    async with session.get(f"{spec.url}/status") as answer:
        ferry = (await answer.json())["ferry"]
    return gate.hand_over_breaches(spec.name, int(ferry["tokens_moved"]), int(ferry["tokens_recomputed"]), sent)


async def run(specs: Sequence[SystemSpec], plan: Plan, tokenizer: Any, say: Say, folder: Path) -> list[Visit]:
    """All visits, in the order in which they were made. Stops after a round with a breach: nothing would be shown."""
    visits: list[Visit] = []
    for number in range(plan.rounds):
        turn = number % len(specs)
        for spec in (*specs[turn:], *specs[:turn]):
            made = await visit(spec, plan, number, tokenizer, say, folder / f"{spec.name}.log")
            visits.append(made)
            say(f"round {number + 1}, {spec.name}: " + _progress(made))
        if breaches(visits):
            break
    return visits


def _progress(made: Visit) -> str:
    """Nothing of speed: the gate has not been read yet."""
    asked = sum(len(wave.answers) for wave in made.waves.values())
    foreign = max(made.foreign_cpu.values(), default=0.0)
    noise = f"; others used {foreign:.1f} cores" if foreign > 0.2 else ""
    return f"{asked} requests, {len(made.breaches)} breaches{noise}"


def breaches(visits: Sequence[Visit]) -> list[str]:
    found = [breach for made in visits for breach in made.breaches]
    for system in dict.fromkeys(made.system for made in visits):
        runs = [answers for made in visits if made.system == system for answers in made.gate]
        found += gate.repeat_breaches(system, runs)
    return found


def as_dict(visits: Sequence[Visit]) -> list[dict[str, Any]]:
    """Raw measurements for the JSON file, texts left out."""
    out = []
    for made in visits:
        waves = {
            concurrency: {
                "seconds": wave.seconds,
                "tokens_per_s": wave.tokens_per_s,
                "ttft_s": [answer.ttft_s for answer in wave.answers],
                "tpot_s": [answer.tpot_s for answer in wave.answers],
            }
            for concurrency, wave in made.waves.items()
        }
        rest = {name: value for name, value in asdict(made).items() if name not in ("waves", "gate", "breaches")}
        out.append({**rest, "waves": waves})
    return out
