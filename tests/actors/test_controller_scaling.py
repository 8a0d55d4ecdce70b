"""How many replicas, and why: band, hysteresis, look-back, steps, growth, cold and stale replicas, zero, the budget."""

from __future__ import annotations

from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of

from actors.controller.events import Scaled, Targets, Tick
from actors.controller.status import status
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


def test_inside_the_band_nothing_happens() -> None:
    rig = scaled_rig(2)
    fill(rig, 5)  # 110 of 200 blocks
    assert run(rig, 30) == []
    assert "in its band" in rig.machine.autoscaler.reason(Role.DECODE)


def test_above_the_band_it_grows_after_the_hold_to_the_middle_and_says_why() -> None:
    rig = scaled_rig(2)
    fill(rig, 8)  # 176 of 200 blocks: 88 %
    assert run(rig, 0.5) == [] and "for less than 1 s" in rig.machine.autoscaler.reason(Role.DECODE)
    (decision,) = run(rig, 3)
    assert (decision.pool, decision.current, decision.target) == (Role.DECODE, 2, 3)
    assert "176 KV blocks needed" in decision.reason and "above 80%" in decision.reason


def test_a_spike_shorter_than_the_hold_is_ignored() -> None:
    rig = scaled_rig(2)
    fill(rig, 8)
    rig.wait(0.5, beats=names(rig))
    for ticket in live(rig)[:6]:
        rig.end(ticket)
    assert run(rig, 5) == []


def test_what_waits_in_the_queue_counts_at_once_and_steps_are_bounded() -> None:
    rig = scaled_rig(1, step_up_max=3)
    fill(rig, 20)
    (decision,) = run(rig, 2)
    assert decision.target == 4 and "the step limit says 4" in decision.reason and "of them waiting" in decision.reason


def test_capacity_that_is_on_its_way_is_not_ordered_twice() -> None:
    rig = scaled_rig(2)
    fill(rig, 8)
    assert [d.target for d in run(rig, 20)] == [3], "the third has not come yet, and that is known"


def test_the_maximum_holds() -> None:
    rig = scaled_rig(1, pools={"decode": {"replicas": 1, "max_replicas": 2}})
    fill(rig, 60)
    assert [d.target for d in run(rig, 10)] == [2]
    assert "its bounds say 2" in rig.scaled[-1].reason


def test_below_the_band_it_shrinks_one_by_one_and_only_after_a_long_quiet() -> None:
    rig = scaled_rig(4)
    fill(rig, 2)  # 44 of 400
    assert run(rig, 9) == []
    (first,) = run(rig, 3)
    assert (first.current, first.target) == (4, 3) and "never above" in first.reason
    rig.leaving("d3")
    rig.left("d3")
    assert run(rig, 6) == [], "the next step is earned anew"
    assert [d.target for d in run(rig, 6)] == [2]


def test_a_burst_during_the_quiet_holds_the_pool() -> None:
    rig = scaled_rig(4)
    run(rig, 8)
    fill(rig, 12)  # 66 % of 400
    run(rig, 0.5)
    for ticket in live(rig):
        rig.end(ticket)
    assert run(rig, 5) == []


def test_growth_of_what_runs_is_foreseen() -> None:
    rig = scaled_rig(1)
    for n in range(20):  # teaches that answers of this size have about 1,350 tokens
        rig.end(rig.admit(f"t{n}", prompt=32, most=2000), tokens=1350)
    run(rig, 3)
    for n in range(2):
        rig.admit(f"r{n}", prompt=32, most=2000)  # two blocks each now, 44 at the end
    rig.beat("d0", held=4)
    (decision,) = run(rig, 4)
    assert decision.target == 2 and rig.machine.registry.replicas["d0"].occupancy.blocks_held < 10


def test_stale_replicas_count_as_full() -> None:
    rig = scaled_rig(2)
    fill(rig, 6)  # 66 of 100 each
    rig.wait(7, beats=("d0",))
    (decision,) = [each for each in rig.scaled if each.pool is Role.DECODE]
    assert decision.target == 3 and "1 stale and counted as full" in decision.reason


def test_a_cold_replica_is_told_of() -> None:
    rig = scaled_rig(2)
    run(rig, 5)
    rig.decode("d2")
    run(rig, 1)
    assert "1 cold" in rig.machine.autoscaler.reason(Role.DECODE)
    run(rig, 4)
    assert "cold" not in rig.machine.autoscaler.reason(Role.DECODE)


