"""What the controller makes of news about processes, of other models beside the old one, and of a new configuration."""

from __future__ import annotations

from controller_driver import SECOND, ControllerDriver, spec_of

from actors.controller.events import Effect, FrontendGone, Replace, Tick
from actors.messages import Configure, Fingerprint, HeartbeatReply, ReplicaLeft, Role


def replaced(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(effect.kind, effect.name) for effect in effects if isinstance(effect, Replace)]


def silence(
    rig: ControllerDriver, seconds: float, beats: tuple[str, ...] = (), reports: bool = True
) -> list[tuple[str, str]]:
    """Time passes; what is asked to be replaced meanwhile."""
    found: list[tuple[str, str]] = []
    for _ in range(int(seconds * 2)):
        rig.now += SECOND // 2
        for name in beats:
            rig.beat(name)
        if reports:
            rig.report()
        found += replaced(rig.step(Tick()))
    return found


def test_a_silent_replica_is_replaced_once() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    assert silence(rig, 4, beats=("d2",)) == []
    assert silence(rig, 20, beats=("d2",)) == [("replica", "d1")]


def test_a_silent_transfer_actor_is_replaced_once_until_it_is_back() -> None:
    rig = ControllerDriver()
    rig.decode("d1")
    rig.report()
    assert silence(rig, 20, beats=("d1",), reports=False) == [("transfer", "n")]
    rig.report(incarnation=2)
    assert silence(rig, 20, beats=("d1",), reports=False) == [("transfer", "n")]


def test_a_dead_process_costs_its_tickets_no_time() -> None:
    rig = ControllerDriver()
    rig.prefill("p1")
    rig.decode("d1", "d2")
    ticket = rig.admit("r")
    rig.step(ReplicaLeft(ticket.decode, 1, "has died"))
    assert [(order.kind, order.replica_id) for _, order in rig.orders] == [("lost", ticket.decode)]
    assert ticket.decode not in rig.machine.registry.replicas
    # A heartbeat that was under way brings it back as little as one of another life would.
    assert rig.beat(ticket.decode).draining
    assert rig.audit() == []


def test_news_of_an_older_life_changes_nothing() -> None:
    rig = ControllerDriver()
    rig.decode("d1", incarnation=2)
    rig.step(ReplicaLeft("d1", 1, "has died"))
    assert "d1" in rig.machine.registry.replicas


def test_a_dead_frontend_takes_its_requests_with_it_at_once() -> None:
    rig = ControllerDriver()
    rig.prefill("p1")
    rig.decode("d1", "d2")
    mine, theirs = rig.admit("r", frontend="f"), rig.admit("r", frontend="g")
    rig.step(FrontendGone("f"))
    assert set(rig.machine.registry.tickets) == {theirs.ticket_id}
    assert (mine.ticket_id, 1) in rig.beat(mine.decode).cancel
    assert rig.machine.counters["cancelled"] == 1
    rig.step(FrontendGone("f"))
    rig.step(FrontendGone("unknown"))
    assert rig.audit() == []


def test_another_model_may_come_in_beside_the_old_one() -> None:
    rig = ControllerDriver()
    other = Fingerprint(geometry={"layers": 3}, tokenizer="u")
    rig.decode("old", generation="v1")
    assert isinstance(rig.join("odd", Role.DECODE, generation="v1", fingerprint=other), Exception)
    assert isinstance(rig.join("new", Role.DECODE, generation="v2", fingerprint=other), HeartbeatReply)
    rig.prefill("p1", generation="v1")
    rig.prefill("p2", generation="v2", fingerprint=other)
    for tokenizer, decode, prefill in (("t", "old", "p1"), ("u", "new", "p2")):
        for number in range(4):
            ticket = rig.admit(f"{tokenizer}{number}", tokenizer=tokenizer)
            assert (ticket.decode, ticket.prefill) == (decode, prefill)


def test_a_new_configuration_counts_from_now_on() -> None:
    rig = ControllerDriver()
    rig.ask("first")
    waiting = rig.machine.queue
    assert len(waiting) == 1
    rig.step(Configure(spec_of(admission={"queue_max": 1, "queue_wait_s": 3})))
    refused = rig.busy("second")
    assert "wait already" in refused.reason
    assert rig.machine.spec.admission.queue_max == 1
    scaled = {"replicas": 3, "min_replicas": 2, "max_replicas": 4}
    rig.step(Configure(spec_of(pools={"decode": scaled, "prefill": {"replicas": 1}})))
    rig.platform = {Role.DECODE: 1, Role.PREFILL: 1}
    rig.wait(1)
    assert rig.platform == {Role.DECODE: 3, Role.PREFILL: 1}
    # Scaled by the controller meanwhile, inside the bounds: another setting does not undo that.
    rig.platform[Role.DECODE] = 4
    rig.step(Configure(spec_of(pools={"decode": scaled, "prefill": {"replicas": 1}}, admission={"queue_max": 9})))
    rig.wait(1)
    assert rig.platform[Role.DECODE] == 4
