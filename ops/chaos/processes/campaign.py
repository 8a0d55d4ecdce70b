"""One run: a wave of requests, something is hurt at a random moment, everything is judged. And many runs in a row."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from app.commands.serve import Service
from cluster.fault_kinds import ProcessFault, Target, process_fault
from ops.chaos.processes import checks, load, targets

SPREAD_S = 2.5  # requests of a wave start within this
MOMENT_S = (0.3, 6.0)  # when the blow falls, after the wave began
WHOLE_S = 120.0  # an engine starts in 15 to 60 s here
Say = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """One line of the record."""

    kind: str
    seed: int
    phase: dict[str, int]  # tickets by state at the moment of the blow
    victim: str
    seconds: float
    rest_s: float  # after the last answer, until nothing was held any more
    findings: checks.Findings
    leaked: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)  # tickets by outcome, as the controller counted them
    more: dict[str, Any] = field(default_factory=dict)  # of this kind of run alone

    @property
    def good(self) -> bool:
        return not (self.findings.problems or self.leaked)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "good": self.good}


class Campaign:
    def __init__(self, service: Service, session: aiohttp.ClientSession, say: Say) -> None:
        self.service = service
        self.session = session
        self.say = say
        self.url = service.url
        self.model = service.spec.model.served_name

    async def run(self, kind: ProcessFault, seed: int) -> Result:
        rng = random.Random(f"{kind}/{seed}")
        before = await self.status()
        began = time.monotonic()
        wave = asyncio.create_task(load.wave(self.session, self.url, self.model, rng, SPREAD_S))
        await asyncio.sleep(rng.uniform(*MOMENT_S))
        status = await self.status()
        phase = {state: count for state, count in status["tickets"]["by_state"].items() if count}
        pid, victim = targets.find(kind.target, status, self.service.mark, rng)
        await self._hurt(kind, pid, rng)
        answers = await wave
        seconds = time.monotonic() - began
        findings = checks.judge(answers, kind.breaks_connections)
        leaked, rest_s = await checks.rest(self.session, self.url)
        ended = await self._ended_since(before, kind, findings)
        for each in await checks.implausible(self.session, self.url, self.model, answers):
            findings.token_faults += 1
            findings.problems.append(each)
        return Result(kind, seed, phase, victim, seconds, rest_s, findings, leaked, ended)

    async def _hurt(self, kind: ProcessFault, pid: int, rng: random.Random) -> None:
        os.kill(pid, kind.signal)
        if kind.pause_s is not None:
            await asyncio.sleep(rng.uniform(*kind.pause_s))
            with contextlib.suppress(ProcessLookupError):  # it may have been taken for hung
                os.kill(pid, signal.SIGCONT)

    async def _ended_since(
        self, before: dict[str, Any], kind: ProcessFault, findings: checks.Findings
    ) -> dict[str, int]:
        """Tickets by outcome. Exactly one a request, but for those that a dead frontend had not sent on yet."""
        after = await self.status()
        if kind.forgets or after["epoch"] != before["epoch"]:
            return {}
        was, now = before["tickets"]["ended"], after["tickets"]["ended"]
        ended = {outcome: now[outcome] - was[outcome] for outcome in now}
        total = sum(ended.values())
        if not findings.requests - findings.broken <= total <= findings.requests:
            findings.problems.append(f"{findings.requests} requests ended {total} times: {ended}")
        if ended["cancelled"] > findings.broken:
            findings.problems.append(f"{ended['cancelled']} tickets cancelled, {findings.broken} connections broken")
        return ended

    async def status(self) -> dict[str, Any]:
        """Asked until it answers: a frontend or the controller may be away."""
        until = time.monotonic() + 30.0
        while True:
            try:
                found: dict[str, Any] = await checks.fetch(self.session, self.url, "/status")
                return found
            except (aiohttp.ClientError, TimeoutError, ValueError):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)

    # -- what a kind needs before it may hurt something

    async def ready_for(self, kind: ProcessFault) -> bool:
        """Its target is there, and so is what must serve the requests meanwhile."""
        status = await self.status()
        decode, prefill = (len(targets.ready_replicas(status, pool)) for pool in ("decode", "prefill"))
        frontends = targets.count(Target.FRONTEND, self.service.mark)
        answering = len(status["frontends"])
        if kind.target.pool == "decode":
            return decode >= 2
        if kind.target.pool == "prefill":
            return prefill >= 1 and decode >= 1
        if kind.target is Target.FRONTEND:
            return frontends >= 2 and answering >= 2 and decode >= 1
        return decode >= 1 and prefill >= 1 and bool(status["staging"]["nodes"])

    async def whole(self, within_s: float = WHOLE_S) -> None:
        """Waits until everything that was lost is back. Raises when it is not."""
        until = time.monotonic() + within_s
        wanted = {pool: getattr(self.service.spec.pools, pool).replicas for pool in ("prefill", "decode")}
        frontends = self.service.spec.frontend.replicas
        while True:
            status = await self.status()
            there = {pool: len(targets.ready_replicas(status, pool)) for pool in wanted}
            if there == wanted and len(status["frontends"]) == frontends and status["staging"]["nodes"]:
                return
            if time.monotonic() > until:
                raise RuntimeError(f"not whole within {within_s:g} s: {there} of {wanted}, {status['frontends']}")
            await asyncio.sleep(0.5)

    async def choose(self, todo: Counter[str]) -> ProcessFault | None:
        """The kind with most runs to go whose target is there; waits for one. None when there is none for long."""
        until = time.monotonic() + WHOLE_S
        while time.monotonic() < until:
            for name, count in todo.most_common():
                if count and await self.ready_for(process_fault(name)):
                    return process_fault(name)
            await asyncio.sleep(0.5)
        return None

    async def runs(self, kinds: Sequence[str], count: int, seed: int, until: float) -> AsyncIterator[Result]:
        """`count` runs, kinds in turn as their targets are back, no new one after `until`."""
        todo = Counter(kinds[(seed + number) % len(kinds)] for number in range(count))
        for number in range(count):
            if time.monotonic() > until:
                self.say(f"time is up after {number} of {count} runs")
                return
            kind = await self.choose(todo)
            if kind is None:
                raise RuntimeError(f"nothing to hurt is back within {WHOLE_S:g} s: {await self.status()}")
            todo[kind] -= 1
            yield await self.run(kind, seed + number)
