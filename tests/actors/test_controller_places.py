"""Which replicas a request may have at all: those that its frontend can call, and one without other requests."""

from __future__ import annotations

import msgspec
import pytest
from controller_driver import ControllerDriver, spec_of

from actors.messages import AdmitRequest, CommandKind, FrontendHeartbeat, Outcome, Role, Ticket
from cluster.capacity import of_request


def reach(rig: ControllerDriver, *replicas: str, frontend: str = "f") -> None:
    live = tuple(sorted(rig.machine.registry.by_frontend.get(frontend, ())))
    rig.call(FrontendHeartbeat(frontend, live, 0, replicas))


# -- what the frontend can call


def test_a_replica_that_the_frontend_does_not_know_yet_gets_no_tickets_from_there() -> None:
    rig = ControllerDriver()
    rig.decode("d1")
    rig.prefill("p1")
    reach(rig, "d1", "p1")
    rig.decode("d2", "d3", "d4", "d5")  # empty, so the first choice of everybody who can call them
    rig.prefill("p2")
    placed = [rig.admit(f"r{n}", prompt=200, most=8) for n in range(4)]
    assert {ticket.decode for ticket in placed} == {"d1"} and {ticket.prefill for ticket in placed} == {"p1"}
    assert rig.admit("other", frontend="g", prompt=200).decode != "d1", "a frontend that does not say may use all"
    reach(rig, "d1", "d2", "p1", "p2")
    assert rig.admit("now").decode == "d2"
    assert rig.audit() == []


def test_a_request_waits_in_the_controller_until_its_frontend_can_call_a_replica() -> None:
    rig = ControllerDriver()
    reach(rig)
    rig.decode("d1")
    early, other = rig.ask("early"), rig.ask("other", frontend="g")
    assert rig.answer(early) is None
    assert isinstance(rig.answer(other), Ticket), "who waits for its own frontend delays no other frontend's request"
    reach(rig, "d1")
    assert rig.answer(early).decode == "d1"


def test_a_frontend_that_is_gone_is_forgotten_with_what_it_could_call() -> None:
    rig = ControllerDriver()
    reach(rig, "d1")
    rig.wait(7, frontends=())
    assert "f" not in rig.machine.registry.reachable


def test_admission_reserves_what_the_planner_counts() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.prefill("p")
    rig.admit("r", prompt=1000, most=40, num_sequences=3)
    decode = rig.machine.registry.replicas["d"]
    wanted = of_request(1000, 40, block_tokens=32, sequences=3, page_bytes=decode.page_bytes)
    assert (decode.reserved, decode.slots_taken) == (wanted.blocks, wanted.slots)
    assert rig.machine.registry.staged == {"n": wanted.staging_bytes}


# -- a replica to itself

SLOTS = {"max_num_seqs": 8, "blocks_total": 400}


@pytest.fixture
def rig() -> ControllerDriver:
    rig = ControllerDriver(spec_of(admission={"queue_max": 8, "queue_wait_s": 60}))
    rig.decode("d1", "d2", **SLOTS)
    rig.prefill("p1")
    return rig


def suspect(rig: ControllerDriver, ticket: Ticket) -> int:
    """Its frontend has seen two engines die with it."""
    wish = AdmitRequest(request_id="r", frontend_id="f", num_prompt_tokens=320, max_tokens=64, alone=True)
    return rig.lost(ticket, Role.DECODE, request=wish)


def test_a_request_that_engines_died_with_gets_an_empty_replica_and_keeps_it_empty(rig: ControllerDriver) -> None:
    first = rig.admit("r")
    other = rig.admit("other")
    assert {first.decode, other.decode} == {"d1", "d2"}
    call = suspect(rig, first)
    rig.wait(
        1, beats=("d1", "d2")
    )  # the replica that was lost is heard again; it is excluded, the other one is not empty
    alone = rig.answer(call)
    assert isinstance(alone, Ticket) and alone.decode == first.decode and alone.prefill is None and alone.alone
    assert [rig.admit(f"n{n}").decode for n in range(5)] == [other.decode] * 5
    rig.end(alone)
    assert rig.admit("after").decode == first.decode
    assert rig.audit() == []


def test_it_waits_for_a_replica_to_become_empty_and_others_do_not_keep_it_from_that(rig: ControllerDriver) -> None:
    rig.machine.forecast.token_ns = 1e8
    running = [rig.admit(f"a{n}", most=200) for n in range(4)]
    first = rig.admit("r", most=200)
    call = suspect(rig, first)
    rig.wait(1, beats=("d1", "d2"))
    assert rig.answer(call) is None, "no replica is empty"
    later = [rig.ask(f"b{n}", most=600) for n in range(4)]  # would last longer than what is there already
    kept = {rig.answer(each).decode for each in later if rig.answer(each)}
    assert len(kept) <= 1, "one replica runs empty"
    for ticket in running:
        rig.end(ticket)
    alone = rig.answer(call)
    assert isinstance(alone, Ticket)
    assert rig.machine.registry.replicas[alone.decode].tickets == {alone.ticket_id}
    assert rig.audit() == []


def test_it_runs_beside_others_when_no_replica_becomes_empty_in_time(rig: ControllerDriver) -> None:
    rig.machine.forecast.token_ns = 1e9
    for number in range(4):
        rig.admit(f"a{number}", most=200)
    call = suspect(rig, rig.admit("r", most=200))
    rig.wait(14, beats=("d1", "d2", "p1"))
    assert rig.answer(call) is None
    rig.wait(2, beats=("d1", "d2", "p1"))
    beside = rig.answer(call)
    assert isinstance(beside, Ticket) and beside.prefill is None and not beside.alone
    assert len(rig.machine.registry.replicas[beside.decode].tickets) > 1 and rig.audit() == []


def test_a_new_controller_keeps_it_alone(rig: ControllerDriver) -> None:
    from actors.messages import Claim

    first = rig.admit("r")
    again = ControllerDriver(rig.spec, epoch=8)
    again.decode("d1", "d2", **SLOTS)
    wish = AdmitRequest(request_id="r", frontend_id="f", num_prompt_tokens=320, max_tokens=64, alone=True)
    again.adopt(Claim(ticket=first, request=wish, decoding=True))
    assert {again.admit(f"n{n}").decode for n in range(6)} == {"d1", "d2"} - {first.decode}
    assert again.audit() == []


@pytest.mark.parametrize("draining", [False, True])
def test_an_order_says_whether_the_engine_died_with_the_request(rig: ControllerDriver, draining: bool) -> None:
    ticket = rig.admit("r")
    if draining:
        rig.leaving(ticket.decode)
    rig.left(ticket.decode)
    ((_, order),) = rig.orders
    assert (order.kind, order.died) == (CommandKind.LOST, not draining)
    assert msgspec.structs.asdict(order)["replica_id"] == ticket.decode
    rig.end(ticket, Outcome.CANCELLED)
