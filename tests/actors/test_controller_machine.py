"""The controller's machine under arbitrary histories, against a dumb model.

Invariants:
1. A call is answered at most once, and every call that waits is answered by its deadline.
2. A request has one ticket; a ticket ends once; opened == ended + live, always.
3. A ticket's attempts only grow, and an answer to a loss is a higher attempt or an end.
4. Nothing is placed on a replica that is silent, draining, fenced or gone.
5. A hand-over is given only for the current attempt, with that attempt's own seal.
6. The conservation laws of registry and indexes hold after every step.
7. Bytes of an ended or superseded attempt are released when their node reports them; those of a live one are not.
8. When every request has ended, nothing is left: no ticket, no waiting call, no reservation.
"""

from __future__ import annotations

from typing import Any

from controller_driver import SECOND, ControllerDriver, sealed, spec_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.controller.events import Tick
from actors.messages import (
    AdmitRequest,
    Claim,
    HandOver,
    Outcome,
    Overloaded,
    ReplicaEvent,
    ReplicaEventKind,
    Role,
    Ticket,
    Verdict,
)

DECODES, PREFILLS = ("d0", "d1", "d2"), ("p0", "p1")
INDEX = st.integers(0, 100)


class Controller(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = ControllerDriver(
            spec_of(admission={"queue_max": 6, "queue_wait_s": 6, "local_prefill_max_tokens": 40})
        )
        self.lives = dict.fromkeys((*DECODES, *PREFILLS), 1)
        self.heard: dict[str, int] = {}  # when each replica that should be usable was last heard
        self.tickets: dict[int, Ticket] = {}  # as their frontend knows them
        self.requests: dict[str, AdmitRequest] = {}
        self.over: set[int] = set()
        self.waiting: dict[int, tuple[str, int, int]] = {}  # call -> (what, ticket, deadline)
        self.opened = 0
        self.number = 0

    @initialize()
    def two_of_each(self) -> None:
        for name in ("d0", "d1", "p0"):
            self.join(name)

    # -- replicas

    @rule(name=st.sampled_from((*DECODES, *PREFILLS)), again=st.booleans())
    def join(self, name: str, again: bool = False) -> None:
        if again:
            self.lives[name] += 1
        role = Role.DECODE if name in DECODES else Role.PREFILL
        self.rig.join(name, role, incarnation=self.lives[name], blocks_total=60)
        known = self.rig.machine.registry.replicas.get(name)
        here = known is not None and known.announcement.incarnation == self.lives[name]
        if here and known is not None and not known.fenced and not known.draining_since_ns:
            self.heard[name] = self.rig.now
        self.collect()

    @rule(name=st.sampled_from((*DECODES, *PREFILLS)), held=st.integers(0, 60), kind=st.sampled_from(("", "start")))
    def beat(self, name: str, held: int, kind: str) -> None:
        started = ReplicaEventKind.DECODE_STARTED if name in DECODES else ReplicaEventKind.PREFILL_STARTED
        events = tuple(ReplicaEvent(kind=started, ticket_id=t) for t in self.tickets) if kind else ()
        reply = self.rig.beat(name, held=held, events=events, incarnation=self.lives[name])
        if name in self.heard and reply.known and not reply.fenced:
            self.heard[name] = self.rig.now
        self.collect()

    @rule(name=st.sampled_from((*DECODES, *PREFILLS)))
    def drain(self, name: str) -> None:
        self.rig.leaving(name)
        if name in self.rig.machine.registry.replicas:
            self.heard.pop(name, None)

    @rule(name=st.sampled_from((*DECODES, *PREFILLS)))
    def leave(self, name: str) -> None:
        self.rig.left(name)
        self.heard.pop(name, None)
        self.lives[name] += 1
        self.collect()

    @rule(step=st.sampled_from((SECOND // 4, SECOND, 3 * SECOND)))
    def time_passes(self, step: int) -> None:
        until = self.rig.now + step
        while self.rig.now < until:
            self.rig.now = min(until, self.rig.now + SECOND // 2)
            self.rig.frontend_beat("f", live=tuple(self.tickets))
            self.rig.step(Tick())
            self.collect()
        for name in [name for name, when in self.heard.items() if self.rig.now - when >= 5 * SECOND]:
            del self.heard[name]  # fenced; comes back with another life only
            self.lives[name] += 1

    # -- requests

    @rule(prompt=st.sampled_from((10, 100, 600, 1500)), most=st.sampled_from((8, 64, 500)))
    def admit(self, prompt: int, most: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        call = self.rig.ask(name, prompt=prompt, most=most)
        self.requests[name] = AdmitRequest(request_id=name, frontend_id="f", num_prompt_tokens=prompt, max_tokens=most)
        self.waiting[call] = ("admit", 0, self.rig.now + 6 * SECOND)
        self.collect()

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX)
    def ask_again(self, index: int) -> None:
        ticket = self.pick(index)
        request = self.requests[ticket.request_id]
        call = self.rig.ask(ticket.request_id, prompt=request.num_prompt_tokens, most=request.max_tokens)
        self.waiting[call] = ("again", ticket.ticket_id, self.rig.now + 6 * SECOND)
        self.collect()

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX, old=st.booleans())
    def seal(self, index: int, old: bool) -> None:
        ticket = self.pick(index)
        if ticket.prefill is not None:
            self.rig.report(sealed(ticket))
        self.collect()

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX)
    def hand_over(self, index: int) -> None:
        ticket = self.pick(index)
        call = self.rig.hand_over(ticket, timeout_s=4)
        self.waiting[call] = ("hand_over", ticket.ticket_id, self.rig.now + 4 * SECOND)
        self.collect()

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX, verdict=st.sampled_from((Verdict.OK, Verdict.MISMATCH, Verdict.MISSING)))
    def open(self, index: int, verdict: Verdict) -> None:
        self.rig.open(self.pick(index), verdict)

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX, role=st.sampled_from(Role), tokens=st.integers(0, 30))
    def lost(self, index: int, role: Role, tokens: int) -> None:
        ticket = self.pick(index)
        call = self.rig.lost(ticket, role, tokens, self.requests[ticket.request_id])
        self.waiting[call] = ("lost", ticket.ticket_id, self.rig.now + 6 * SECOND)
        self.collect()

    @precondition(lambda self: self.tickets)
    @rule(index=INDEX, outcome=st.sampled_from(Outcome), twice=st.booleans())
    def end(self, index: int, outcome: Outcome, twice: bool) -> None:
        ticket = self.pick(index)
        for _ in range(1 + twice):
            self.rig.end(ticket, outcome)
        self.over.add(ticket.ticket_id)
        del self.tickets[ticket.ticket_id]
        self.collect()

    @rule()
    def transfer_restarts(self) -> None:
        known = self.rig.machine.registry.nodes.get("n")
        self.rig.report(incarnation=known.status.incarnation + 1 if known else 1)
        self.collect()

    @rule(late=st.booleans())
    def controller_restarts(self, late: bool) -> None:
        """Everything it knew is gone; replicas join again, the frontend claims what it has."""
        before, self.rig = self.rig, ControllerDriver(self.rig.spec, epoch=self.rig.machine.epoch + 1)
        self.rig.now = before.now
        self.rig.machine.started_ns = self.rig.machine._ticked_ns = before.now
        self.rig._calls = before._calls
        self.waiting.clear()
        names = list(self.heard)
        self.heard.clear()
        claims = [
            Claim(ticket=ticket, request=self.requests[ticket.request_id], num_output_tokens=1)
            for ticket in self.tickets.values()
        ]
        self.opened = len(claims)
        if late:
            self.rig.adopt(*claims)
        for name in names:
            self.join(name)
        if not late:
            self.rig.adopt(*claims)
        self.over.clear()
        self.collect()

    # -- model

    def pick(self, index: int) -> Ticket:
        return self.tickets[sorted(self.tickets)[index % len(self.tickets)]]

    def collect(self) -> None:
        """Takes in what has been answered."""
        for call in [call for call in self.waiting if self.rig.answer(call) is not None]:
            what, ticket_id, _ = self.waiting.pop(call)
            self.answered(what, ticket_id, self.rig.answer(call))

    def answered(self, what: str, ticket_id: int, answer: Any) -> None:
        if isinstance(answer, HandOver):
            assert what == "hand_over" and answer.seal.ticket_id == answer.lease.ticket_id == ticket_id  # 5
            assert answer.attempt == answer.seal.attempt == answer.lease.attempt
        elif isinstance(answer, Ticket):
            self.ticket_given(what, ticket_id, answer)
        elif isinstance(answer, Overloaded):
            if what == "lost" and ticket_id in self.tickets and ticket_id not in self.rig.machine.registry.tickets:
                del self.tickets[ticket_id]  # 3: an end
                self.over.add(ticket_id)
        else:
            assert what == "hand_over" and isinstance(answer, Verdict)

    def ticket_given(self, what: str, ticket_id: int, answer: Ticket) -> None:
        known = self.tickets.get(answer.ticket_id)
        if what == "admit":
            assert known is None and answer.attempt == 1 and answer.ticket_id not in self.over  # 2
            self.opened += 1
        elif known is None:
            return  # it has ended meanwhile
        else:
            assert answer.ticket_id == ticket_id and answer.attempt >= known.attempt  # 3
        if known is None or answer.attempt > known.attempt:
            for name in (answer.decode, answer.prefill):
                assert name is None or self.rig.now - self.heard[name] <= 5 * SECOND // 2  # 4: stale, and a tick
        self.tickets[answer.ticket_id] = answer

    # -- laws

    @invariant()
    def conservation(self) -> None:
        made_up = ("free", "no ticket is there")  # the heartbeats' own figures
        assert [text for text in self.rig.audit() if not any(words in text for words in made_up)] == []  # 2, 6

    @invariant()
    def no_call_waits_beyond_the_deadline(self) -> None:
        late = [w for w in self.waiting.values() if self.rig.now > w[2] + SECOND]
        assert late == []  # 1

    @invariant()
    def tickets_are_counted(self) -> None:
        counts = self.rig.machine.counters
        assert counts.get("admitted", 0) + counts.get("claimed", 0) == self.opened  # 2
        assert set(self.rig.machine.registry.tickets) == set(self.tickets)

    @invariant()
    def only_wanted_bytes_are_kept(self) -> None:
        for live in list(self.rig.machine.registry.tickets.values()):
            if live.hand_over is not None:
                key = (live.ticket.ticket_id, live.ticket.attempt)
                assert key not in self.rig.report(held=(key, (key[0], key[1] - 1)), incarnation=self.node_life())  # 7
        for ticket_id in list(self.over)[-3:]:
            dead = self.rig.report(held=((ticket_id, 1),), incarnation=self.node_life())
            assert (ticket_id, 1) in dead  # 7

    def node_life(self) -> int:
        known = self.rig.machine.registry.nodes.get("n")
        return known.status.incarnation if known else 1

    def teardown(self) -> None:
        for ticket in list(self.tickets.values()):
            self.rig.end(ticket)
        self.tickets.clear()
        for _ in range(16):
            self.rig.now += SECOND // 2
            self.rig.frontend_beat("f", live=())
            self.rig.step(Tick())
            self.collect()
            for ticket in list(self.tickets.values()):
                self.rig.end(ticket)
            self.tickets.clear()
        machine = self.rig.machine
        assert not machine.registry.tickets and not len(machine.queue) and not self.waiting  # 8, 1
        assert all(not r.reserved and not r.inflight_tokens for r in machine.registry.replicas.values())
        assert not any("reserved" in breach for breach in self.rig.audit())


Controller.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestController = Controller.TestCase
