"""A request that ends every engine it is in: after two it gets one to itself, and fails when that one ends too.

While no replica is free for it within a quarter of `queue_wait_s` it runs beside others and may end those engines as
well; the others go on elsewhere each time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from ops.chaos.processes import checks, load, targets
from ops.chaos.processes.campaign import Campaign, Result
from ops.chaos.processes.forms import Form, Recovery

POISON = Form("the request that ends engines", Recovery.ERROR, 900)
INNOCENT = Form("greedy, beside it", Recovery.ALWAYS, 300)
NUM_INNOCENT = 4
DEATHS_LEAST, DEATHS_MOST = 3, 5
LONGEST_S = 300.0


async def poison(campaign: Campaign, seed: int) -> Result:
    rng = random.Random(f"poison/{seed}")
    began = time.monotonic()

    def ask(form: Form) -> asyncio.Task[load.Answer]:
        return asyncio.create_task(load.ask(campaign.session, campaign.url, form, form.body(campaign.model, rng)))

    before = {ticket for tickets in (await _tickets(campaign)).values() for ticket in tickets}
    bad = ask(POISON)
    found: set[int] = set()
    while not found:
        found = {ticket for tickets in (await _tickets(campaign)).values() for ticket in tickets} - before
    (ticket_id,) = found
    others = [ask(INNOCENT) for _ in range(NUM_INNOCENT)]
    victims: list[tuple[str, int]] = []  # replica, other tickets there
    while not bad.done() and time.monotonic() - began < LONGEST_S:
        await asyncio.sleep(1.0)  # some tokens
        for replica, tickets in (await _tickets(campaign)).items():
            if ticket_id in tickets and replica not in (name for name, _ in victims):
                status = await campaign.status()
                os.kill(targets.core_of(status, replica), signal.SIGKILL)
                victims.append((replica, len(tickets) - 1))
    answers = await asyncio.gather(*others)
    seconds = time.monotonic() - began
    await campaign.whole(300.0)
    leaked, rest_s = await checks.rest(campaign.session, campaign.url)
    findings = checks.judge(answers, may_break=False)
    answer = await bad
    findings.requests += 1
    findings.clear_errors += 1
    if answer.ended != "error" or f"{len(victims)} engines ended" not in answer.error:
        findings.problems.append(f"the poison request: {answer.ended} {answer.status} {answer.error}")
    if not DEATHS_LEAST <= len(victims) <= DEATHS_MOST or victims[-1][1]:
        findings.problems.append(f"engines that it ended, and how many requests were beside it: {victims}")
    return Result("poison", seed, {}, ", ".join(name for name, _ in victims), seconds, rest_s, findings, leaked)


async def _tickets(campaign: Campaign) -> dict[str, list[int]]:
    """Of each decode replica that has started."""
    audit = await checks.fetch(campaign.session, campaign.url, "/status/audit")
    return {name: each["tickets"] for name, each in audit["replicas"].items() if each["pool"] == "decode"}
