"""Replicas and frontends that come, go, hang and come back; who fits whom."""

from __future__ import annotations

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of

from actors.controller.events import IncompatibleReplica, NodesDraining, Tick
from actors.controller.status import audit, status
from actors.engine.integrity.ledger import COUNTER_BITS, tag_epoch
from actors.messages import (
    Fingerprint,
    FrontendHeartbeat,
    HeartbeatReply,
    Outcome,
    Overloaded,
    PageDelta,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaLeft,
    Role,
)
from ops.simulate.announce import LAYOUT


def test_joining_is_idempotent_and_unknown_replicas_are_asked_to_join() -> None:
    rig = ControllerDriver()
    assert rig.beat("d").known is False
    rig.decode("d")
    rig.decode("d")
    assert rig.beat("d").known and len(rig.machine.registry.replicas) == 1


def test_another_tokenizer_or_geometry_is_refused_with_both_sides_shown() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    wrong = rig.join("p", Role.PREFILL, fingerprint=Fingerprint(geometry={"layers": 2}, tokenizer="other"))
    assert isinstance(wrong, IncompatibleReplica)
    assert "p does not fit decode replica d" in str(wrong) and "'other' here, 't' in the cluster" in str(wrong)
    deep = Fingerprint(geometry={"layers": 3, "extra": 1}, tokenizer="t")
    text = str(rig.join("p", Role.PREFILL, fingerprint=deep))
    assert "geometry.layers: 3 here, 2 in the cluster" in text and "geometry.extra: 1 here, 'absent'" in text
    assert rig.admit().prefill is None, "a refused replica gets no work"


@pytest.mark.parametrize(("role", "other"), [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Fingerprint(geometry={"layers": 2}, tokenizer="other"), "tokenizer: 'other' here, 't' in the cluster"),
        (Fingerprint(geometry={"layers": 3}, tokenizer="t"), "geometry.layers: 3 here, 2 in the cluster"),
        (Fingerprint(geometry={}, tokenizer="t"), "geometry.layers: 'absent' here, 2 in the cluster"),
    ],
)
def test_two_checkpoints_must_agree_whichever_pool_comes_second(
    role: Role, other: Role, wrong: Fingerprint, says: str
) -> None:
    rig = ControllerDriver()
    rig.join("first", other)
    refused = rig.join("second", role, fingerprint=wrong)
    assert isinstance(refused, IncompatibleReplica)
    assert f"{role} replica second does not fit {other} replica first: {says}" in str(refused)
    assert "model.tokenizer" in str(refused)
    assert set(rig.machine.registry.replicas) == {"first"}
    assert not isinstance(rig.join("second", role), IncompatibleReplica), "with the right checkpoint it may join"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 3}, "num_layers 2 against 3"),
        ({"head_dim": 128}, "head_dim 64 against 128"),
        ({"order": "mla", "head_dim": 64}, "order cpu_vec against mla"),
    ],
)
def test_pages_that_cannot_be_converted_are_refused(change: dict[str, object], says: str) -> None:
    rig = ControllerDriver()
    rig.prefill("p")
    refused = rig.join("d", Role.DECODE, layout=LAYOUT | {"dtype": "float8_e4m3fn"} | change)
    assert isinstance(refused, IncompatibleReplica) and says in str(refused)


def test_fp8_pages_cannot_become_bf16_pages() -> None:
    rig = ControllerDriver()
    rig.prefill("p", layout=LAYOUT | {"dtype": "float8_e4m3fn"})
    assert "cannot become bfloat16" in str(rig.join("d", Role.DECODE, layout=LAYOUT | {"dtype": "bfloat16"}))


def test_two_decode_layouts_live_side_by_side_and_each_ticket_names_its_own() -> None:
    rig = ControllerDriver()
    rig.prefill("p")
    rig.decode("fp8")
    rig.decode("bf16", layout=LAYOUT | {"dtype": "bfloat16"})
    dtypes = {(t.decode, t.wire_layout["dtype"]) for t in (rig.admit(f"r{n}") for n in range(4))}
    assert dtypes == {("fp8", "float8_e4m3fn"), ("bf16", "bfloat16")}


