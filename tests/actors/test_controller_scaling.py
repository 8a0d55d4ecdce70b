"""How many replicas, and why: band, hysteresis, look-back, steps, growth, cold and stale replicas, zero, the budget."""

from __future__ import annotations

import math
import random

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of
from scaled_pools import fill, live, names, run, scaled_rig

from actors.controller.events import Tick
from actors.controller.status import status
from actors.messages import Role


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
    assert "its bounds say 2" in next(d.reason for d in rig.scaled if d.pool is Role.DECODE)


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


def test_a_stale_replica_is_full_for_choosing_and_no_growth_of_demand() -> None:
    rig = scaled_rig(4)
    fill(rig, 7)  # 154 of 400
    run(rig, 6)
    rig.machine.registry.replicas["d1"].stale = True
    assert run(rig, 3) == []
    rig.wait(7, beats=("d0", "d2", "d3"))
    assert [each for each in rig.scaled if each.target > each.current] == []


@pytest.mark.parametrize("seed", range(3))
def test_one_failed_call_orders_nothing(seed: int) -> None:
    dice = random.Random(seed)
    rig = scaled_rig(4, step_down_max=1)
    for name in ("d0", "d1", "d2", "d3"):
        rig.left(name)
    rig.decode("e0", "e1", "e2", "e3", blocks_total=10_000, max_model_len=1 << 16)
    tickets = [rig.admit(f"r{n}", prompt=dice.randrange(1_000, 20_000), most=400) for n in range(24)]
    run(rig, 8)
    lost = tickets[0].decode
    rig.lost(tickets[0], Role.DECODE)
    rig.wait(1.5, beats=tuple(name for name in names(rig) if name != lost))  # its next heartbeat comes late
    run(rig, 4)
    assert [each for each in rig.scaled if each.pool is Role.DECODE and each.target > each.current] == []


def test_a_cold_replica_is_named() -> None:
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


def test_many_short_requests_that_take_every_slot_are_a_reason_to_grow() -> None:
    rig = scaled_rig(1)
    rig.left("d0")
    rig.decode("e0", blocks_total=2_912, max_num_seqs=32)
    for n in range(60):
        rig.ask(f"r{n}", prompt=64, most=32)
    (decision,) = run(rig, 2)
    assert decision.target > 1 and "sequence slots needed" in decision.reason


def test_the_first_request_of_a_pool_that_was_never_seen_orders_one_replica() -> None:
    rig = scaled_rig(0, pools={"decode": {"replicas": 0, "min_replicas": 0, "max_replicas": 4}})
    rig.ask("first")
    run(rig, 20)
    assert rig.platform[Role.DECODE] == 1


def asleep(start_up_s: float) -> ControllerDriver:
    """A decode pool at zero whose last replica took so long to start."""
    rig = scaled_rig(0, pools={"decode": {"replicas": 0, "min_replicas": 0, "max_replicas": 2}})
    rig.ask("first")
    run(rig, 1)
    assert rig.platform[Role.DECODE] == 1
    for _ in range(int(start_up_s)):
        rig.starting("d0", Role.DECODE)
        run(rig, 1)
    rig.decode("d0")
    for ticket in live(rig):
        rig.end(ticket)
    rig.wait(max(15.0, 1.5 * start_up_s), beats=("d0",))
    assert rig.platform[Role.DECODE] == 0
    rig.leaving("d0")
    rig.left("d0")
    return rig


def test_a_request_that_wakes_a_pool_waits_for_the_start_up_that_was_seen() -> None:
    rig = asleep(50)
    call = rig.ask("again")
    run(rig, 49)
    assert rig.answer(call) is None and rig.platform[Role.DECODE] == 1
    rig.decode("d1")
    assert rig.answer(call).decode == "d1"


def test_a_request_that_cannot_wait_so_long_hears_at_once_when_it_can_come_back() -> None:
    rig = asleep(50)
    refused = rig.busy("impatient", patience_s=20.0)
    assert 30 <= refused.retry_after_s <= 35 and "it would wait for" in refused.reason


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
    assert decided == [{"pool": "prefill", "direction": "up", "cause": "pressure", "times": 1}]


def test_prefill_at_zero_wakes_for_as_much_as_a_replica_is_worth_and_not_for_less() -> None:
    rig = scaled_rig(8, prefills=0, prefill_queue_tokens=4000)
    run(rig, 5)
    rig.admit("one", prompt=3000, most=8)  # 0.6 s of work, as was learnt so far
    assert run(rig, 1, pool=Role.PREFILL) == []
    assert "decode computes the prompts: " in rig.machine.autoscaler.reason(Role.PREFILL)
    assert run(rig, 5, pool=Role.PREFILL) == []
    decisions = []
    for n in range(6):
        rig.admit(f"r{n}", prompt=3000, most=8)
        decisions += run(rig, 0.5, pool=Role.PREFILL)
    assert [(up.current, up.target) for up in decisions] == [(0, 1)]


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


def test_a_burst_of_a_second_is_not_extrapolated_as_if_it_went_on() -> None:
    rig = scaled_rig(1, pools={"decode": {"replicas": 1, "max_replicas": 40}}, step_up_max=40, warm_up_s=15)
    run(rig, 20)
    for n in range(30):
        rig.ask(f"a{n}", prompt=200, most=500)
    rig.wait(1, beats=names(rig))
    for n in range(30):
        rig.ask(f"b{n}", prompt=200, most=500)
    run(rig, 4)
    assert rig.scaled
    needed = 60 * 22 / 100 / 0.6
    assert max(d.target for d in rig.scaled) <= 2 * needed + 1, "at most what came once more, never a multiple of it"


def test_what_comes_is_at_most_what_the_queue_can_hold() -> None:
    rig = scaled_rig(1, pools={"decode": {"replicas": 1, "max_replicas": 90}}, step_up_max=90, warm_up_s=60)
    for n in range(200):
        rig.ask(f"r{n}", prompt=640, most=64)
        if n % 20 == 0:
            run(rig, 0.5)
    run(rig, 2)
    assert max(d.target for d in rig.scaled) <= math.ceil((100 + 100 * 22) / 100 / 0.6)


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
