"""A step that raises, wherever it raises, changes nothing and fails the event's own request only.

The error is put into each line of the machine in turn (as many as time allows), for every kind of event, on a state
that has something of everything. Parts of a step that concern other requests have savepoints of their own.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from types import FrameType
from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, sealed, spec_of
from hypothesis import given
from hypothesis import strategies as st

from actors.controller import events
from actors.controller.events import StepFailed
from actors.controller.journal import RecentDict, Tracked, TrackedDeque, TrackedDict, TrackedList, TrackedSet, savepoint
from actors.controller.machine import Machine
from actors.engine.integrity.ledger import COUNTER_BITS, tag_epoch
from actors.messages import (
    AdmitRequest,
    Adopt,
    Claim,
    Configure,
    Ended,
    FrontendHeartbeat,
    Join,
    LeaseLost,
    Occupancy,
    Outcome,
    PageDelta,
    PlatformSize,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaHeartbeat,
    ReplicaLeaving,
    ReplicaLeft,
    ReplicaLost,
    ReplicaStarting,
    Request,
    Role,
    SetTarget,
    StagingStatus,
    Ticket,
    TransferReport,
    WaitForHandOver,
)

PLACES = 24  # lines that are tried, an event
PURE = ("/actors/controller/", "/actors/transfer/ticket")


class Planted(Exception):
    pass


class Raiser:
    """Raises at the `at`-th line that the machine executes; `at` 0: counts only."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __call__(self, frame: FrameType, kind: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in PURE) or name.endswith("journal.py"):
            return None
        if frame.f_code.co_name in ("step", "_attempt", "_step_failed"):  # what does the undoing
            return None
        return self._line

    def _line(self, frame: FrameType, kind: str, _: Any) -> Any:
        if kind == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Planted(self.where)
        return self._line


def frozen(value: Any, seen: dict[int, int]) -> Any:
    """Everything that can be reached, as plain values; the order of keys does not matter."""
    if isinstance(value, Tracked):
        if id(value) in seen:
            return ("seen", seen[id(value)])
        seen[id(value)] = len(seen)
        names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        names |= set(getattr(value, "__dict__", ()))
        return [
            (name, frozen(getattr(value, name), seen)) for name in sorted(names - {"_out", "_handlers", "_schedules"})
        ]
    if isinstance(value, dict):
        return [(key, frozen(value[key], seen)) for key in sorted(value, key=repr)]
    if isinstance(value, set):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple | deque):
        return [frozen(item, seen) for item in value]
    return value


def state_of(machine: Machine) -> Any:
    counters = {name: value for name, value in machine.counters.items() if name != "steps_failed"}
    whole = dict(frozen(machine, {}))
    return {**whole, "counters": counters}


def tag(counter: int) -> int:
    """As the first life of replica "d1" gives them out."""
    return tag_epoch("d1", 1) << COUNTER_BITS | counter


def something_of_everything() -> tuple[ControllerDriver, dict[str, Ticket]]:
    rig = ControllerDriver(spec_of(scaling={"mode": "occupancy"}))
    rig.decode("d1", "d2", blocks_total=60)
    rig.prefill("p1", "p2")
    tickets = {}
    for name in ("admitted", "sealed", "moving", "decoding", "more"):
        tickets[name] = rig.admit(name, session="s", prefix_hashes=tuple(range(10)))
    for name in ("sealed", "moving", "decoding"):
        rig.seal(tickets[name])
    for name in ("moving", "decoding"):
        rig.hand_over(tickets[name])
    rig.open(tickets["decoding"])
    rig.beat("d1", held=3, pages=(PageDelta(request_id="x", added={1: tag(11), 2: tag(12)}),))
    for number in range(9):
        rig.ask(f"waiting{number % 3}" if number < 4 else f"filler{number}", prompt=900, tenant=f"t{number % 2}")
    rig.machine.frontends["other"] = rig.now
    assert len(rig.machine.queue) >= 3
    return rig, tickets


def every_kind(rig: ControllerDriver, tickets: dict[str, Ticket]) -> dict[str, Any]:
    total = rig.machine.registry.replicas["d1"].announcement.blocks_total
    occupancy = Occupancy(blocks_total=total, blocks_free=total - 2, blocks_held=2)
    replica_events = (
        ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=tickets["moving"].ticket_id),
        ReplicaEvent(kind=ReplicaEventKind.QUARANTINED),
    )
    pages = (PageDelta(request_id="x", released=True), PageDelta(request_id="y", added={1: tag(13)}))
    beat = ReplicaHeartbeat(
        replica_id="d1", incarnation=1, occupancy=occupancy, events=replica_events, pages=pages, counters={"a": 1}
    )
    admitted, sealed_one, decoding = tickets["admitted"], tickets["sealed"], tickets["decoding"]
    lost = LeaseLost(ticket_id=sealed_one.ticket_id, attempt=1, reason="gone")
    staging = StagingStatus(node_id="n", incarnation=1, bytes_held=0, bytes_max=1 << 20, leases=0)
    old = AdmitRequest(request_id="old", frontend_id="f", num_prompt_tokens=64, max_tokens=8)
    claimed = Ticket(ticket_id=6 << 32 | 1, attempt=1, request_id="old", frontend_id="f", epoch=6, decode="d1")
    wish = AdmitRequest(request_id="new", frontend_id="f", num_prompt_tokens=320, max_tokens=64, session="s")
    waits = next(iter(rig.machine.queue)).call_id
    loss = ReplicaLost(
        ticket_id=decoding.ticket_id, attempt=1, role=Role.DECODE, replica_id=decoding.decode, reason="died"
    )
    return {
        "Join": Join(rig.announcement("d3", Role.DECODE)),
        "JoinAgain": Join(rig.announcement("d1", Role.DECODE, incarnation=2, blocks_total=60)),
        "ReplicaHeartbeat": beat,
        "ReplicaLeaving": ReplicaLeaving("d2"),
        "ReplicaLeft": ReplicaLeft("d1"),
        "FrontendHeartbeat": FrontendHeartbeat("f", (1, 2), rig.now),
        "FrontendGone": events.FrontendGone("f"),
        "NodesDraining": events.NodesDraining({"n": 12.0}),
        "Adopt": Adopt("f", (Claim(ticket=claimed, request=old),)),
        "TransferReport": TransferReport(staging, (sealed(admitted), lost)),
        "AdmitRequest": wish,
        "Withdraw": events.Withdraw(waits),
        "WaitForHandOver": WaitForHandOver(sealed_one.ticket_id, 1, 1.0),
        "ReplicaLost": loss,
        "Ended": Ended(decoding.ticket_id, Outcome.DONE, 20),
        "ReplicaStarting": ReplicaStarting("d9", Role.DECODE),
        "PlatformSize": PlatformSize(Role.DECODE, 2, 5),
        "SetTarget": SetTarget(Role.DECODE, 2, 60.0),
        "Configure": Configure(spec_of(admission={"queue_max": 9})),
        "Tick": events.Tick(),
    }