def test_a_silent_replica_is_full_then_fenced_and_its_work_goes_elsewhere() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    ticket = rig.admit()
    other = "d2" if ticket.decode == "d1" else "d1"
    rig.wait(2.5, beats=(other,))
    assert {rig.admit(f"x{n}").decode for n in range(4)} == {other}
    assert not rig.orders
    rig.wait(3, beats=(other,))
    assert [(o.kind, o.ticket_id, o.replica_id) for _, o in rig.orders] == [("lost", ticket.ticket_id, ticket.decode)]
    back = rig.beat(ticket.decode)
    assert back.known and back.fenced, "it must end what it has and be replaced"
    assert rig.answer(rig.lost(ticket, Role.DECODE, tokens=3)).decode == other
    assert rig.audit() == []


def test_an_order_is_repeated_until_the_frontend_acts() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    ticket = rig.admit()
    other = "d2" if ticket.decode == "d1" else "d1"
    rig.wait(10, beats=(other,))
    sent = [order for _, order in rig.orders if order.ticket_id == ticket.ticket_id]
    assert len(sent) >= 2 and len(set(sent)) == 1
    rig.lost(ticket, Role.DECODE)
    before = len(rig.orders)
    rig.wait(6, beats=(other,))
    assert len(rig.orders) == before


def test_a_replica_that_restarts_under_its_name_has_lost_its_tickets() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit()
    rig.decode("d", incarnation=2)
    assert [order.ticket_id for _, order in rig.orders] == [ticket.ticket_id]
    assert rig.beat("d", incarnation=1).known is False
    assert rig.machine.registry.replicas["d"].reserved == 0 and rig.audit() == []


def test_a_leaving_replica_takes_nothing_new_and_finishes_what_it_has() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    ticket = rig.admit()
    other = "d2" if ticket.decode == "d1" else "d1"
    rig.leaving(ticket.decode)
    assert rig.beat(ticket.decode).draining
    assert {rig.admit(f"x{n}").decode for n in range(4)} == {other}
    rig.wait(30, beats=("d1", "d2"))
    assert not rig.orders, "without a deadline it may take its time"
    rig.end(ticket)
    rig.left(ticket.decode)
    assert ticket.decode not in rig.machine.registry.replicas and rig.audit() == []


def test_a_drain_deadline_moves_what_still_runs() -> None:
    rig = ControllerDriver(spec_of(scaling={"drain_deadline_s": 3}))
    rig.decode("d1", "d2")
    ticket = rig.admit()
    rig.leaving(ticket.decode)
    rig.wait(4, beats=("d1", "d2"))
    kind, moved = rig.orders[0][1].kind, rig.orders[0][1]
    assert kind == "move" and moved.replica_id == ticket.decode
    again = rig.answer(rig.lost(ticket, Role.DECODE, tokens=7))
    assert again.decode not in (ticket.decode, None)


def test_a_replica_that_said_goodbye_is_not_brought_back_by_a_late_heartbeat() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.left("d")
    assert rig.beat("d") == HeartbeatReply(epoch=7, known=True, draining=True)
    assert isinstance(rig.join("d", Role.DECODE), HeartbeatReply)
    assert "d" not in rig.machine.registry.replicas
    rig.decode("d", incarnation=2)
    assert rig.admit().decode == "d"


def test_a_node_that_is_about_to_go_gets_nothing_new_and_its_work_moves_before() -> None:
    rig = ControllerDriver(spec_of(admission={"queue_wait_s": 60}))
    rig.decode("d1", node_id="x")
    ticket = rig.admit("r")
    rig.step(NodesDraining({"x": 30.0}))
    waiting = rig.ask("late")
    assert rig.beat("d1").draining and rig.answer(waiting) is None, "also before there is another replica"
    rig.wait(19, beats=("d1",))
    assert rig.orders == []
    rig.wait(2, beats=("d1",))
    assert [(order.kind, order.ticket_id) for _, order in rig.orders] == [("move", ticket.ticket_id)]
    rig.decode("d2", node_id="x")
    assert rig.answer(waiting) is None, "one that joins there late"
    rig.decode("d3", node_id="y")
    assert rig.answer(waiting).decode == "d3"


