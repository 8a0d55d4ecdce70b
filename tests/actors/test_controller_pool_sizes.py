"""Sizes that the platform holds, that a person sets by hand, and that a deployment brings."""

from __future__ import annotations

from controller_driver import SECOND, ControllerDriver, spec_of
from scaled_pools import ADMISSION, QUICK, fill, run, scaled_rig

from actors.controller.machine import Machine
from actors.messages import Configure, Role


def test_a_target_that_the_platform_does_not_take_is_asked_again_later() -> None:
    rig = scaled_rig(2)
    rig.refuses = True
    fill(rig, 8)
    assert [d.target for d in run(rig, 3)] == [3]
    assert run(rig, 8.5) == []
    assert rig.machine.autoscaler.sizes.target(Role.DECODE, rig.now) == 2
    run(rig, 1.5)
    assert rig.machine.counters["targets_refused_decode"] == 1
    assert "did not take 3 within 8 s" in rig.machine.autoscaler.reason(Role.DECODE)
    rig.refuses = False
    assert [d.target for d in run(rig, 6)] == [3] and rig.platform[Role.DECODE] == 3


def test_what_the_platform_holds_is_where_each_decision_starts() -> None:
    rig = scaled_rig(2)
    fill(rig, 8)
    rig.platform[Role.DECODE] = 5  # by others: a dashboard, a new deployment
    assert run(rig, 5) == []
    assert rig.machine.autoscaler.sizes.target(Role.DECODE, rig.now) == 5
    assert "of 500" in rig.machine.autoscaler.reason(Role.DECODE)


def test_a_smaller_size_after_a_deployment_is_seen_and_mended() -> None:
    rig = scaled_rig(4)
    fill(rig, 14)  # 308 of 400
    assert run(rig, 10) == []
    rig.platform[Role.DECODE] = 1  # Serve took the size from the configuration
    assert run(rig, 2)[-1].target > 1


def test_nothing_is_decided_while_the_platforms_size_is_unknown() -> None:
    rig = scaled_rig(2)
    rig.silent = True
    fill(rig, 8)
    run(rig, 9)
    before = len(rig.scaled)
    rig.machine.autoscaler.decisions.clear()
    assert run(rig, 20) == [] and before <= 1
    assert "has not said how many replicas it holds" in rig.machine.autoscaler.reason(Role.DECODE)
    rig.silent = False
    assert [d.current for d in run(rig, 3)] == [2]


def test_a_restarted_controller_takes_the_size_that_it_finds() -> None:
    """Ten busy replicas, a spec that says one: the spec is of the start, the platform's size is of now."""
    rig = ControllerDriver(
        spec_of(scaling=QUICK, admission=ADMISSION, pools={"decode": {"replicas": 1, "max_replicas": 12}})
    )
    rig.machine = Machine(rig.spec, 8, rig.now, fresh=False)
    rig.platform = {Role.DECODE: 10, Role.PREFILL: 1}
    rig.decode(*[f"d{n}" for n in range(10)])
    rig.prefill("p0")
    fill(rig, 37)  # 82 %
    assert min((d.target for d in run(rig, 8)), default=10) >= 10
    assert rig.platform[Role.DECODE] >= 10


def test_a_fresh_application_gets_the_sizes_of_its_spec() -> None:
    rig = ControllerDriver(spec_of(pools={"decode": {"replicas": 3, "min_replicas": 1, "max_replicas": 4}}))
    rig.platform = {Role.DECODE: 1, Role.PREFILL: 0}  # Serve starts pools at their lower bounds
    rig.wait(1)
    assert rig.platform == {Role.DECODE: 3, Role.PREFILL: 1}


def test_by_hand_in_every_mode_inside_the_bounds() -> None:
    for mode in ("off", "occupancy"):
        rig = scaled_rig(2, mode=mode)
        assert rig.set_target(Role.DECODE, 3, hold_s=600) == ""
        run(rig, 1)
        assert rig.platform[Role.DECODE] == 3
        fill(rig, 12, tag=mode)
        run(rig, 30)
        assert rig.platform[Role.DECODE] == 3, "held"
        assert "outside pools.decode.min_replicas 1 .. max_replicas 8" in rig.set_target(Role.DECODE, 9)
        assert "outside" in rig.set_target(Role.DECODE, 0)


def test_after_a_hold_by_hand_the_scaler_decides_again() -> None:
    rig = scaled_rig(2)
    assert rig.set_target(Role.DECODE, 6, hold_s=20) == ""
    run(rig, 19)
    assert rig.platform[Role.DECODE] == 6
    run(rig, 30)
    assert rig.platform[Role.DECODE] < 6


def test_by_hand_the_gpu_budget_holds_too() -> None:
    rig = scaled_rig(1, prefills=1, gpu_budget=12)
    assert "gpu_budget 12 allows 2 decode replicas, not 3" in rig.set_target(Role.DECODE, 3)


def test_a_replica_without_room_is_seen_within_ten_seconds_and_counts_as_none_on_its_way() -> None:
    rig = scaled_rig(1)
    fill(rig, 4)
    run(rig, 3)
    assert rig.platform[Role.DECODE] == 2
    sizes = rig.machine.autoscaler.sizes
    assert sizes.arriving(Role.DECODE, rig.now, 30 * SECOND)
    run(rig, 9)
    assert sizes.unplaced(Role.DECODE) == 1
    assert "1 of 2 replicas found no room" in rig.machine.autoscaler.reason(Role.DECODE)
    assert not sizes.arriving(Role.DECODE, rig.now, 30 * SECOND)
    assert any("found no room" in line for line in rig.logs)
    rig.starting("d9", Role.DECODE)
    run(rig, 0.5)
    assert sizes.unplaced(Role.DECODE) == 0 and len(sizes.arriving(Role.DECODE, rig.now, 30 * SECOND)) == 1
    assert any("found room" in line for line in rig.logs)


def test_the_start_up_time_is_learnt_from_order_to_joined() -> None:
    rig = scaled_rig(1)
    fill(rig, 4)
    run(rig, 3)
    ordered = rig.scaled[-1]
    assert ordered.target == 2
    run(rig, 4)
    for _ in range(20):
        rig.starting("d9", Role.DECODE)
        run(rig, 2)
    rig.decode("d9")
    took = rig.machine.autoscaler.start_up_s(Role.DECODE)
    assert 43 <= took <= 48


def test_of_two_configurations_the_later_deployments_counts() -> None:
    rig = ControllerDriver()
    rig.step(Configure(spec_of(admission={"queue_max": 7}), deployment=5))
    rig.step(Configure(spec_of(admission={"queue_max": 3}), deployment=4))  # of a frontend that is being replaced
    assert rig.machine.spec.admission.queue_max == 7
    rig.step(Configure(spec_of(admission={"queue_max": 3}), deployment=6))
    assert rig.machine.spec.admission.queue_max == 3