def test_every_kind_of_event_is_tried() -> None:
    rig, tickets = something_of_everything()
    tried = {type(event) for event in every_kind(rig, tickets).values()}
    assert tried == set(rig.machine._handlers)


@pytest.mark.parametrize("kind", sorted(every_kind(*something_of_everything())))
def test_a_step_that_raises_leaves_the_state_as_it_was(kind: str) -> None:
    rig, tickets = something_of_everything()
    event, now = every_kind(rig, tickets)[kind], rig.now + SECOND // 10
    if kind == "Tick":  # when everything is overdue
        now = rig.machine._ticked_ns = rig.now + 20 * SECOND
    before = state_of(copy.deepcopy(rig.machine))
    counter = Raiser()
    run(copy.deepcopy(rig.machine), event, now, counter)
    assert counter.lines > 0
    whole = 0
    for at in range(1, counter.lines + 1, max(1, counter.lines // PLACES)):
        machine = copy.deepcopy(rig.machine)
        raiser = Raiser(at)
        effects = run(machine, event, now, raiser)
        assert machine.counters["steps_failed"] >= 1, raiser.where
        answers = [e.value for e in effects if isinstance(e, events.Reply) and e.call_id == 900]
        if any(isinstance(e, events.Log) and e.text.startswith("handle failed") for e in effects):
            whole += 1
            assert state_of(machine) == before, raiser.where
            assert [type(a) for a in answers] == ([StepFailed] if isinstance(event, Request) else [])
        assert machine.registry.breaches() == [], raiser.where
        assert len(answers) <= 1, raiser.where
        assert not machine.step(events.Tick(), now) or machine.registry.breaches() == []
    assert whole or kind == "Tick", "no error reached the step itself"


def run(machine: Machine, event: Any, now: int, tracer: Raiser) -> list[Any]:
    sys.settrace(tracer)
    try:
        return machine.step(event, now, 900 if isinstance(event, Request) else 0)
    finally:
        sys.settrace(None)


def test_a_request_that_cannot_be_placed_leaves_the_queue_and_the_others_are_served() -> None:
    rig = ControllerDriver()
    poisoned = rig.ask("poisoned", session="\ud800")  # no replica yet: it waits
    after = rig.ask("after", tenant="z")
    rig.decode("d")
    assert isinstance(rig.answer(poisoned), StepFailed)
    assert isinstance(rig.answer(after), Ticket)
    assert "poisoned" in str(rig.answer(poisoned)) and "log" in str(rig.answer(poisoned))
    refused = rig.ask("at once", session="\ud800")
    assert isinstance(rig.answer(refused), StepFailed) and rig.audit() == []
    assert rig.admit("next").decode == "d"


CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5)), max_size=30)


@given(CHANGES, CHANGES)
def test_containers_come_back_to_what_they_were(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    kinds = (TrackedDict(), RecentDict(3), TrackedSet(), TrackedList(), TrackedDeque(maxlen=4))
    for change in before:
        apply(kinds, *change)
    copies = copy.deepcopy(kinds)
    with pytest.raises(Planted), savepoint():
        for change in after:
            apply(kinds, *change)
        raise Planted
    assert [dict(k) if isinstance(k, dict) else k for k in kinds] == [
        dict(k) if isinstance(k, dict) else k for k in copies
    ]


def apply(kinds: tuple[Any, ...], what: str, value: int) -> None:
    mapping, recent, members, items, ring = kinds
    if what in "abc":
        mapping[value], recent[value] = what, what
        members.add(value)
        items.insert(min(value, len(items)), value)
        ring.append(value)
    elif what == "d":
        mapping.pop(value, None)
        recent.pop(value, None)
        members.discard(value)
        if items:
            items.pop(value % len(items))
        if ring:
            ring.popleft()
    elif what == "e":
        mapping.clear()
        ring.clear()
    elif what == "f":
        mapping.update({value: 1, value + 1: 2})
        mapping.setdefault(value + 2, 3)
    elif what == "g" and value in items:
        items.remove(value)