def test_zero_and_back_with_a_waiting_room() -> None:
    rig = scaled_rig(1, pools={"decode": {"replicas": 1, "min_replicas": 0, "max_replicas": 4}})
    (down,) = run(rig, 12)
    assert (down.current, down.target) == (1, 0) and "idle for 10 s" in down.reason
    rig.leaving("d0")
    rig.left("d0")
    assert run(rig, 20) == []
    call = rig.ask("first")
    (up,) = run(rig, 1)
    assert (up.current, up.target) == (0, 1) and "woken by a request" in up.reason
    assert rig.answer(call) is None
    rig.decode("d9")
    assert rig.answer(call).decode == "d9"


def test_one_replica_stays_while_requests_come() -> None:
    rig = scaled_rig(1, pools={"decode": {"replicas": 1, "min_replicas": 0, "max_replicas": 4}})
    for n in range(10):
        rig.end(rig.admit(f"r{n}", prompt=32, most=8))
        rig.admit(f"s{n}", prompt=32, most=8)
        run(rig, 2)
        for ticket in live(rig):
            rig.end(ticket)
    assert all(decision.pool is Role.PREFILL for decision in rig.scaled)


def test_prefill_scales_by_queued_prompt_tokens_and_by_itself() -> None:
    rig = scaled_rig(8, prefills=1, prefill_queue_tokens=1000)
    for n in range(8):
        rig.admit(f"r{n}", prompt=320)
    decisions = run(rig, 3, pool=None)
    assert [(d.pool, d.current, d.target) for d in decisions] == [(Role.PREFILL, 1, 5)]
    assert "prompt tokens" in decisions[0].reason
    decided = status(rig.machine, rig.now)["scaling"]["decided"]
    assert decided == {"prefill": {"up": 1, "down": 0}, "decode": {"up": 0, "down": 0}}


def test_both_pools_share_the_gpu_budget_and_decode_goes_first() -> None:
    rig = scaled_rig(1, prefills=1, prefill_queue_tokens=1000, gpu_budget=12)
    fill(rig, 12)
    decisions = {d.pool: d for d in run(rig, 2, pool=None)}
    assert decisions[Role.DECODE].target == 2 and "GPU budget of 12 allows 2" in decisions[Role.DECODE].reason
    assert decisions[Role.PREFILL].target == 2, "2 x 4 + 2 x 2 GPUs"
    assert run(rig, 10, pool=None) == [], "the budget is used up"
    assert "GPU budget of 12" in rig.machine.autoscaler.reason(Role.DECODE)


def test_a_pool_that_is_off_stays_off() -> None:
    rig = scaled_rig(1, pools={"prefill": {"replicas": 0, "max_replicas": 1, "min_replicas": 0}})
    fill(rig, 3)
    run(rig, 5)
    assert all(d.pool is Role.DECODE for d in rig.scaled)


def test_a_refusal_by_the_platform_is_asked_again_later() -> None:
    rig = scaled_rig(2)
    fill(rig, 8)
    (decision,) = run(rig, 3)
    rig.step(Scaled(Role.DECODE, decision.target, False, "no resources"))
    assert rig.machine.autoscaler.targets[Role.DECODE] == 2
    assert run(rig, 4) == []
    assert [d.target for d in run(rig, 4)] == [3]


def test_the_platforms_own_targets_are_taken_over() -> None:
    rig = scaled_rig(2)
    rig.step(Targets(0, 5))
    assert rig.machine.autoscaler.targets[Role.DECODE] == 5


def test_off_means_off() -> None:
    rig = ControllerDriver(spec_of(scaling={"mode": "off"}))
    rig.decode("d")
    fill(rig, 4)
    rig.wait(60, beats=("d",))
    assert rig.scaled == []


@pytest.mark.parametrize("pause_s", [30, 300])
def test_a_pause_of_the_controller_is_no_quiet_time(pause_s: int) -> None:
    rig = scaled_rig(4)
    run(rig, 2)
    rig.now += pause_s * SECOND
    rig.step(Tick())
    assert run(rig, 1) == [], "it saw nothing in that time, so it knows nothing of it"