def test_leaving_with_work_left_sends_it_elsewhere() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit()
    rig.left("d")
    assert [order.kind for _, order in rig.orders] == ["lost"]
    call = rig.lost(ticket, Role.DECODE)
    rig.decode("e")
    assert rig.answer(call).decode == "e"


@pytest.mark.parametrize("how", ["died", "hung", "silent", "in order"])
def test_an_engine_that_ends_out_of_order_is_counted_once_by_its_cause(how: str) -> None:
    rig = ControllerDriver()
    rig.decode("d")
    if how == "silent":
        rig.wait(6)
    for lost in [*{"in order": [""], "silent": []}.get(how, [how]), "died"]:  # the platform ends what has hung
        rig.step(ReplicaLeft("d", 1, "", lost))
    counted = status(rig.machine, rig.now)["engines_lost"]
    assert counted["decode"] == {cause: int(cause == how) for cause in ("died", "hung", "silent")}
    assert not any(counted["prefill"].values())


def test_the_longest_stall_of_a_frontends_event_loop_is_shown_for_ten_seconds() -> None:
    rig = ControllerDriver()
    for stall_s in (0.4, 0.1):
        rig.call(FrontendHeartbeat("f", stall_s=stall_s))
    assert status(rig.machine, rig.now)["stalls_s"] == {"f": 0.4}
    rig.wait(11)
    assert status(rig.machine, rig.now)["stalls_s"] == {"f": 0.0}


def test_a_dead_frontend_is_cancelled_everywhere() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=20)
    rig.prefill("p")
    ticket = rig.admit("one", frontend="dead", prompt=500)
    waiting = rig.ask("two", frontend="dead", prompt=500)
    rig.ask("three", frontend="f", prompt=500)
    assert rig.answer(waiting) is None
    rig.wait(6, beats=("d", "p"))
    assert rig.state(ticket) == "ended" and isinstance(rig.answer(waiting), Overloaded)
    assert {live.ticket.frontend_id for live in rig.machine.registry.tickets.values()} == {"f"}
    assert rig.machine.counters["cancelled"] == 1
    assert rig.audit() == []


def test_the_controllers_own_pause_is_no_silence_of_others() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=20)
    ticket = rig.admit("one", prompt=500)
    waiting = rig.ask("two", prompt=500)
    rig.wait(1, beats=("d",))
    rig.now += 60 * SECOND
    rig.step(Tick())
    assert not rig.machine.registry.replicas["d"].fenced and rig.state(ticket) == "decoding"
    assert rig.answer(waiting) is None and rig.machine.counters["own_pauses"] == 1
    rig.beat("d")
    rig.frontend_beat("f")
    rig.end(ticket)
    assert rig.answer(waiting).decode == "d"


def tag(counter: int) -> int:
    """As the first life of replica "d" gives them out."""
    return tag_epoch("d", 1) << COUNTER_BITS | counter


def test_pages_are_known_by_owner_and_tag_and_audited() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.beat("d", held=3, pages=(PageDelta(request_id="a", added={1: tag(101), 2: tag(102)}),))
    shared = PageDelta(request_id="b", added={2: tag(102), 3: tag(103)})
    rig.beat("d", held=3, pages=(shared, shared))
    book = rig.machine.registry.replicas["d"].book
    assert {page: (known.tag, known.owners) for page, known in book.pages.items()} == {
        1: (tag(101), 1),
        2: (tag(102), 2),
        3: (tag(103), 1),
    }
    assert "d: request b: page 2 is at its position 0, and at 1 of another that owns it" in rig.audit()
    rig.beat("d", held=2, pages=(PageDelta(request_id="a", released=True),))
    assert {page: known.owners for page, known in book.pages.items()} == {2: 1, 3: 1}
    rig.beat("d", held=3, pages=(PageDelta(request_id="c", added={3: tag(999)}),))
    assert any("taken again while a request still owned them" in breach for breach in rig.audit())
    rig.beat("d", held=2, pages=(PageDelta(request_id="b", released=True),))
    assert rig.audit() == [] and book.suspicions == 1, "it is history once the request has ended"


