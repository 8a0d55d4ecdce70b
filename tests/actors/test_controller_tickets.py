"""A ticket's way through the controller: the way without losses, losses, doubled and late messages, restarts."""

from __future__ import annotations

from controller_driver import ControllerDriver

from actors.controller.registry import EPOCH_SHIFT
from actors.messages import (
    HandOver,
    LeaseLost,
    Outcome,
    Overloaded,
    ReplicaEvent,
    ReplicaEventKind,
    Role,
    Verdict,
)


def test_the_way_without_losses(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    assert (
        ticket.prefill in ("p1", "p2")
        and ticket.decode in ("d1", "d2")
        and ticket.wire_layout["dtype"] == "float8_e4m3fn"
    )
    call = rig.hand_over(ticket)
    assert rig.answer(call) is None
    rig.beat(
        str(ticket.prefill), events=(ReplicaEvent(kind=ReplicaEventKind.PREFILL_STARTED, ticket_id=ticket.ticket_id),)
    )
    assert rig.state(ticket) == "prefilling"
    assert rig.seal(ticket) == []
    given = rig.answer(call)
    assert isinstance(given, HandOver) and given.seal.num_tokens == 320 and 7 < given.deadline_s <= ticket.deadline_s
    assert rig.state(ticket) == "moving"
    assert rig.open(ticket) == [(ticket.ticket_id, 1)]
    assert rig.state(ticket) == "verified"
    rig.beat(ticket.decode, events=(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=ticket.ticket_id),))
    assert rig.state(ticket) == "decoding"
    rig.end(ticket)
    assert rig.state(ticket) == "ended" and rig.audit() == []
    assert rig.machine.counters["done"] == 1 and rig.machine.counters["output_tokens"] == 10


