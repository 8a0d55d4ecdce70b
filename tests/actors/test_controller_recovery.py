"""Tickets of a controller that has come back: what it learns, adopts, refuses and gives back."""

from __future__ import annotations

import msgspec
from controller_driver import SECOND, ControllerDriver, sealed, spec_of

from actors.controller.registry import EPOCH_SHIFT
from actors.messages import (
    AdmitRequest,
    Claim,
    HandOver,
    Overloaded,
    Role,
    Ticket,
    Verdict,
    WaitForHandOver,
)


def reborn(rig: ControllerDriver) -> ControllerDriver:
    later = ControllerDriver(rig.spec, epoch=rig.machine.epoch + 1)
    later.now = later.machine.started_ns
    return later


def claim(ticket: Ticket, decoding: bool = False, tokens: int = 0) -> Claim:
    request = AdmitRequest(
        request_id=ticket.request_id,
        frontend_id=ticket.frontend_id,
        num_prompt_tokens=ticket.num_prompt_tokens,
        max_tokens=64,
    )
    return Claim(ticket=ticket, request=request, num_output_tokens=tokens, decoding=decoding)


def test_a_new_life_learns_what_lives_and_goes_on(rig: ControllerDriver) -> None:
    early, late = rig.admit("early"), rig.admit("late")
    rig.seal(early)
    new = reborn(rig)
    assert new.beat("d1").known is False
    assert new.frontend_beat("f", live=(early.ticket_id, late.ticket_id)).known is False
    new.seal(early)  # the transfer actor tells it again
    new.adopt(claim(early), claim(late, decoding=True, tokens=9))
    new.decode("d1", "d2")
    new.prefill("p1", "p2")
    assert new.frontend_beat("f", live=(early.ticket_id, late.ticket_id)).known is True
    assert (new.state(early), new.state(late)) == ("sealed", "decoding")
    assert isinstance(new.answer(new.hand_over(early)), HandOver)
    reserved = {name: replica.reserved for name, replica in new.machine.registry.replicas.items()}
    assert reserved[early.decode] > 0 and reserved[late.decode] > 0
    new.end(early)
    new.end(late)
    assert new.audit() == []


def test_tickets_of_two_lives_never_share_an_id(rig: ControllerDriver) -> None:
    first = rig.admit()
    new = reborn(rig)
    new.decode("d1")
    second = new.admit("other")
    assert first.ticket_id != second.ticket_id and first.ticket_id >> EPOCH_SHIFT == 7
    assert second.ticket_id < 1 << 63


def test_a_hand_over_asked_of_a_new_life_waits_for_the_seal_or_the_claim(rig: ControllerDriver) -> None:
    sealed_ticket, claimed = rig.admit("a"), rig.admit("b")
    new = reborn(rig)
    first, second = new.hand_over(sealed_ticket), new.hand_over(claimed)
    new.seal(sealed_ticket)
    assert isinstance(new.answer(first), HandOver)
    new.adopt(claim(claimed))
    new.seal(claimed)
    assert isinstance(new.answer(second), HandOver)


def test_old_work_without_a_claim_is_stale(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    new = reborn(rig)
    waiting = new.hand_over(ticket, timeout_s=60)
    assert new.report(held=((ticket.ticket_id, 1),)) == [], "a process may still claim it"
    new.wait(6, frontends=())
    assert new.answer(waiting) is Verdict.STALE
    assert new.report(held=((ticket.ticket_id, 1),)) == [(ticket.ticket_id, 1)]
    assert new.answer(new.hand_over(ticket)) is Verdict.STALE


def test_a_seal_without_a_claim_is_given_back(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    new = reborn(rig)
    new.report(sealed(ticket))
    new.wait(6, frontends=())
    assert (ticket.ticket_id, 1) in new.report()


def test_a_claimed_ticket_whose_replica_does_not_come_back_goes_elsewhere(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    new = reborn(rig)
    new.adopt(claim(ticket, decoding=True))
    other = "d2" if ticket.decode == "d1" else "d1"
    new.decode(other)
    new.wait(6, beats=(other,))
    assert [(order.kind, order.ticket_id) for _, order in new.orders][:1] == [("lost", ticket.ticket_id)]
    again = new.answer(new.lost(ticket, Role.DECODE))
    assert again.decode == other and again.attempt == 2


def test_a_loss_reported_to_a_new_life_brings_the_request_along(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    new = reborn(rig)
    new.decode("d9")
    refused = new.answer(new.lost(ticket, Role.DECODE))
    assert isinstance(refused, Overloaded) and "not known" in refused.reason
    again = new.answer(new.lost(ticket, Role.DECODE, tokens=4, request=claim(ticket).request))
    assert again.decode == "d9" and again.ticket_id == ticket.ticket_id and again.attempt == 2
    assert new.audit() == []


def test_a_claim_after_the_end_is_refused(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    new = reborn(rig)
    new.end(ticket)
    new.adopt(claim(ticket))
    assert new.orders[0][1].kind == "cancelled" and new.state(ticket) == "ended"


def test_a_grant_that_got_lost_is_taken_back_and_can_be_revived(rig: ControllerDriver) -> None:
    ticket = rig.admit()
    rig.frontend_beat("f", live=())  # its stamp is older than the ticket: proves nothing
    assert rig.state(ticket) == "admitted"
    for _ in range(6):
        rig.now += SECOND
        rig.frontend_beat("f", live=())
    assert rig.state(ticket) == "ended" and rig.machine.counters["unclaimed_tickets"] == 1
    rig.frontend_beat("f", live=(ticket.ticket_id,))  # it had been under way for very long
    assert rig.orders[-1][1].kind == "lost"
    again = rig.answer(rig.lost(ticket, Role.DECODE, request=claim(ticket).request))
    assert isinstance(again, Ticket) and again.attempt == 2
    assert rig.audit() == []


def test_a_heartbeat_that_was_late_itself_takes_nothing_back(rig: ControllerDriver) -> None:
    rig.frontend_beat("f")
    old = rig.stamps["f"]
    ticket = rig.admit()
    rig.now += 30 * SECOND
    rig.frontend_beat("f", live=(), stamp=old)
    assert rig.state(ticket) == "admitted"


def test_epochs_go_on_when_the_counter_is_full() -> None:
    rig = ControllerDriver(spec_of())
    rig.decode("d")
    rig.machine._issued = (1 << EPOCH_SHIFT) - 1
    ticket = rig.admit()
    assert ticket.ticket_id >> EPOCH_SHIFT == 8 and rig.machine.epoch == 8
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket) == ticket


def test_two_calls_for_a_ticket_without_a_claim_are_both_answered() -> None:
    rig = ControllerDriver(epoch=7)
    old = 6 << 32 | 1
    first = rig.call(WaitForHandOver(old, 1, 2.0))
    second = rig.call(WaitForHandOver(old, 1, 2.0))
    rig.wait(20)
    assert rig.answer(first) is not None and rig.answer(second) is not None