def test_a_whole_report_begins_the_book_anew() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.beat("d", held=3, pages=(PageDelta(request_id="a", added={1: tag(101), 2: tag(102)}),))
    rig.beat("d", held=1, pages=(PageDelta(request_id="b", added={3: tag(103)}),), pages_whole=True)
    assert rig.machine.registry.replicas["d"].book.owners == {"b": {3: tag(103)}} and rig.audit() == []


def test_a_tag_mismatch_is_counted_logged_and_held_against_the_book() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.beat("d", held=2, pages=(PageDelta(request_id="r~2", added={4: tag(104), 5: tag(105)}),))
    event = ReplicaEvent(
        kind=ReplicaEventKind.TAG_MISMATCH, ticket_id=7, request_id="r~2", position=1, detail="page 9 for page 5"
    )
    gone = PageDelta(request_id="r~2", released=True)
    rig.beat("d", events=(event,), pages=(gone,))
    assert rig.machine.counters["tag_mismatch_events"] == 1
    [line] = [line for line in rig.logs if line.startswith("tag mismatch")]
    assert f"request r~2: page 9 for page 5; the book says page 5, tag {tag(105):#x}" in line
    [mismatch] = audit(rig.machine)["tag_mismatches"]
    assert (mismatch["replica_id"], mismatch["ticket_id"], mismatch["page_known"], mismatch["tag_known"]) == (
        "d",
        7,
        5,
        f"{tag(105):#x}",
    )
    assert audit(rig.machine)["replicas"]["d"]["laws_broken"] == []


def test_more_owned_pages_than_the_replica_holds_is_a_breach() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.beat("d", held=1, pages=(PageDelta(request_id="a", added={1: tag(101), 2: tag(102)}),))
    assert any("2 pages have owners, the replica reports 1 held" in breach for breach in rig.audit())


def test_a_tag_of_another_life_of_the_replica_is_seen_at_the_report() -> None:
    rig = ControllerDriver(spec_of(integrity={"mode": "check"}))
    rig.decode("d")
    rig.beat("d", held=1, pages=(PageDelta(request_id="a", added={1: tag(1)}),))
    assert rig.audit() == [] and "page_book_violations" not in rig.machine.counters
    old = tag_epoch("d", 0) << COUNTER_BITS | 2
    rig.beat("d", held=2, pages=(PageDelta(request_id="b", added={2: old, 400: tag(3)}),))
    assert rig.machine.counters["page_book_violations"] == 2
    assert any(f"page 2 has tag {old:#x}, of another life" in text for text in rig.audit())
    assert any("d: page 400 is outside 0 .. 100" in line for line in rig.logs)


def test_pages_that_stay_with_a_request_whose_ticket_has_ended_are_seen() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit("r")
    rig.beat("d", held=2, pages=(PageDelta(request_id="r", added={1: tag(1), 2: tag(2)}, ticket_id=ticket.ticket_id),))
    rig.end(ticket)
    for _ in range(10):
        rig.now += SECOND
        rig.beat("d", held=2)
    assert rig.audit() == [], "the engine may be in a step still"
    for _ in range(10):
        rig.now += SECOND
        rig.beat("d", held=2)
    assert any("request r holds 2 pages, its ticket" in text for text in rig.audit())
    assert any("2 blocks are held and no ticket is there" in text for text in rig.audit())
    rig.beat("d", held=0, pages=(PageDelta(request_id="r", released=True),))
    assert rig.audit() == []


def test_blocks_that_no_ticket_explains_are_seen_without_tags() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    for _ in range(20):
        rig.now += SECOND
        rig.beat("d", held=3)
    assert rig.audit() == ["d: 3 blocks are held and no ticket is there"]
    rig.beat("d")
    assert rig.audit() == []


def test_an_occupancy_that_does_not_add_up_is_a_breach() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.beat("d", held=3, blocks_quarantined=2)
    assert any("!= total 100" in breach for breach in rig.audit())


def test_a_cancelled_wait_leaves_the_queue() -> None:
    rig = ControllerDriver()
    waiting = rig.ask("one")
    assert len(rig.machine.queue) == 1
    rig.withdraw(waiting)
    rig.decode("d")
    assert len(rig.machine.queue) == 0 and not rig.machine.registry.tickets
    rig.end(rig.admit("two"), Outcome.DONE)
    assert rig.audit() == []
