"""A minute in which everything happens at once: mixed load, clients that hang up and come back, and five blows.

The decode pool shrinks and grows again, the node's transfer actor is stopped for twenty seconds, the controller hangs,
a frontend is killed. 16 clients ask for one answer after another, five leave at random moments and ask again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.fault_kinds import Target
from ops.chaos.processes import checks, load, scaling, targets
from ops.chaos.processes.campaign import Campaign, Result
from ops.chaos.processes.forms import FORMS

STORM_S = 60.0
PATIENT, LEAVING = 16, 5  # clients
STAY_S = (0.02, 4.0)  # how long a leaving client waits
RETRY_S = 0.06
TRANSFER_STOPPED_S = 20.0
ANSWER_S = 300.0  # a client of a storm waits for long
CHECKED = 40  # greedy answers whose tokens are checked one by one
JITTER_S = 2.0


@dataclass(slots=True)
class _Storm:
    campaign: Campaign
    rng: random.Random
    began: float
    answers: list[load.Answer] = field(default_factory=list)
    strikes: list[dict[str, Any]] = field(default_factory=list)
    killed_at: float = 0.0  # the frontend
    stall_s: float = 0.0
    phases: dict[str, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > STORM_S

    # -- clients

    async def patient(self, number: int) -> None:
        rng = random.Random(f"{self.rng.random()}/{number}")
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        while not self.over:
            form = rng.choice(FORMS)
            body = form.body(self.campaign.model, rng)
            self.answers.append(await load.ask(self.campaign.session, self.campaign.url, form, body))
            if self.answers[-1].status in checks.PROXY_ERRORS:
                await asyncio.sleep(1.0)  # as a client does whose frontend has just died

    async def leaving(self, number: int) -> None:
        rng = random.Random(f"{self.rng.random()}/leaving {number}")
        while not self.over:
            form = rng.choice(FORMS)
            body = form.body(self.campaign.model, rng)
            for _ in range(rng.randint(1, 4)):  # the same request again
                stay_s = rng.uniform(*STAY_S)
                session, url = self.campaign.session, self.campaign.url
                self.answers.append(await load.ask_and_leave(session, url, form, body, stay_s))
                await asyncio.sleep(RETRY_S)

    # -- blows

    async def strike(self, at_s: float, name: str, blow: Callable[[], Awaitable[str]]) -> None:
        at_s += self.rng.uniform(0.0, JITTER_S)
        await asyncio.sleep(max(0.0, self.began + at_s - time.monotonic()))
        now_s = round(time.monotonic() - self.began, 2)
        self.strikes.append({"at_s": now_s, "what": name, "victim": await blow()})

    async def decode_pool(self, count: int) -> str:
        await scaling.set_target(self.campaign, count)
        return f"{count} replicas"

    def _find(self, target: Target) -> tuple[int, str]:
        return targets.find(target, {}, self.campaign.service.mark, self.rng)

    async def stop_transfer(self) -> str:
        pid, name = self._find(Target.TRANSFER)
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(TRANSFER_STOPPED_S, _go_on, pid)
        return name

    async def hang_controller(self) -> str:
        pid, name = self._find(Target.CONTROLLER)
        os.kill(pid, signal.SIGSTOP)
        return name

    async def kill_frontend(self) -> str:
        pid, name = self._find(Target.FRONTEND)
        self.killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return name

    # -- what is seen meanwhile

    async def watch(self) -> None:
        while True:
            status = await self.campaign.status()
            self.stall_s = max(self.stall_s, *status["stalls_s"].values(), 0.0)
            seen = {**status["tickets"]["by_state"], "queued": status["queue"]["waiting"]}
            self.phases |= {name: max(count, self.phases.get(name, 0)) for name, count in seen.items() if count}
            await asyncio.sleep(1.0)


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # the controller took it for hung and had it replaced


async def storm(campaign: Campaign, seed: int) -> Result:
    began = time.monotonic()
    now = _Storm(campaign, random.Random(f"storm/{seed}"), began)
    watching = asyncio.create_task(now.watch())
    blows = (
        now.strike(2.0, "decode pool shrinks", lambda: now.decode_pool(1)),
        now.strike(5.0, "transfer actor stopped for 20 s", now.stop_transfer),
        now.strike(12.0, "decode pool grows", lambda: now.decode_pool(2)),
        now.strike(30.0, "controller hangs", now.hang_controller),
        now.strike(50.0, "frontend killed", now.kill_frontend),
    )
    clients = [now.patient(number) for number in range(PATIENT)] + [now.leaving(number) for number in range(LEAVING)]
    await asyncio.gather(*blows, *clients)
    seconds = time.monotonic() - began
    await campaign.whole(300.0)
    leaked, rest_s = await checks.rest(campaign.session, campaign.url, 90.0)
    watching.cancel()
    findings = judge(now.answers, now.killed_at)
    plain = [each for each in now.answers if each.form.plain and each.ended == "complete"]
    chosen = now.rng.sample(plain, min(CHECKED, len(plain)))
    for each in await checks.implausible(campaign.session, campaign.url, campaign.model, chosen):
        findings.token_faults += 1
        findings.problems.append(each)
    more = {"stall_s": now.stall_s, "strikes": now.strikes, "tokens_checked_of": len(chosen)}
    return Result("storm", seed, now.phases, "all", seconds, rest_s, findings, leaked, more=more)


def judge(answers: Sequence[load.Answer], killed_at: float) -> checks.Findings:
    """A connection may break only if it was open when the frontend was killed, or was made in the moment after."""
    across = [each for each in answers if each.start_s <= killed_at + 2.0 and killed_at <= each.end_s]
    others = [each for each in answers if each not in across]
    broken, found = checks.judge(across, may_break=True), checks.judge(others, may_break=False)
    for name in ("requests", "complete", "clear_errors", "left", "broken", "lost", "token_faults", "tokens"):
        setattr(found, name, getattr(found, name) + getattr(broken, name))
    found.problems += broken.problems
    return found
