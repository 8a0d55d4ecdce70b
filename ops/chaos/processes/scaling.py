"""The decode pool gets smaller, and the configuration changes, while requests run: no client may notice."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import ray

from actors.messages import Role, SetTarget
from cluster.names import NAMESPACE, controller_actor
from cluster.spec import ClusterSpec
from ops.chaos.processes import checks, load, targets
from ops.chaos.processes.campaign import WHOLE_S, Campaign, Result

LEAVE_S = 60.0


async def scale_down(campaign: Campaign, seed: int) -> Result:
    """One replica of two leaves in the middle of a wave; it takes no new ticket, finishes, and is gone when empty."""
    rng = random.Random(f"scale-down/{seed}")
    await resize(campaign, 2)
    before = await campaign.status()
    began = time.monotonic()
    wave = asyncio.create_task(load.wave(campaign.session, campaign.url, campaign.model, rng, 3.0))
    await asyncio.sleep(rng.uniform(0.3, 2.5))
    status = await campaign.status()
    phase = {state: count for state, count in status["tickets"]["by_state"].items() if count}
    await set_target(campaign, 1)
    more, leaving = await _watch_leaving(campaign)
    answers = await wave
    findings = checks.judge(answers, may_break=False)
    findings.problems += more
    leaked, rest_s = await checks.rest(campaign.session, campaign.url)
    after = await campaign.status()
    ended = {name: after["tickets"]["ended"][name] - before["tickets"]["ended"][name] for name in ("done", "failed")}
    if ended != {"done": findings.complete, "failed": 0}:
        findings.problems.append(f"{findings.complete} complete answers, tickets ended {ended}")
    seconds = time.monotonic() - began
    return Result("scale-down", seed, phase, leaving, seconds, rest_s, findings, leaked, ended)


async def _watch_leaving(campaign: Campaign) -> tuple[list[str], str]:
    """(what was wrong with how it left, its id). The tickets of a draining replica only ever become fewer."""
    until = time.monotonic() + LEAVE_S
    leaving, tickets, problems = "", 1 << 30, list[str]()
    while time.monotonic() < until:
        status = await campaign.status()
        replicas = status["pools"]["decode"]["replicas"]
        draining = [each for each in replicas if each["state"] == "draining"]
        if draining:
            leaving = leaving or str(draining[0]["replica_id"])
            if draining[0]["tickets"] > tickets:
                problems.append(f"draining {leaving} has {draining[0]['tickets']} tickets, and had {tickets}")
            tickets = draining[0]["tickets"]
        if len(replicas) == 1:
            return problems, leaving
        await asyncio.sleep(0.1)
    return [*problems, f"{leaving or 'no replica'} has not left within {LEAVE_S:g} s"], leaving


async def set_target(campaign: Campaign, count: int) -> None:
    controller: Any = ray.get_actor(controller_actor(campaign.service.application), namespace=NAMESPACE)
    problem = await controller.call.remote(SetTarget(Role.DECODE, count))
    if problem:
        raise RuntimeError(f"Serve did not take the target: {problem}")


async def resize(campaign: Campaign, count: int) -> None:
    """Until the decode pool has that many replicas, all of them ready."""
    until = time.monotonic() + WHOLE_S
    await set_target(campaign, count)
    while time.monotonic() < until:
        if len(targets.ready_replicas(await campaign.status(), "decode")) == count:
            return
        await asyncio.sleep(0.25)
    raise RuntimeError(f"the decode pool has not got {count} replicas within {WHOLE_S:g} s")


async def rolling_update(campaign: Campaign, seed: int, what: str) -> Result:
    """Every replica and frontend is replaced by one with other settings or another model, while requests go on."""
    changed = _other_model(campaign) if what == "model" else _other_settings(campaign.service.spec)
    rng = random.Random(f"rolling/{seed}")
    old = await replicas_of(campaign)
    began = time.monotonic()
    waves = asyncio.create_task(_waves_until_replaced(campaign, rng, old))
    await asyncio.sleep(1.0)
    await asyncio.to_thread(campaign.service.deploy, changed)
    answers = await waves
    findings = checks.judge(answers, may_break=False)
    seconds = time.monotonic() - began
    if old & await replicas_of(campaign):
        findings.problems.append(f"replicas of the old configuration are still there: {old}")
    leaked, rest_s = await checks.rest(campaign.session, campaign.url)
    status = await campaign.status()
    if what == "config" and status["queue"]["max"] != changed.admission.queue_max:
        findings.problems.append(f"the controller still has queue_max {status['queue']['max']}")
    return Result(f"rolling-{what}", seed, {}, ", ".join(sorted(old)), seconds, rest_s, findings, leaked)


def _other_settings(spec: ClusterSpec) -> ClusterSpec:
    admission = spec.admission.model_copy(update={"queue_max": spec.admission.queue_max // 2})
    return spec.model_copy(update={"admission": admission})


def _other_model(campaign: Campaign) -> ClusterSpec:
    """The same checkpoint under another name: to the service it is a model whose pages fit no page of the old one."""
    spec = campaign.service.spec
    assert campaign.service.folder is not None
    folder = campaign.service.folder / "another-model"
    folder.mkdir()
    for file in Path(spec.model.path).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    model = spec.model.model_copy(update={"path": str(folder), "name": spec.model.served_name})
    return spec.model_copy(update={"model": model})


async def replicas_of(campaign: Campaign) -> set[str]:
    status = await campaign.status()
    found = {str(each["replica_id"]) for pool in status["pools"].values() for each in pool["replicas"]}
    return found | set(status["frontends"])


async def _waves_until_replaced(campaign: Campaign, rng: random.Random, old: set[str]) -> list[load.Answer]:
    """Waves one after another until nothing of the old configuration is left, and one more."""
    answers: list[load.Answer] = []
    until = time.monotonic() + 2.5 * WHOLE_S
    last = False
    while time.monotonic() < until:
        answers += await load.wave(campaign.session, campaign.url, campaign.model, rng, 6.0)
        if last:
            return answers
        last = not old & await replicas_of(campaign)
    return answers
