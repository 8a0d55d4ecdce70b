"""Frontends: each request's way through the cluster, retries included, and what its client has seen.

The client's view is the ground truth that the checkers judge: which positions arrived, in what order, how it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from actors.messages import (
    AdmitRequest,
    Adopt,
    Claim,
    Ended,
    FrontendCommand,
    FrontendHeartbeat,
    FrontendReply,
    HandOver,
    Outcome,
    Overloaded,
    PrefillDone,
    ReplicaLeaving,
    ReplicaLost,
    Role,
    Ticket,
    Verdict,
    WaitForHandOver,
)
from actors.transfer.staging import Key
from ops.simulate.control import ControllerSim
from ops.simulate.engines import DecodeJob, DecodeSim, PrefillSim, ReplicaSim, Stream
from ops.simulate.world import MS, SECOND, Done, Net, Process, World

BEAT_NS = SECOND
RETRY_NS = 100 * MS
PATIENCE_NS = 30 * SECOND  # how long a request waits for a controller that is away


@dataclass(slots=True)
class Record:
    """What a client asked for and what it saw."""

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    session: str = ""
    tenant: str = ""
    prefix_hashes: tuple[int, ...] = ()
    next_position: int = 0
    duplicated: int = 0
    gaps: int = 0
    first_token_ns: int = 0
    end_ns: int = 0
    outcome: str = ""  # done, cancelled, busy, failed, client_gone
    ends: int = 0
    detail: str = ""
    attempts: int = 0
    alone: bool = False

    def end(self, outcome: str, detail: str, now_ns: int) -> None:
        self.ends += 1
        if self.ends == 1:
            self.outcome, self.detail, self.end_ns = outcome, detail, now_ns


class Story:
    """One request. `phase`: admit, prefill, submit, stream, relocate, ended."""

    def __init__(self, frontend: FrontendSim, record: Record) -> None:
        self.frontend = frontend
        self.record = record
        self.phase = "admit"
        self.ticket: Ticket | None = None
        self.prefilled = False
        self.hand_over: HandOver | None = None
        self.losses = 0
        self.cancelled = False
        self.admit_request = AdmitRequest(
            request_id=record.request_id,
            frontend_id=frontend.name,
            num_prompt_tokens=record.prompt_tokens,
            max_tokens=record.max_tokens,
            session=record.session,
            tenant=record.tenant,
            prefix_hashes=record.prefix_hashes,
        )
        self._asked_ns = frontend.world.now_ns
        self.ask()

    @property
    def controller(self) -> ControllerSim:
        return self.frontend.controller

    @property
    def key(self) -> Key:
        assert self.ticket is not None
        return self.ticket.ticket_id, self.ticket.attempt

    @property
    def request(self) -> AdmitRequest:
        return msgspec.structs.replace(self.admit_request, num_output_tokens=self.record.next_position)

    def claim(self) -> Claim:
        assert self.ticket is not None
        return Claim(
            ticket=self.ticket,
            request=self.request,
            num_output_tokens=self.record.next_position,
            decoding=self.phase in ("submit", "stream"),
        )

    # -- a ticket

    def ask(self) -> None:
        self.controller.call(self.frontend, self.request, self.answered, self._ask_again)

    def _ask_again(self, _: str) -> None:
        if self.phase == "ended":
            return
        if self.frontend.world.now_ns - self._asked_ns > PATIENCE_NS:
            self.end("failed", "the controller is away")
        else:
            self.frontend.later(RETRY_NS, self.ask)

    def answered(self, answer: Ticket | Overloaded) -> None:
        if isinstance(answer, Overloaded):
            if self.phase in ("admit", "relocate") and not self.cancelled:
                self.end("busy" if self.phase == "admit" else "failed", answer.reason)
            return
        if self.phase == "ended":
            self.ticket = self.ticket or answer
            self.frontend.tell_ended(answer.ticket_id, Outcome.CANCELLED, self.record.next_position)
            return
        if self.phase not in ("admit", "relocate") or (self.ticket and answer.attempt <= self.ticket.attempt):
            return
        self.ticket = answer
        self.record.attempts += 1
        self.frontend.by_ticket[answer.ticket_id] = self
        self.prefilled, self.hand_over = False, None
        if answer.prefill is None:
            self.record.alone = True
            self.submit()
            return
        self.phase = "prefill"
        self._prefill(answer)
        self._want(answer)

    def _prefill(self, ticket: Ticket) -> None:
        key = self.key
        replica = self.frontend.find(ticket.prefill or "")

        def done(found: PrefillDone | str) -> None:
            if self.phase != "prefill" or self.key != key:
                return
            if isinstance(found, PrefillDone):
                self.prefilled = True
                self._both()
            else:
                self.lost(Role.PREFILL, found)

        if not isinstance(replica, PrefillSim):
            self.frontend.later(MS, done, "no such replica")
            return
        tokens = self.record.prompt_tokens + self.record.next_position
        self.frontend.net.call(
            self.frontend, replica, "prefill", lambda answer: replica.prefill(ticket, tokens, answer), done, done
        )
        self.frontend.later(int(ticket.deadline_s * SECOND), done, "no answer in time")

    def _want(self, ticket: Ticket) -> None:
        key, timeout_ns = self.key, int(ticket.deadline_s * SECOND)

        def done(found: HandOver | Verdict) -> None:
            if self.phase != "prefill" or self.key != key:
                return
            if isinstance(found, HandOver):
                self.hand_over = found
                self._both()
            elif found is Verdict.MISSING:
                self.lost(Role.PREFILL, "the seal did not come")
            else:
                self.submit()

        def again(_: str) -> None:
            if self.phase == "prefill" and self.key == key:
                self.frontend.later(RETRY_NS, self._want, ticket)

        self.controller.call(
            self.frontend, WaitForHandOver(ticket.ticket_id, ticket.attempt, timeout_ns / 1e9), done, again
        )

    def _both(self) -> None:
        if self.prefilled and self.hand_over is not None:
            self.submit()

    # -- decode

    def submit(self) -> None:
        assert self.ticket is not None
        self.phase = "submit"
        ticket, hand_over, key = self.ticket, self.hand_over, self.key
        record = self.record
        replica = self.frontend.find(ticket.decode)

        def done(refused: str) -> None:
            if self.phase == "submit" and self.key == key:
                if refused:
                    self.lost(Role.DECODE, refused)
                else:
                    self.phase = "stream"

        if not isinstance(replica, DecodeSim):
            self.frontend.later(MS, done, "no such replica")
            return
        job = DecodeJob(
            ticket,
            self.frontend.name,
            record.request_id,
            record.prompt_tokens,
            record.next_position,
            record.output_tokens,
            hand_over,
        )
        stream = self.frontend.stream(replica)
        self.frontend.net.call(
            self.frontend, replica, "submit", lambda answer: answer(replica.submit(replace(job), stream)), done, done
        )
        self.frontend.later(10 * SECOND, done, "no answer in time")

    def tokens(self, first: int, count: int, finished: bool) -> None:
        """Of the current attempt only."""
        record, now_ns = self.record, self.frontend.world.now_ns
        if self.phase not in ("submit", "stream"):
            return
        self.phase = "stream"
        if first < record.next_position:
            record.duplicated += record.next_position - first
        elif first > record.next_position:
            record.gaps += first - record.next_position
        record.first_token_ns = record.first_token_ns or now_ns
        record.next_position = first + count
        if finished:
            self.end("done", "")

    # -- losses and ends

    def lost(self, role: Role, reason: str) -> None:
        assert self.ticket is not None
        if self.phase in ("ended", "relocate", "admit"):
            return
        self.losses += 1
        self.phase = "relocate"
        ticket = self.ticket
        replica_id = ticket.decode if role is Role.DECODE else ticket.prefill or ""
        self.frontend.abort(ticket)
        self._report(ticket, role, replica_id, reason, self.frontend.world.now_ns)

    def _report(self, ticket: Ticket, role: Role, replica_id: str, reason: str, since_ns: int) -> None:
        def again(_: str) -> None:
            if self.phase != "relocate" or self.ticket is not ticket:
                return
            if self.frontend.world.now_ns - since_ns > PATIENCE_NS:
                self.end("failed", "the controller is away")
            else:
                self.frontend.later(RETRY_NS, self._report, ticket, role, replica_id, reason, since_ns)

        if self.phase != "relocate" or self.ticket is not ticket:
            return
        loss = ReplicaLost(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            role=role,
            replica_id=replica_id,
            reason=reason,
            num_output_tokens=self.record.next_position,
            request=self.request,
        )
        self.controller.call(self.frontend, loss, self.answered, again)

    def order(self, order: FrontendCommand) -> None:
        if self.ticket is None or self.phase == "ended":
            return
        if order.kind == "cancelled":
            self.end("failed", f"given up by the controller: {order.reason}")
        elif order.attempt == self.ticket.attempt:
            if order.role is Role.PREFILL and self.phase != "prefill":
                return  # decode has what it needs
            self.lost(order.role, order.reason)

    def cancel(self) -> None:
        """The client leaves."""
        if self.phase != "ended":
            self.cancelled = True
            self.end("cancelled", "the client left")

    def end(self, outcome: str, detail: str) -> None:
        if self.phase == "ended":
            return
        was, self.phase = self.phase, "ended"
        self.record.end(outcome, detail, self.frontend.world.now_ns)
        self.frontend.stories.pop(self.record.request_id, None)
        if self.ticket is None:
            return
        if outcome != "done" and was != "admit":
            self.frontend.abort(self.ticket)
        told = {"done": Outcome.DONE, "cancelled": Outcome.CANCELLED}.get(outcome, Outcome.FAILED)
        self.frontend.tell_ended(self.ticket.ticket_id, told, self.record.next_position)


class FrontendSim(Process):
    kind = "frontend"

    def __init__(
        self, world: World, net: Net, name: str, controller: ControllerSim, find: Callable[[str], ReplicaSim | None]
    ) -> None:
        super().__init__(world, name)
        self.net = net
        self.controller = controller
        self.find = find
        self.stories: dict[str, Story] = {}
        self.by_ticket: dict[int, Story] = {}
        self.streams: dict[str, Stream] = {}
        self._stamp = self._epoch = 0
        self.later(BEAT_NS, self._beat)

    def reborn(self) -> None:
        super().reborn()
        self.name = f"{self.name.split('~')[0]}~{self.life}"
        self._stamp = self._epoch = 0
        self.later(BEAT_NS, self._beat)

    def accept(self, record: Record) -> None:
        self.stories[record.request_id] = Story(self, record)

    def die(self) -> None:
        super().die()
        for story in self.stories.values():
            story.phase = "ended"
            story.record.end("client_gone", "its frontend died", self.world.now_ns)
        self.stories, self.by_ticket = {}, {}
        for name, stream in self.streams.items():
            stream.open = False
            replica = self.find(name)
            if isinstance(replica, DecodeSim) and replica.alive:
                replica.later(10 * MS, replica.stream_closed, self.name)
        self.streams = {}

    # -- roads

    def stream(self, replica: DecodeSim) -> Stream:
        """The stream from that replica; a broken one is replaced when this side has learned of it, not before."""
        found = self.streams.get(replica.name)
        if found is None:
            found = Stream(self._tokens)
            found.broken = partial(self._broken, replica.name, found)
            self.streams[replica.name] = found
        return found

    def _tokens(self, batch: list[tuple[Key, int, int, bool]]) -> None:
        for key, first, count, finished in batch:
            story = self.by_ticket.get(key[0])
            if story is not None and story.ticket is not None and story.key == key:
                story.tokens(first, count, finished)

    def _broken(self, replica_id: str, stream: Stream, reason: str) -> None:
        stream.open = False
        if not self.alive or self.streams.get(replica_id) is not stream:
            return
        del self.streams[replica_id]
        for story in list(self.stories.values()):
            if story.ticket is not None and story.ticket.decode == replica_id and story.phase in ("submit", "stream"):
                story.lost(Role.DECODE, reason)

    def abort(self, ticket: Ticket) -> None:
        """Tells both sides at once; a lost message is made good by the controller's cancels."""
        for name in {ticket.decode, ticket.prefill or ""}:
            replica = self.find(name)
            if replica is not None:
                self._abort_at(replica, ticket)

    def _abort_at(self, replica: ReplicaSim, ticket: Ticket) -> None:
        def handler(answer: Done) -> None:
            replica.abort(ticket.ticket_id, ticket.attempt)
            answer(None)

        self.net.call(self, replica, "abort", handler, lambda _: None, lambda _: None)

    def tell_ended(self, ticket_id: int, outcome: Outcome, tokens: int, tries: int = 60) -> None:
        self.by_ticket.pop(ticket_id, None)

        def again(_: str) -> None:
            if tries:
                self.later(RETRY_NS * 5, self.tell_ended, ticket_id, outcome, tokens, tries - 1)

        self.controller.call(self, Ended(ticket_id, outcome, tokens), lambda _: None, again)

    def replica_leaving(self, replica_id: str) -> None:
        self.controller.call(self, ReplicaLeaving(replica_id))

    # -- heartbeat

    def _beat(self) -> None:
        self._tell_live()
        self.later(BEAT_NS, self._beat)

    def _tell_live(self) -> None:
        live = tuple(ticket_id for ticket_id, story in self.by_ticket.items() if story.phase != "ended")
        self.controller.call(
            self,
            FrontendHeartbeat(self.name, live, self._stamp),
            self._heed,
            lambda _: self.later(RETRY_NS, self._tell_live),
        )

    def _heed(self, reply: FrontendReply) -> None:
        self._stamp = max(self._stamp, reply.stamp) if reply.epoch == self._epoch else reply.stamp
        self._epoch = reply.epoch
        if not reply.known:
            claims = tuple(story.claim() for story in self.by_ticket.values() if story.phase != "ended")
            self.controller.call(self, Adopt(self.name, claims))
        for order in reply.orders:
            story = self.by_ticket.get(order.ticket_id)
            if story is not None:
                story.order(order)

    def __repr__(self) -> str:
        return f"{self.name}({len(self.stories)} live)"
