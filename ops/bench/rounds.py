"""Runs the arms of a plan in rounds, in an order that rotates: each behind the correctness gate, the warm-up cut.

What is kept is raw: every request of every load, so that each figure can be computed again from the results file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.bench import drive, gate, load
from ops.bench.noise import Meter
from ops.bench.plan import AnyLoad, Plan
from ops.bench.systems import Running, Say, StartError, SystemSpec

GATE_PROMPTS, GATE_TOKENS, GATE_PROMPT_TOKENS = 4, 16, 97
SAMPLE_EVERY_S = 1.0
READY_TIMEOUT_S = 180.0


@dataclass(slots=True)
class Visit:
    """One arm in one round, JSON-ready: `loads` by name."""

    arm: str
    round: int
    start_s: float = 0.0
    idle_cpu: float = 0.0
    gate: list[str] = field(default_factory=list)  # texts, prompt after prompt, twice
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Arm:
    spec: SystemSpec
    running: Running
    target: drive.Target


async def run(
    plan: Plan,
    specs: Sequence[SystemSpec],
    words: Sequence[int],
    say: Say,
    folder: Path,
    until: float = math.inf,
    keep: Callable[[list[Visit]], None] = lambda _: None,
) -> list[Visit]:
    """All visits in the order in which they were made; `keep` gets them after each round. Stops after a round with a
    breach (no speed will be shown), and after the round in which `until` (monotonic seconds) has passed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # systems end with this process
    made: list[Visit] = []
    async with contextlib.AsyncExitStack() as stack:
        up = [await stack.enter_async_context(_started(spec, say, folder)) for spec in specs if plan.together]
        for arm in up:
            await _warm_up(plan, arm, words)
        for number in range(plan.rounds):
            if plan.together:
                visits = await _together(plan, up, words, number)
            else:
                visits = [await _alone(plan, spec, words, number, say, folder) for spec in _rotated(specs, number)]
            made += visits
            keep(made)
            found = breaches(made)
            say(f"round {number + 1} of {plan.rounds}: {_progress(visits)}, {len(found)} breaches")
            if found or time.monotonic() > until:
                break
    return made


def _rotated(arms: Sequence[Any], number: int) -> list[Any]:
    turn = number % len(arms)
    return [*arms[turn:], *arms[:turn]]


@contextlib.asynccontextmanager
async def _started(spec: SystemSpec, say: Say, folder: Path) -> Any:
    async with Running(spec, say, folder / f"{spec.name}.log") as running, load.open_session() as http:
        yield Arm(spec, running, drive.Target(http, spec.url, spec.model))


async def _alone(plan: Plan, spec: SystemSpec, words: Sequence[int], number: int, say: Say, folder: Path) -> Visit:
    """The arm is started, measured and ended, so that the difference between two starts is part of the interval."""
    async with _started(spec, say, folder) as arm:
        began = time.monotonic()
        await _warm_up(plan, arm, words)
        made = Visit(spec.name, number, arm.running.start_s + time.monotonic() - began)
        await _measure(plan, arm, words, made, plan.loads)
    return made


async def _together(plan: Plan, up: Sequence[Arm], words: Sequence[int], number: int) -> list[Visit]:
    """Load by load, every arm once: the two sides of a pair are as near in time as they can be."""
    visits = {arm.spec.name: Visit(arm.spec.name, number, arm.running.start_s) for arm in up}
    for step, each in enumerate(plan.loads):
        for arm in _rotated(up, number + step):
            await _measure(plan, arm, words, visits[arm.spec.name], [each], first=step == 0)
    return list(visits.values())


async def _warm_up(plan: Plan, arm: Arm, words: Sequence[int]) -> None:
    """Until one request has been answered (some systems report ready before their engines are), then a few more of the
    first load's shape. None of them is measured."""
    shape = plan.loads[0]
    made = drive.sessions(shape, words, plan.seed, "warm-up", plan.warm_up_requests)[: plan.warm_up_requests]
    until = time.monotonic() + READY_TIMEOUT_S
    while (answer := (await arm.target.talk(made[0], 0))[0].answer).error:
        if time.monotonic() > until:
            raise StartError(f"{arm.spec.title} does not answer: {answer.error}\n{arm.running.tail()}")
        await asyncio.sleep(1.0)
    await asyncio.gather(*(arm.target.talk(session, 0) for session in made[1:]))


async def _measure(
    plan: Plan, arm: Arm, words: Sequence[int], made: Visit, loads: Sequence[AnyLoad], first: bool = True
) -> None:
    if first:
        await _gate(plan, arm, words, made)
        before = arm.running.cpu_seconds()
        await asyncio.sleep(1.0)
        made.idle_cpu = arm.running.cpu_seconds() - before
    for each in loads:
        sampler = Sampler(arm)
        await sampler.look()
        meter, watching = Meter([arm.running]), asyncio.create_task(sampler.watch())
        try:
            outcome = await drive.run(arm.target, each, words, plan.seed, f"round {made.round}")
            foreign = meter.foreign()
        finally:
            watching.cancel()
        if arm.spec.hands_over:
            await asyncio.sleep(1.5)  # replicas and transfer actors report twice a second
        await sampler.look()
        sampled = await sampler.report()
        for name, row in zip(each.names, (outcome, outcome.beside)):
            assert row is not None
            made.loads[name] = {
                "seconds": row.seconds,
                "goodput": row.goodput,
                "largest": row.largest,
                "foreign_cpu": foreign,
                **sampled,
                "requests": [_raw(sent) for sent in row.sent],
            }
            where = f"{made.arm}, round {made.round + 1}, {name}"
            for sent in row.sent:
                made.breaches += gate.answer_breaches(where, [sent.answer], sent.prompt_tokens, sent.output_tokens)


