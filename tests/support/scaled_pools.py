"""A controller whose pools scale by occupancy, for tests of how many replicas it asks for."""

from __future__ import annotations

from typing import Any

from controller_driver import ControllerDriver, spec_of

from actors.messages import Role, ScaleDecision, Ticket

QUICK = {
    "mode": "occupancy",
    "target_low": 0.4,
    "target_high": 0.8,
    "look_back_s": 2,
    "up_hold_s": 1,
    "down_hold_s": 10,
    "warm_up_s": 3,
    "step_up_max": 4,
    "step_down_max": 1,
}


ADMISSION = {"queue_max": 100, "queue_wait_s": 100, "stale_after_s": 2, "fence_after_s": 20}


def scaled_rig(decodes: int = 2, prefills: int = 0, **more: Any) -> ControllerDriver:
    pools = {
        "prefill": {"replicas": prefills, "min_replicas": 0, "max_replicas": 8, "gpus_per_replica": 2},
        "decode": {"replicas": decodes, "min_replicas": 1, "max_replicas": 8, "gpus_per_replica": 4},
    } | more.pop("pools", {})
    rig = ControllerDriver(spec_of(scaling=QUICK | more, pools=pools, admission=ADMISSION))
    rig.platform = {Role.DECODE: decodes, Role.PREFILL: prefills}
    rig.ask_sizes()
    rig.decode(*[f"d{n}" for n in range(decodes)])
    if prefills:
        rig.prefill(*[f"p{n}" for n in range(prefills)])
    return rig


def names(rig: ControllerDriver) -> tuple[str, ...]:
    return tuple(rig.machine.registry.replicas)


def run(rig: ControllerDriver, seconds: float, pool: Role | None = Role.DECODE) -> list[ScaleDecision]:
    """The decisions in that time, of one pool or of both."""
    before = len(rig.scaled)
    rig.wait(seconds, beats=names(rig))
    return [decision for decision in rig.scaled[before:] if pool in (None, decision.pool)]


def fill(rig: ControllerDriver, requests: int, prompt: int = 640, tag: str = "r") -> list[int]:
    """Each takes 22 blocks of the 95 usable of 100."""
    return [rig.ask(f"{tag}{n}", prompt=prompt, most=64) for n in range(requests)]


def live(rig: ControllerDriver) -> list[Ticket]:
    return [each.ticket for each in rig.machine.registry.tickets.values()]