def test_the_seal_may_come_before_it_is_asked_for(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.seal(ticket)
    assert rig.state(ticket) == "sealed"
    assert isinstance(rig.answer(rig.hand_over(ticket)), HandOver)


def test_asking_again_gives_the_same_answer(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    assert rig.admit() == ticket
    rig.seal(ticket)
    first, second = rig.answer(rig.hand_over(ticket)), rig.answer(rig.hand_over(ticket))
    assert first.seal == second.seal and first.lease == second.lease
    rig.end(ticket)
    rig.end(ticket)
    assert rig.machine.counters["done"] == 1
    assert "ended already" in rig.busy("r").reason


def test_a_seal_that_does_not_come_is_missing_at_the_deadline(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    call = rig.hand_over(ticket, timeout_s=3)
    rig.wait(2.5, beats=("d1", "d2", "p1", "p2"))
    assert rig.answer(call) is None
    rig.wait(1, beats=("d1", "d2", "p1", "p2"))
    assert rig.answer(call) is Verdict.MISSING


def test_a_lost_prefill_is_prefilled_elsewhere(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    again = rig.answer(rig.lost(ticket, Role.PREFILL))
    assert again.ticket_id == ticket.ticket_id and again.attempt == 2
    assert again.prefill not in (None, ticket.prefill)
    assert rig.report(held=((ticket.ticket_id, 1), (ticket.ticket_id, 2))) == [(ticket.ticket_id, 1)]
    assert rig.answer(rig.hand_over(ticket)) is Verdict.STALE
    rig.seal(ticket)  # late, of the attempt that was given up
    assert rig.state(ticket) == "admitted"
    rig.seal(again)
    assert isinstance(rig.answer(rig.hand_over(again)), HandOver)


def test_a_lost_decode_is_resumed_elsewhere_with_its_tokens(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.seal(ticket)
    rig.hand_over(ticket)
    rig.open(ticket)
    again = rig.answer(rig.lost(ticket, Role.DECODE, tokens=40))
    assert again.decode != ticket.decode and again.attempt == 2
    assert rig.machine.registry.tickets[ticket.ticket_id].num_output_tokens == 40
    assert rig.beat(ticket.decode).cancel == ((ticket.ticket_id, 1),)
    rig.open(ticket)  # late, of the old attempt
    assert rig.state(again) == "admitted"
    assert rig.audit() == []


def test_a_page_mismatch_moves_the_request_and_blames_no_replica(rig: ControllerDriver) -> None:
    ticket = rig.admit(prefix_hashes=(1, 2, 3))
    rig.seal(ticket)
    rig.hand_over(ticket)
    rig.open(ticket)
    again = rig.answer(rig.lost(ticket, Role.DECODE, tokens=40, page_integrity=True))
    assert again.decode != ticket.decode and again.attempt == 2 and again.prefill is not None
    live = rig.machine.registry.tickets[ticket.ticket_id]
    assert live.request.prefix_hashes == () and live.num_output_tokens == 40
    assert not rig.machine.registry.replicas[ticket.decode].stale
    assert rig.machine.counters["page_integrity_retries"] == 1 and "lost_decode" not in rig.machine.counters
    assert rig.audit() == []


def test_a_page_mismatch_with_one_decode_replica_runs_there_again() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit()
    again = rig.answer(rig.lost(ticket, Role.DECODE, page_integrity=True))
    assert (again.decode, again.attempt) == ("d", 2), "at once: nothing is wrong with the replica"
    assert rig.audit() == []


def test_a_replica_reported_lost_counts_as_full_until_it_is_heard(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.lost(ticket, Role.DECODE)
    other = "d2" if ticket.decode == "d1" else "d1"
    assert {rig.admit(f"x{n}").decode for n in range(3)} == {other}
    rig.beat(ticket.decode)
    assert ticket.decode in {rig.admit(f"y{n}").decode for n in range(3)}


def test_a_loss_reported_twice_moves_the_ticket_once(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    first = rig.answer(rig.lost(ticket, Role.DECODE))
    second = rig.answer(rig.lost(ticket, Role.DECODE))
    assert first == second and first.attempt == 2


def test_a_request_that_kills_its_replicas_fails_in_the_end(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    for _ in range(20):
        call = rig.lost(ticket, Role.DECODE)
        rig.wait(5, beats=("d1", "d2", "p1", "p2"))
        answer = rig.answer(call)
        if isinstance(answer, Overloaded):
            break
        assert answer.attempt == ticket.attempt + 1
        if answer.attempt > 3:
            assert answer.prefill is None, "after several losses decode computes the prompt itself"
        ticket = answer
    assert isinstance(answer, Overloaded) and "8 attempts" in answer.reason
    assert rig.state(ticket) == "ended" and rig.audit() == []


def test_a_resumed_stream_stays_with_the_weights_it_began_with() -> None:
    rig = ControllerDriver()
    rig.decode("old1", generation="v1")
    ticket = rig.admit()
    rig.decode("new1", generation="v2")
    call = rig.lost(ticket, Role.DECODE, tokens=5)
    assert rig.answer(call) is None, "no replica of its generation is free"
    rig.decode("old2", generation="v1")
    assert rig.answer(call).decode == "old2"


def test_prefill_and_decode_of_different_weights_are_no_pair() -> None:
    rig = ControllerDriver()
    rig.decode("d", generation="v2")
    rig.prefill("p", generation="v1")
    assert rig.admit().prefill is None


def test_bad_pages_are_recomputed_by_decode(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.seal(ticket)
    rig.hand_over(ticket)
    assert rig.open(ticket, Verdict.MISMATCH) == [(ticket.ticket_id, 1)]
    assert rig.state(ticket) == "recomputing"
    assert rig.machine.counters["pages_mismatch"] == 4
    rig.open(ticket)  # the message came twice, and changed on its way
    assert rig.state(ticket) == "recomputing" and rig.machine.counters.get("pages_ok", 0) == 0


def test_a_lease_that_ends_early_sends_the_ticket_back(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    call = rig.hand_over(ticket)
    rig.report(LeaseLost(ticket_id=ticket.ticket_id, attempt=1, reason="engine died"))
    assert rig.answer(call) is Verdict.MISSING
    assert [order.kind for _, order in rig.orders] == ["lost"] and rig.orders[0][1].role is Role.PREFILL


def test_a_transfer_actor_that_restarts_has_lost_its_leases(rig: ControllerDriver) -> None:
    moving, waiting = rig.admit("moving"), rig.admit("waiting")
    rig.seal(moving)
    rig.hand_over(moving)
    rig.seal(waiting)
    rig.report(incarnation=2)
    assert [order.ticket_id for _, order in rig.orders] == [waiting.ticket_id]
    assert rig.state(moving) == "moving", "decode finds out by itself and recomputes"
    assert rig.answer(rig.hand_over(waiting)) is Verdict.MISSING


def test_a_silent_transfer_actor_counts_as_gone(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.seal(ticket)
    rig.wait(6, beats=("d1", "d2", "p1", "p2"))
    assert [(order.kind, order.role) for _, order in rig.orders][:1] == [("lost", Role.PREFILL)]
    assert rig.answer(rig.hand_over(ticket)) is Verdict.MISSING


def test_cancelling_reaches_both_sides_and_the_staging(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.seal(ticket)
    rig.end(ticket, Outcome.CANCELLED, 0)
    key = (ticket.ticket_id, 1)
    assert rig.beat(ticket.decode).cancel == (key,)
    assert rig.report() == [key]
    assert rig.machine.counters["cancelled"] == 1
    early = rig.admit("early")
    rig.end(early, Outcome.CANCELLED, 0)
    assert (early.ticket_id, 1) in rig.beat(str(early.prefill)).cancel


def test_a_cancel_is_repeated_and_then_forgotten(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.end(ticket, Outcome.CANCELLED)
    seen = [rig.beat(ticket.decode).cancel for _ in range(5)]
    assert seen == [((ticket.ticket_id, 1),)] * 3 + [()] * 2


def test_a_ghost_that_starts_after_the_end_is_stopped(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.end(ticket)
    reply = rig.beat(
        ticket.decode, events=(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=ticket.ticket_id),)
    )
    assert [key for key, _ in reply.cancel] == [ticket.ticket_id]
    both = tuple(
        ReplicaEvent(kind=kind, ticket_id=ticket.ticket_id)
        for kind in (ReplicaEventKind.DECODE_STARTED, ReplicaEventKind.RELEASED)
    )
    rig.wait(2, beats=("d1", "d2"))
    assert rig.beat(ticket.decode, events=both).cancel == (), "it has ended there by itself"


def test_leases_of_ended_and_unknown_tickets_are_released(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.end(ticket)
    foreign = (7 << EPOCH_SHIFT | 999, 1)
    assert rig.report(held=((ticket.ticket_id, 1), foreign)) == [(ticket.ticket_id, 1), foreign]
    assert rig.seal(ticket) == [(ticket.ticket_id, 1)]