def _raw(sent: drive.Sent) -> dict[str, Any]:
    answer = sent.answer
    return {
        "prompt_tokens": sent.prompt_tokens,
        "output_tokens": answer.num_output_tokens,
        "turn": sent.turn,
        "ttft_s": round(answer.ttft_s, 5),
        "tpot_s": round(answer.tpot_s, 6),
        "seconds": round(answer.seconds, 5),
        "gaps_ms": [round(gap * 1e3, 2) for gap in answer.gaps_s],
        "events": answer.num_events,
        "reads": answer.num_reads,
        "retries": answer.retries,
        "error": answer.error,
        "text": hash_of(answer.text),
    }


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


async def _gate(plan: Plan, arm: Arm, words: Sequence[int], made: Visit) -> None:
    """Each prompt twice, one after another, with a cache salt of its own so that both are computed from the start."""
    rng = drive._rng(plan.seed, "gate")
    texts = [rng.choices(words, k=GATE_PROMPT_TOKENS) for _ in range(GATE_PROMPTS)]
    for repeat in range(2):
        extra = {"cache_salt": f"gate-{made.round}-{repeat}"}
        wave = await load.wave(arm.target.http, arm.spec.url, arm.spec.model, texts, GATE_TOKENS, 1, extra)
        where = f"{made.arm}, round {made.round + 1}, gate"
        made.breaches += gate.answer_breaches(where, wave.answers, GATE_PROMPT_TOKENS, GATE_TOKENS)
        made.gate += [answer.text for answer in wave.answers]


def breaches(visits: Sequence[Visit]) -> list[str]:
    """What each visit broke, arms that gave two greedy answers to one prompt, and pools that handed nothing over."""
    found = [breach for made in visits for breach in made.breaches]
    for made in visits:
        rows, keys = made.loads.values(), ("tokens_moved", "tokens_recomputed")
        if rows and all(row.get(key) is not None for row in rows for key in keys):
            moved, again = (sum(int(row[key]) for row in rows) for key in keys)
            found += gate.hand_over_breaches(f"{made.arm}, round {made.round + 1}", moved, again, expected=1)
    for arm in dict.fromkeys(made.arm for made in visits):
        runs = [made.gate[i : i + GATE_PROMPTS] for made in visits if made.arm == arm for i in (0, GATE_PROMPTS)]
        answers = [[load.Answer(index, text=text) for index, text in enumerate(texts)] for texts in runs]
        found += gate.repeat_breaches(arm, [each for each in answers if each])
    return found


def _progress(visits: Sequence[Visit]) -> str:
    """Nothing of speed: the gate has not been read yet."""
    asked = sum(len(each["requests"]) for made in visits for each in made.loads.values())
    foreign = max((each["foreign_cpu"] for made in visits for each in made.loads.values()), default=0.0)
    return f"{asked} requests" + (f", others used {foreign:.1f} cores" if foreign > 0.2 else "")


class Sampler:
    """Memory, cache use and counters of an arm while a load runs. What a system does not tell is None."""

    def __init__(self, arm: Arm) -> None:
        self._arm, self._first, self._last = arm, {}, {}  # type: Arm, dict[str, float], dict[str, float]
        self._kv: list[float] = []
        self._held: list[float] = []
        self._host: list[float] = []

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            await self.look()

    async def look(self) -> None:
        self._host.append(host_used_gib())
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            counters, kv, held = await (self._ours() if self._arm.spec.hands_over else self._plain())
            self._first, self._last = self._first or counters, counters
            self._kv += kv
            self._held += held

    async def _ours(self) -> tuple[dict[str, float], list[float], list[float]]:
        tree = (await self._arm.target.http.get(f"{self._arm.spec.url}/status")).raise_for_status().json()
        replicas = [r for pool in tree["pools"].values() for r in pool["replicas"]]
        decode = tree["pools"]["decode"]["replicas"]
        counters = {
            "preemptions": sum(float(r["counters"].get("preemptions", 0)) for r in replicas),
            "tokens_recomputed": float(tree["ferry"]["tokens_recomputed"]),
            "tokens_moved": float(tree["ferry"]["tokens_moved"]),
        }
        kv = [r["blocks_held"] / r["blocks_total"] for r in decode if r["blocks_total"]]
        return counters, kv, [float(sum(r["running"] for r in decode))]

    async def _plain(self) -> tuple[dict[str, float], list[float], list[float]]:
        text = (await self._arm.target.http.get(f"{self._arm.spec.url}/metrics")).raise_for_status().text
        found = {name: float(value) for name, value in re.findall(r"^(vllm:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}
        kv = [found["vllm:kv_cache_usage_perc"]] if "vllm:kv_cache_usage_perc" in found else []
        counters = {"preemptions": found["vllm:num_preemptions_total"]} if "vllm:num_preemptions_total" in found else {}
        held = [found["vllm:num_requests_running"]] if "vllm:num_requests_running" in found else []
        return counters, kv, held

    async def report(self) -> dict[str, float | None]:
        def grown(name: str) -> float | None:
            return self._last[name] - self._first[name] if name in self._last and name in self._first else None

        return {
            "memory_gib": await asyncio.to_thread(self._arm.running.memory_gib),
            "host_gib": max(self._host),
            "kv_occupancy": max(self._kv, default=None),
            "held": max(self._held, default=None),
            **{name: grown(name) for name in ("preemptions", "tokens_recomputed", "tokens_moved")},
        }


def host_used_gib() -> float:
    """Memory of the machine that is in use."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(rows["MemTotal"].split()[0]) - int(rows["MemAvailable"].split()[0])) / (1 << 20)
