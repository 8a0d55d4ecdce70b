"""Clients that hang up at random moments: in the queue, in a prefill, in a hand-over, in the middle of a stream."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

from ops.chaos.processes import checks, load
from ops.chaos.processes.campaign import SPREAD_S, Campaign, Result
from ops.chaos.processes.forms import FORMS, Form, Recovery

LEAVE_S = (0.02, 4.0)  # after a request was sent
AT_ONCE_S = 3.0  # nothing may be held for longer after the last client has gone; a heartbeat or two, and a step
GREEDY_LONG = Form("greedy, for long", Recovery.ALWAYS, 600, prompt_words=640)
CROWD = 24  # of these; the pool has room for ten


async def hang_up(campaign: Campaign, seed: int) -> Result:
    """Every other request of two waves is left by its client; the others do not notice."""
    return await _leave(campaign, "hang-up", seed, (*FORMS, *FORMS), share=0.5, longest_s=LEAVE_S[1])


async def hang_up_queued(campaign: Campaign, seed: int) -> Result:
    """More than there is room for: all leave, most of them from the queue."""
    return await _leave(campaign, "hang-up-queued", seed, (GREEDY_LONG,) * CROWD, share=1.0, longest_s=8.0)


async def _leave(
    campaign: Campaign, kind: str, seed: int, forms: Sequence[Form], share: float, longest_s: float
) -> Result:
    rng = random.Random(f"{kind}/{seed}")
    before = await campaign.status()
    phases: Counter[str] = Counter()
    began = time.monotonic()

    async def one(form: Form, wait_s: float, stay_s: float | None) -> load.Answer:
        body = form.body(campaign.model, rng)
        await asyncio.sleep(wait_s)
        if stay_s is None:
            return await load.ask(campaign.session, campaign.url, form, body)
        return await load.ask_and_leave(campaign.session, campaign.url, form, body, stay_s)

    stays = [rng.uniform(LEAVE_S[0], longest_s) if rng.random() < share else None for _ in forms]
    todo = [one(form, rng.uniform(0.0, SPREAD_S), stay) for form, stay in zip(forms, stays, strict=True)]
    watching = asyncio.create_task(_watch(campaign, phases))
    answers = await asyncio.gather(*todo)
    seconds = time.monotonic() - began
    leaked, rest_s = await checks.rest(campaign.session, campaign.url)
    watching.cancel()
    findings = checks.judge(answers, may_break=False)
    if rest_s > AT_ONCE_S:
        findings.problems.append(f"at rest only {rest_s:.1f} s after the last client had gone")
    after = await campaign.status()
    was, now = before["tickets"]["ended"], after["tickets"]["ended"]
    ended = {outcome: now[outcome] - was[outcome] for outcome in now}
    # A client that leaves before its request is admitted has no ticket.
    if ended["failed"] or ended["done"] < findings.complete or sum(ended.values()) > findings.requests:
        findings.problems.append(f"{findings.complete} complete, {findings.left} left, tickets ended {ended}")
    for each in await checks.implausible(campaign.session, campaign.url, campaign.model, answers):
        findings.token_faults += 1
        findings.problems.append(each)
    return Result(kind, seed, dict(phases), "clients", seconds, rest_s, findings, leaked, ended)


async def _watch(campaign: Campaign, phases: Counter[str]) -> None:
    """How many requests were in which phase at most: what the clients left."""
    while True:
        status = await campaign.status()
        seen = {**status["tickets"]["by_state"], "queued": status["queue"]["waiting"]}
        for phase, count in seen.items():
            if count:
                phases[phase] = max(phases[phase], count)
        await asyncio.sleep(0.05)
