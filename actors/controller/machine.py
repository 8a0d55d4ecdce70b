"""The controller's brain: `step(event, now_ns) -> effects`. Pure: no clock, no random, no socket, no Ray.

The Ray actor (`shell.py`), the simulator and the tests all drive this one class. What a message means is decided by
the ticket table; what is held is the registry's; who gets what is the chooser's. Messages may come early, late, twice
or not at all: every call that waits has a deadline, and every resource has an owner whose silence is noticed.
"""

from __future__ import annotations

import traceback
from bisect import insort
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from actors.controller import compatibility
from actors.controller.autoscale import Autoscaler
from actors.controller.capacity import UNKNOWN_NS, Demand, Hold, Schedule, Short
from actors.controller.events import (
    CallId,
    Effect,
    Event,
    FrontendGone,
    IncompatibleReplica,
    Log,
    Replace,
    Reply,
    StepFailed,
    Tick,
    ToFrontend,
    Withdraw,
)
from actors.controller.forecast import SECOND, Forecast, blocks_for
from actors.controller.journal import RecentDict, Tracked, TrackedDeque, TrackedDict, TrackedList, TrackedSet, savepoint
from actors.controller.page_book import PageBook, TagMismatch
from actors.controller.queue import AdmissionQueue, Waiting
from actors.controller.registry import EPOCH_SHIFT, LANDED, Node, Registry, Replica, TicketRecord, epoch_of
from actors.controller.selector import Choice, ReplicaSelector
from actors.controller.ticket_state import HOLDS_LEASE, TicketEvent, TicketState
from actors.messages import (
    AdmitRequest,
    Adopt,
    Claim,
    CommandKind,
    Configure,
    Ended,
    FrontendCommand,
    FrontendHeartbeat,
    FrontendReply,
    HandOver,
    HeartbeatReply,
    Join,
    LeaseLost,
    Occupancy,
    OpenedAt,
    Outcome,
    Overloaded,
    PlatformSize,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaHeartbeat,
    ReplicaId,
    ReplicaLeaving,
    ReplicaLeft,
    ReplicaLost,
    ReplicaStarting,
    Role,
    Sealed,
    SetTarget,
    Ticket,
    TicketId,
    TransferEvent,
    TransferReport,
    Verdict,
    WaitForHandOver,
)
from cluster.spec import ClusterSpec

ATTEMPTS_MAX = 8  # then the request fails with a clear reason
ALONE_AFTER = 3  # attempts; from then on decode computes the prompt itself
BACK_OFF_NS = SECOND // 4
CANCEL_REPEATS = 3  # heartbeat replies that carry a cancel: a lost reply loses nothing
ORDER_AGAIN_NS = 2 * SECOND
PAUSE_NS = SECOND // 2  # a shorter gap between ticks is no pause, however soon replicas count as stale
FORGET_FENCED_NS = 300 * SECOND
MISMATCHES_KEPT = 64
LOOK_MAX = 64  # entries of the queue that one turn looks at
BACKFILL_MAX = 8  # of these, behind the first that has no room
SCHEDULE_EVERY_NS = SECOND // 2
LEFT_REMEMBERED = 1_000
SILENCED_REMEMBERED = 10_000
NOTICES = (
    ReplicaStarting,
    ReplicaLeft,
    ReplicaLeaving,
    Adopt,
    Configure,
    Ended,
)  # answered as soon as they are taken in
OUTCOME_EVENT = {
    Outcome.DONE: TicketEvent.FINISH,
    Outcome.CANCELLED: TicketEvent.CANCEL,
    Outcome.FAILED: TicketEvent.FAIL,
}

_FAILED: Any = object()


def _step_failed(what: str) -> StepFailed:
    return StepFailed(f"the controller could not handle {what}; its log has the reason")


class Machine(Tracked):
    """One controller life. `epoch` must be higher than that of every life before it.

    `fresh`: the first life, of an application that starts. `deployment`: number of the configuration `spec`.
    """

    def __init__(self, spec: ClusterSpec, epoch: int, now_ns: int, fresh: bool = True, deployment: int = 0) -> None:
        self.epoch = epoch
        self.deployment = deployment
        self.started_ns = now_ns
        self._ticked_ns = now_ns
        self._away_ns = 0  # of the time for rebuilding
        self.registry = Registry()
        self.forecast = Forecast()
        self.chooser = ReplicaSelector(spec.admission, self.forecast, self.registry, spec.transfer.staging_bytes_max)
        self.room = AdmissionQueue(spec.admission.queue_max)
        self._schedules: dict[str, Schedule] = {}  # of those who wait, by tokenizer; only ever made anew or added to
        self._scheduled_ns = -SCHEDULE_EVERY_NS
        self.autoscaler = Autoscaler(spec, now_ns, fresh)
        self.frontends: TrackedDict[str, int] = TrackedDict()  # last heard
        self.counters: TrackedDict[str, float] = TrackedDict()
        self.mismatches: TrackedDeque[TagMismatch] = TrackedDeque(maxlen=MISMATCHES_KEPT)
        self._issued = 0
        self._deadlines: TrackedList[tuple[int, CallId, TicketId]] = (
            TrackedList()
        )  # of hand_over calls that wait, sorted
        self._seals: TrackedDict[TicketId, Sealed] = (
            TrackedDict()
        )  # of an older epoch's tickets that nobody has claimed yet
        self._early: TrackedDict[TicketId, tuple[CallId, int]] = (
            TrackedDict()
        )  # hand_over calls for such tickets: (call, attempt)
        self._order_sent_ns: TrackedDict[TicketId, int] = (
            TrackedDict()
        )  # tickets whose frontend was asked to take them elsewhere: when
        self._orphaned_by_replica: TrackedDict[ReplicaId, TrackedSet[TicketId]] = (
            TrackedDict()
        )  # claimed tickets whose decode replica is not back yet
        self._presumed_dead: RecentDict[TicketId, Ticket] = RecentDict(
            SILENCED_REMEMBERED
        )  # cancelled because nobody claimed them
        self._left_lives: RecentDict[tuple[ReplicaId, int], None] = RecentDict(
            LEFT_REMEMBERED
        )  # said goodbye: a late heartbeat brings none back
        self._out: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, CallId, int], None]] = {
            Join: self._join,
            ReplicaHeartbeat: self._replica_heartbeat,
            ReplicaLeaving: self._replica_leaving,
            ReplicaLeft: self._replica_left,
            FrontendHeartbeat: self._frontend_heartbeat,
            FrontendGone: self._frontend_gone,
            Adopt: self._adopt,
            TransferReport: self._transfer_report,
            AdmitRequest: self._admit,
            Withdraw: self._withdraw,
            WaitForHandOver: self._wait_for_hand_over,
            ReplicaLost: self._replica_lost,
            Ended: self._ended,
            ReplicaStarting: self._replica_starting,
            PlatformSize: self._platform_size,
            SetTarget: self._set_target,
            Configure: self._configure,
            Tick: self._tick,
        }
        self._read(spec)

    def _read(self, spec: ClusterSpec) -> None:
        self.spec = spec
        admission = spec.admission
        self._stale_ns = int(admission.stale_after_s * SECOND)
        self._fence_ns = int(max(admission.fence_after_s, admission.stale_after_s) * SECOND)
        self._queue_ns = int(admission.queue_wait_s * SECOND)
        self._hand_over_ns = int(spec.transfer.hand_over_s * SECOND)
        self._drain_ns = None if spec.scaling.drain_deadline_s is None else int(spec.scaling.drain_deadline_s * SECOND)

    def step(self, event: Event, now_ns: int, call_id: CallId = 0) -> list[Effect]:
        """`call_id` is answered with one `Reply`, now or in a later step; 0: nobody waits for an answer."""
        self._out = []
        # Before anything that is in the mail is judged by the clock.
        if now_ns - self._ticked_ns >= max(PAUSE_NS, self._stale_ns // 2):
            self._attempt(self._shift_deadlines_after_stall, now_ns)
        if self._attempt(self._handle, event, call_id, now_ns) is _FAILED:
            self._reply(call_id, _step_failed(type(event).__name__))
        return self._out

    def _handle(self, event: Event, call_id: CallId, now_ns: int) -> None:
        self._handlers[type(event)](event, call_id, now_ns)
        if isinstance(event, NOTICES):
            self._reply(call_id, None)

    def _attempt(self, handler: Callable[..., Any], *args: Any) -> Any:
        """What `handler` returns; `_FAILED` when it raised: then all that it changed is undone, effects included."""
        num_effects = len(self._out)
        try:
            with savepoint():
                return handler(*args)
        except Exception:
            del self._out[num_effects:]
            self._add("steps_failed")
            name = getattr(handler, "__name__", "step")
            self._out.append(Log(f"{name.strip('_')} failed and is undone: {traceback.format_exc()}", is_error=True))
            return _FAILED

    def _advance_epoch(self, ticket_ids: Iterable[TicketId]) -> None:
        """A ticket of another life that is not older than this one: the wall clock has gone back between the two."""
        for ticket_id in ticket_ids:
            if ticket_id > self.epoch << EPOCH_SHIFT | self._issued:
                self.epoch, self._issued = epoch_of(ticket_id) + 1, 0
                self._out.append(Log(f"ticket {ticket_id} is of a later epoch than mine; mine is {self.epoch} now"))

    @property
    def rebuilding_until_ns(self) -> int:
        """Until then, work of an older epoch that this life does not know may still be claimed."""
        return self.started_ns + self._fence_ns + self._away_ns

    def _reply(self, call_id: CallId, value: Any) -> None:
        if call_id:
            self._out.append(Reply(call_id, value))

    def _add(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    # -- replicas

    def _join(self, event: Join, call_id: CallId, now_ns: int) -> None:
        new = event.announcement
        self._advance_epoch(new.tickets)
        known = self.registry.replicas.get(new.replica_id)
        if (new.replica_id, new.incarnation) in self._left_lives:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=True, draining=True))
            return
        if known is not None and known.announcement.incarnation == new.incarnation:
            self._reply(call_id, self._heartbeat_reply(known))
            return
        try:
            # Pages never cross generations, so that a rolling change may bring another model in beside the old one.
            others = (r for r in self.registry.replicas.values() if not r.fenced and r is not known)
            members = [r.announcement for r in others if r.announcement.generation == new.generation]
            compatibility.check(new, members)
        except IncompatibleReplica as error:
            self._add("replicas_refused")
            self._out.append(Log(str(error)))
            self._reply(call_id, error)
            return
        if known is not None:
            self._drop_replica(known, f"{new.replica_id} has restarted", now_ns)
        idle = Occupancy(blocks_total=new.blocks_total, blocks_free=new.blocks_total, blocks_held=0)
        replica = Replica(new, now_ns, now_ns, idle)
        self.registry.replicas[new.replica_id] = replica
        for ticket_id in sorted(self._orphaned_by_replica.pop(new.replica_id, ())):
            live = self.registry.tickets.get(ticket_id)
            if live is not None and live.decode_at is None and live.lost is None:
                self.registry.attach_decode(live, replica)
        for ticket_id in new.tickets:
            if ticket_id not in self.registry.tickets and not self._unclaimed(ticket_id, now_ns):
                replica.cancel[(ticket_id, ATTEMPTS_MAX)] = CANCEL_REPEATS
        self._out.append(Log(f"{new.role} replica {new.replica_id} joined with {new.blocks_total} blocks"))
        self.autoscaler.sizes.joined(new.role, new.replica_id, now_ns)
        self.chooser.refresh(replica)
        self._reply(call_id, self._heartbeat_reply(replica))
        self._drain_queue(now_ns)

    def _replica_heartbeat(self, event: ReplicaHeartbeat, call_id: CallId, now_ns: int) -> None:
        beat, replica = event, self.registry.replicas.get(event.replica_id)
        if (beat.replica_id, beat.incarnation) in self._left_lives:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=True, draining=True))
            return
        if replica is None or replica.announcement.incarnation != beat.incarnation:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=False))
            return
        if replica.fenced:
            self._reply(call_id, self._heartbeat_reply(replica))
            return
        replica.heard_ns = now_ns
        replica.ready_ns = replica.ready_ns or now_ns
        replica.stale = False
        replica.occupancy = beat.occupancy
        replica.counters.update(beat.counters)
        released = {thing.ticket_id for thing in beat.events if thing.kind == ReplicaEventKind.RELEASED}
        for thing in beat.events:
            self._attempt(self._replica_event, replica, thing, thing.ticket_id in released, now_ns)
        if beat.pages_whole:
            replica.book = PageBook()
        for delta in beat.pages:
            replica.book.apply(delta)
        replica.unexplained = max(0, beat.occupancy.blocks_held - replica.landed)
        self._extend_overdue(replica, now_ns)
        self.chooser.refresh(replica)
        self._reply(call_id, self._heartbeat_reply(replica))
        self._drain_queue(now_ns)

    def _heartbeat_reply(self, replica: Replica) -> HeartbeatReply:
        cancel = tuple(replica.cancel)
        replica.cancel = TrackedDict({key: left - 1 for key, left in replica.cancel.items() if left > 1})
        return HeartbeatReply(
            epoch=self.epoch,
            known=True,
            draining=bool(replica.draining_since_ns),
            fenced=replica.fenced,
            cancel=cancel,
        )

    def _replica_event(self, replica: Replica, thing: ReplicaEvent, gone: bool, now_ns: int) -> None:
        """`gone`: the same report says that the replica has released the ticket."""
        if thing.kind == ReplicaEventKind.TAG_MISMATCH:
            self._tag_mismatch(replica, thing, now_ns)
            return
        if thing.kind in (ReplicaEventKind.RECOMPUTED, ReplicaEventKind.QUARANTINED):
            self._add(f"{thing.kind}_events")
            self._add(f"{thing.kind}_tokens", thing.num_tokens)
            return
        if thing.kind == ReplicaEventKind.PROMPT_COMPUTED:
            known = self.registry.tickets.get(thing.ticket_id)
            if known is not None and replica.id == (known.ticket.prefill or known.ticket.decode):
                self.chooser.prompt_computed(replica, known.hit_pages, known.hit_used, thing.num_tokens)
            return
        if thing.kind not in (ReplicaEventKind.PREFILL_STARTED, ReplicaEventKind.DECODE_STARTED):
            return
        prefill = thing.kind == ReplicaEventKind.PREFILL_STARTED
        live = self.registry.tickets.get(thing.ticket_id)
        if live is None:
            if not gone and not self._unclaimed(thing.ticket_id, now_ns):
                # A call that came late or twice set it going again, and nobody waits for it.
                replica.cancel[(thing.ticket_id, ATTEMPTS_MAX)] = CANCEL_REPEATS
        elif (live.prefill_at if prefill else live.decode_at) is replica:
            self.registry.move(live, TicketEvent.PREFILL_STARTED if prefill else TicketEvent.DECODE_STARTED, now_ns)
        elif not gone and (live.ticket.prefill if prefill else live.ticket.decode) != replica.id:
            replica.cancel[(thing.ticket_id, live.ticket.attempt - 1)] = CANCEL_REPEATS

    def _tag_mismatch(self, replica: Replica, thing: ReplicaEvent, now_ns: int) -> None:
        """The engine has ended the request already; here it is counted, and held against what the book knows."""
        self._add("tag_mismatch_events")
        known = replica.book.at(thing.request_id, thing.position)
        mismatch = TagMismatch(now_ns, replica.id, replica.role, thing.request_id, thing.ticket_id, thing.detail, known)
        self.mismatches.append(mismatch)
        self._out.append(Log(str(mismatch)))

    def _extend_overdue(self, replica: Replica, now_ns: int) -> None:
        """Tickets that outlived their expected end get a new one, half as long again, and more blocks to grow into."""
        limit = int(replica.announcement.blocks_total * self.spec.admission.occupancy_limit)
        while replica.ends and replica.ends[0][0] <= now_ns:
            live = self.registry.tickets[replica.ends[0][1]]
            longer = max(SECOND, (now_ns - live.admitted_ns) // 2)
            request = live.request
            most = blocks_for(request, request.max_tokens, replica.announcement.block_tokens, live.slots)
            grown = live.reserved + int(live.growth * longer / SECOND) + 1
            reserved = max(live.reserved, min(grown, most, limit))
            growth = (reserved - live.reserved) * SECOND / longer  # from what it has now to what it may have then
            self.registry.forecast(live, reserved, growth, now_ns + longer)

    def _replica_leaving(self, event: ReplicaLeaving, call_id: CallId, now_ns: int) -> None:
        replica = self.registry.replicas.get(event.replica_id)
        if replica is not None and not replica.draining_since_ns:
            replica.draining_since_ns = now_ns
            self.chooser.refresh(replica)
            self._out.append(Log(f"{replica.id} is leaving with {len(replica.tickets)} tickets"))

    def _replica_left(self, event: ReplicaLeft, call_id: CallId, now_ns: int) -> None:
        replica = self.registry.replicas.get(event.replica_id)
        if replica is not None and event.incarnation in (None, replica.announcement.incarnation):
            self._left_lives[(replica.id, replica.announcement.incarnation)] = None
            self._drop_replica(replica, f"{replica.id} {event.why}", now_ns)

    def _drop_replica(self, replica: Replica, reason: str, now_ns: int, keep: bool = False) -> None:
        """Its tickets are lost there; `keep` leaves a fenced record behind, for its heartbeats and for `status`."""
        decoding, prefilling = self.registry.remove(replica.id)
        self.chooser.forget(replica)
        for live in decoding:
            self._tell_lost(live, Role.DECODE, replica.id, reason, now_ns)
        for live in prefilling:
            self._tell_lost(live, Role.PREFILL, replica.id, reason, now_ns)
        if keep:
            self.registry.replicas[replica.id] = replica
        self._out.append(Log(f"{reason}: {len(decoding) + len(prefilling)} tickets go elsewhere"))

    def _tell_lost(self, live: TicketRecord, role: Role, replica_id: ReplicaId, reason: str, now_ns: int) -> None:
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.MISSING)
            live.wanted_by = 0
        self._order(CommandKind.LOST, live, role, replica_id, reason, now_ns)

    def _order(
        self, kind: CommandKind, live: TicketRecord, role: Role, replica_id: ReplicaId, reason: str, now_ns: int
    ) -> None:
        """Asks the ticket's frontend to take it elsewhere; said again by `_resend_orders` until it does."""
        ticket = live.ticket
        live.lost = FrontendCommand(
            kind=kind,
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            role=role,
            replica_id=replica_id,
            reason=reason,
        )
        self._order_sent_ns[ticket.ticket_id] = now_ns
        self._out.append(ToFrontend(ticket.frontend_id, live.lost))

    # -- admission

    def _admit(self, event: AdmitRequest, call_id: CallId, now_ns: int) -> None:
        request = event
        self.frontends[request.frontend_id] = now_ns
        key = (request.frontend_id, request.request_id)
        if (ticket_id := self.registry.by_request.get(key)) is not None:  # asked twice
            self._reply_placed_or_wait(self.registry.tickets[ticket_id], call_id)
            return
        if key in self.registry.ended_requests:
            self._reply(call_id, Overloaded(reason=f"request {request.request_id} has ended already", retry_after_s=0))
            return
        twin = next(
            (w for w in self.room if not w.ticket_id and (w.request.frontend_id, w.request.request_id) == key), None
        )
        if twin is not None:
            twin.also.append(call_id)
            return
        output, block_tokens = self.forecast.output_tokens(request), self.spec.pools.decode.block_tokens
        self.forecast.asked(blocks_for(request, output, block_tokens))
        if not len(self.room) and isinstance(choice := self.chooser.choose(request, now_ns), Choice):
            self._reply(call_id, self._issue(request, choice, now_ns))
            return
        cost = request.num_prompt_tokens + output * request.num_sequences
        bound_ns = min(self._queue_ns, int(request.patience_s * SECOND) or self._queue_ns)
        waiting = Waiting(call_id, request, now_ns, now_ns + bound_ns, cost)
        self.room.put(waiting)
        self._drain_queue(now_ns)
        if waiting in self.room:
            self._bound_queue(waiting, now_ns)

    def _bound_queue(self, newest: Waiting, now_ns: int) -> None:
        """Whoever has to leave for the newest, or cannot be served in time, is told so now."""
        surplus = self.room.surplus(newest, self.chooser.has_pool)
        if surplus is not None:
            self._refuse(surplus, f"{len(self.room) - 1} requests wait already", self._next_start_ns(now_ns), now_ns)
            if surplus is newest:
                return
        newest.expected_ns = self._expected_ns(newest, now_ns)
        if newest.until_ns < newest.expected_ns < UNKNOWN_NS:
            wait_s, bound_s = (newest.expected_ns - now_ns) / SECOND, (newest.until_ns - now_ns) / SECOND
            reason = f"it would wait for {wait_s:.0f} s, more than the {bound_s:.0f} s that it may"
            self._refuse(newest, reason, now_ns + newest.expected_ns - newest.until_ns, now_ns)

    def _refuse(self, waiting: Waiting, reason: str, again_ns: int, now_ns: int) -> None:
        """`again_ns`: when it would not be refused, as far as can be foreseen."""
        self.room.drop(waiting.call_id)
        self._add("busy")
        self._answer(waiting, Overloaded(reason=reason, retry_after_s=self._retry_after_s(again_ns, now_ns)))

    def _retry_after_s(self, again_ns: int, now_ns: int) -> float:
        return round(min(max(1.0, (again_ns - now_ns) / SECOND), max(1.0, self._queue_ns / SECOND)), 1)

    def _next_start_ns(self, now_ns: int) -> int:
        """When the first of those who wait gets its place."""
        self._reschedule(now_ns)
        return min((schedule.starts[0] for schedule in self._schedules.values() if schedule.starts), default=now_ns)

    def _expected_ns(self, waiting: Waiting, now_ns: int) -> int:
        if self._reschedule(now_ns):
            return waiting.expected_ns
        tokenizer = waiting.request.tokenizer
        starts = self._schedules[tokenizer].starts if tokenizer in self._schedules else []
        before = (each for each in self.room.in_order(now_ns) if each.request.tokenizer == tokenizer)
        at = next((number for number, each in enumerate(before) if each is waiting), len(starts))
        return starts[at] if at < len(starts) else self._add_to_schedule(waiting, now_ns)

    def _reschedule(self, now_ns: int) -> bool:
        """Forecasts the queue anew where that is due: it takes time in proportion to all live tickets."""
        if now_ns - self._scheduled_ns < SCHEDULE_EVERY_NS:
            return False
        self._scheduled_ns = now_ns
        self._schedules = {}
        for waiting in self.room.in_order(now_ns):
            waiting.expected_ns = self._add_to_schedule(waiting, now_ns)
        return True

    def expected_wait_s(self, now_ns: int) -> float:
        """Until the last of those who wait has its place; of those for whom it can be foreseen."""
        known = [waiting.expected_ns for waiting in self.room if waiting.expected_ns < UNKNOWN_NS]
        return round(max(0.0, (max(known, default=0) - now_ns) / SECOND), 1)

    def _add_to_schedule(self, waiting: Waiting, now_ns: int) -> int:
        tokenizer, limit = waiting.request.tokenizer, self.spec.admission.occupancy_limit
        if tokenizer not in self._schedules:
            self._schedules[tokenizer] = Schedule.of(self.registry, self.forecast, tokenizer, limit, (), now_ns)
        demand = Demand.of(waiting.request, self.forecast)
        block_tokens = self.spec.pools.decode.block_tokens
        return self._schedules[tokenizer].add(demand, block_tokens, self.forecast.prompt_token_ns)

    def _reply_placed_or_wait(self, live: TicketRecord, call_id: CallId) -> None:
        if live.decode_at is not None:
            self._reply(call_id, live.ticket)
            return
        waiting = next((w for w in self.room if w.ticket_id == live.ticket.ticket_id), None)
        if waiting is None:  # its replica is gone and its frontend will say so
            self._reply(call_id, live.ticket)
            return
        waiting.also.append(call_id)

    def _issue(self, request: AdmitRequest, choice: Choice, now_ns: int) -> Ticket:
        self._issued += 1
        if self._issued >> EPOCH_SHIFT:
            self.epoch, self._issued = self.epoch + 1, 1
        ticket_id = self.epoch << EPOCH_SHIFT | self._issued
        ticket = self._ticket(ticket_id, 1, request, choice)
        live = TicketRecord(ticket, request, TicketState.ADMITTED, now_ns, now_ns, now_ns + self._hand_over_ns)
        self.registry.open(live)
        self._add("admitted")
        self._place(live, choice, now_ns)
        return ticket

    def _ticket(self, ticket_id: TicketId, attempt: int, request: AdmitRequest, choice: Choice) -> Ticket:
        decode, prefill = choice.decode.announcement, choice.prefill and choice.prefill.announcement
        return Ticket(
            ticket_id=ticket_id,
            attempt=attempt,
            request_id=request.request_id,
            frontend_id=request.frontend_id,
            epoch=self.epoch,
            decode=decode.replica_id,
            prefill=prefill.replica_id if prefill else None,
            reason=choice.reason,
            wire_layout=decode.layout,
            prefill_node=prefill.node_id if prefill else "",
            decode_node=decode.node_id,
            num_prompt_tokens=request.num_prompt_tokens,
            deadline_s=self.spec.transfer.hand_over_s,
        )

    def _place(self, live: TicketRecord, choice: Choice, now_ns: int) -> None:
        live.generation = choice.decode.announcement.generation
        live.reserved, live.growth, live.ends_ns = choice.reserved, choice.growth, choice.ends_ns
        live.slots, live.variance = choice.slots, choice.variance
        live.prefill_tokens = choice.prefill_tokens
        live.hit_pages, live.hit_used = choice.hit_pages, choice.hit_used
        live.placed_ns, live.deadline_ns = now_ns, now_ns + self._hand_over_ns
        live.lost = None
        self.registry.attach(live, choice.decode, choice.prefill)
        self.registry.stage(live, choice.staging_bytes)
        if choice.prefill is None:
            self.registry.move(live, TicketEvent.DECODE_ALONE, now_ns)
            self._add("decode_alone")
        self.chooser.refresh(choice.decode)
        if choice.prefill is not None:
            self.chooser.refresh(choice.prefill)

    def _drain_queue(self, now_ns: int) -> None:
        """Gives places to those who wait, in fair order.

        The first for whom there is no room keeps the place that it will get first; behind it, only those get one who
        do not delay that.
        """
        hold: Hold | None = None
        num_behind = 0
        for waiting in list(islice(self.room.in_order(now_ns), LOOK_MAX)):
            if waiting not in self.room:
                continue  # it has left meanwhile
            placed = self._attempt(self._serve_waiting, waiting, hold, now_ns)
            if placed is _FAILED:
                self._fail_waiting(waiting, now_ns)
            elif placed is not None and hold is not None:
                num_behind += 1
                if num_behind == BACKFILL_MAX:
                    return
            elif placed is not None and self.chooser.has_pool(waiting.request, waiting.generation):
                hold = self.chooser.hold_for(waiting.request, placed, waiting.generation, now_ns)

    def _serve_waiting(self, waiting: Waiting, hold: Hold | None, now_ns: int) -> Short | None:
        choice = self._choose_for(waiting, hold, now_ns)
        if isinstance(choice, Short):
            return choice
        self.room.serve(waiting)
        if waiting.ticket_id:
            ticket = self._again(self.registry.tickets[waiting.ticket_id], choice, now_ns)
        else:
            ticket = self._issue(waiting.request, choice, now_ns)
        self._answer(waiting, ticket)
        return None

    def _fail_waiting(self, waiting: Waiting, now_ns: int) -> None:
        """A request whose turn cannot be computed leaves the queue, so that the others get theirs."""
        self.room.drop(waiting.call_id)
        self._answer(waiting, _step_failed(f"request {waiting.request.request_id}"))
        if waiting.ticket_id and (live := self.registry.tickets.get(waiting.ticket_id)) is not None:
            self._close(live, Outcome.FAILED, now_ns)

    def _answer(self, waiting: Waiting, value: Ticket | Overloaded | StepFailed) -> None:
        for call_id in (waiting.call_id, *waiting.also):
            self._reply(call_id, value)

    def _choose_for(self, waiting: Waiting, hold: Hold | None, now_ns: int) -> Choice | Short:
        choice = self.chooser.choose(waiting.request, now_ns, waiting.generation, hold)
        if isinstance(choice, Short) and waiting.request.exclude:  # better one that failed before than none
            open_minded = msgspec.structs.replace(waiting.request, exclude=())
            choice = self.chooser.choose(open_minded, now_ns, waiting.generation, hold)
        return choice

    def _withdraw(self, event: Withdraw, call_id: CallId, now_ns: int) -> None:
        waiting = self.room.leave(event.call_id)
        if waiting is not None and waiting.ticket_id:
            self._close(self.registry.tickets[waiting.ticket_id], Outcome.CANCELLED, now_ns)
        elif waiting is not None:
            self._drain_queue(now_ns)

    # -- hand-over

    def _wait_for_hand_over(self, event: WaitForHandOver, call_id: CallId, now_ns: int) -> None:
        self._advance_epoch((event.ticket_id,))
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            if not self._unclaimed(event.ticket_id, now_ns):
                self._reply(call_id, Verdict.STALE)
                return
            sealed = self._seals.get(event.ticket_id)
            if sealed is not None and sealed.seal.attempt == event.attempt:
                self._reply(call_id, self._hand_over(sealed, self._hand_over_ns))
                return
            if (former := self._early.get(event.ticket_id)) is not None:
                self._reply(former[0], Verdict.STALE)
            self._early[event.ticket_id] = (call_id, event.attempt)
        elif event.attempt != live.ticket.attempt or live.state in LANDED - {TicketState.MOVING}:
            self._reply(call_id, Verdict.STALE)
            return
        elif live.lost is not None and live.hand_over is None:
            self._reply(call_id, Verdict.MISSING)
            return
        else:
            if live.wanted_by:
                self._reply(live.wanted_by, Verdict.STALE)
            live.wanted_by = call_id
            if live.hand_over is not None:
                self._give_hand_over(live, now_ns)
                return
        insort(self._deadlines, (now_ns + int(event.timeout_s * SECOND), call_id, event.ticket_id))

    def _give_hand_over(self, live: TicketRecord, now_ns: int) -> None:
        assert live.hand_over is not None
        call_id, live.wanted_by = live.wanted_by, 0
        remaining = max(SECOND, live.deadline_ns - now_ns)
        self.registry.move(live, TicketEvent.MOVE, now_ns)
        self._reply(call_id, msgspec.structs.replace(live.hand_over, deadline_s=remaining / SECOND))

    @staticmethod
    def _hand_over(sealed: Sealed, remaining_ns: int) -> HandOver:
        seal, lease = sealed.seal, sealed.lease
        return HandOver(
            ticket_id=seal.ticket_id, attempt=seal.attempt, seal=seal, lease=lease, deadline_s=remaining_ns / SECOND
        )

    def _transfer_report(self, event: TransferReport, call_id: CallId, now_ns: int) -> None:
        status = event.status
        node = self.registry.nodes.get(status.node_id)
        if node is None:
            node = self.registry.nodes[status.node_id] = Node(status, now_ns)
        elif node.status.incarnation != status.incarnation:
            self._node_lost(node, f"the transfer actor of {status.node_id} has restarted", now_ns)
            node.bytes_moved_before += node.status.bytes_moved
            node.tokens_moved_before += node.status.tokens_moved
        node.status, node.heard_ns, node.stale = status, now_ns, False
        for thing in event.events:
            self._attempt(self._transfer_event, thing, node, now_ns)
        dead = dict.fromkeys(node.release)
        dead |= {key: None for key in status.held if self._dead(key, now_ns)}
        node.release.clear()
        self._reply(call_id, list(dead))
        if event.events:  # prefill and staging may have room again
            self._drain_queue(now_ns)

    def _dead(self, key: tuple[TicketId, int], now_ns: int) -> bool:
        """Nobody wants the bytes of this ticket and attempt any more."""
        ticket_id, attempt = key
        live = self.registry.tickets.get(ticket_id)
        if live is None:
            return not self._unclaimed(ticket_id, now_ns)
        return attempt < live.ticket.attempt or live.state not in HOLDS_LEASE

    def _unclaimed(self, ticket_id: TicketId, now_ns: int) -> bool:
        """A ticket of an older epoch that its frontend may still claim."""
        return (
            epoch_of(ticket_id) < self.epoch
            and ticket_id not in self.registry.ended
            and now_ns < self.rebuilding_until_ns
        )

    def _transfer_event(self, event: TransferEvent, node: Node, now_ns: int) -> None:
        if isinstance(event, Sealed):
            self._sealed(event, node, now_ns)
        elif isinstance(event, OpenedAt):
            self._opened(event, now_ns)
        else:
            self._lease_lost(event, now_ns)

    def _sealed(self, event: Sealed, node: Node, now_ns: int) -> None:
        seal = event.seal
        key = (seal.ticket_id, seal.attempt)
        live = self.registry.tickets.get(seal.ticket_id)
        if live is None and self._unclaimed(seal.ticket_id, now_ns):
            self._seals[seal.ticket_id] = event
            call_id, attempt = self._early.pop(seal.ticket_id, (0, 0))
            if call_id:
                self._reply(
                    call_id, self._hand_over(event, self._hand_over_ns) if attempt == seal.attempt else Verdict.STALE
                )
            return
        if live is None or live.ticket.attempt != seal.attempt or live.state not in HOLDS_LEASE:
            node.release[key] = None
            return
        if self.registry.move(live, TicketEvent.SEALED, now_ns):
            self._learn_prefill(live, now_ns)
            live.hand_over = self._hand_over(event, self._hand_over_ns)
            self._refresh_prefill(live)
            if live.wanted_by:
                self._give_hand_over(live, now_ns)

    def _learn_prefill(self, live: TicketRecord, now_ns: int) -> None:
        if (prefill := self.registry.replicas.get(live.ticket.prefill or "")) is not None:
            busy_since_ns = max(live.placed_ns, prefill.sealed_ns)
            self.forecast.learn_prefill(live.prefill_tokens, now_ns - busy_since_ns)
            prefill.sealed_ns = now_ns

    def _refresh_prefill(self, live: TicketRecord) -> None:
        prefill = self.registry.replicas.get(live.ticket.prefill or "")
        if prefill is not None:
            self.chooser.refresh(prefill)

    def _opened(self, event: OpenedAt, now_ns: int) -> None:
        opened = event.opened
        live = self.registry.tickets.get(opened.ticket_id)
        if live is None or live.ticket.attempt != opened.attempt or live.opened:
            self._add("opened_absorbed")
            return
        live.opened = True
        for verdict, count in opened.verdicts.items():
            self._add(f"pages_{verdict}", count)
        self._add("opened")
        self._add("opened_seconds", opened.seconds)
        if not opened.ok:
            self._add("recomputed_tokens", opened.num_tokens)
        self.registry.move(live, TicketEvent.OPENED if opened.ok else TicketEvent.OPEN_FAILED, now_ns)

    def _lease_lost(self, event: LeaseLost, now_ns: int) -> None:
        self._add("leases_lost")
        live = self.registry.tickets.get(event.ticket_id)
        early = (TicketState.ADMITTED, TicketState.PREFILLING, TicketState.SEALED)
        if live is not None and live.ticket.attempt == event.attempt and live.state in early and live.lost is None:
            live.hand_over = None
            self._tell_lost(live, Role.PREFILL, live.ticket.prefill or "", event.reason, now_ns)

    def _node_lost(self, node: Node, reason: str, now_ns: int) -> None:
        """The node's staging is gone: whatever was sealed there and not opened is computed again."""
        for ticket_id in sorted(self.registry.tickets):
            live = self.registry.tickets[ticket_id]
            here = (
                live.hand_over.lease.node_id == node.status.node_id
                if live.hand_over
                else (live.prefill_at is not None and live.ticket.prefill_node == node.status.node_id)
            )
            if here and live.state is not TicketState.MOVING and live.lost is None:
                live.hand_over = None
                self._tell_lost(live, Role.PREFILL, live.ticket.prefill or "", reason, now_ns)

    # -- losses and ends

    def _replica_lost(self, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        self._advance_epoch((event.ticket_id,))
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            self._lost_unknown(event, call_id, now_ns)
            return
        if event.attempt < live.ticket.attempt or (live.decode_at is None and self._waits(live)):
            self._reply_placed_or_wait(live, call_id)  # told twice
            return
        self._add("page_integrity_retries" if event.page_integrity else f"lost_{event.role}")
        suspect = self.registry.replicas.get(event.replica_id)
        if suspect is not None and not suspect.fenced and not event.page_integrity:
            suspect.stale = True  # counts as full until its next heartbeat
            self.chooser.refresh(suspect)
        if live.ticket.attempt >= ATTEMPTS_MAX:
            self._close(live, Outcome.FAILED, now_ns)
            self._reply(
                call_id, Overloaded(reason=f"gave up after {ATTEMPTS_MAX} attempts: {event.reason}", retry_after_s=1)
            )
            return
        self._retry(live, event, call_id, now_ns)

    def _waits(self, live: TicketRecord) -> bool:
        return any(waiting.ticket_id == live.ticket.ticket_id for waiting in self.room)

    def _retry(self, live: TicketRecord, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        places = (live.decode_at, live.prefill_at)
        for place in places:
            if place is not None:
                place.cancel[(live.ticket.ticket_id, live.ticket.attempt)] = CANCEL_REPEATS
        self.registry.detach(live)
        self.registry.release_lease(live)
        self._orphaned_by_replica.get(live.ticket.decode, TrackedSet()).discard(live.ticket.ticket_id)
        for place in places:
            if place is not None and not place.fenced:
                self.chooser.refresh(place)
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.STALE)
            live.wanted_by = 0
        kind = TicketEvent.PREFILL_LOST if event.role is Role.PREFILL else TicketEvent.DECODE_LOST
        if not self.registry.move(live, kind, now_ns):
            self.registry.move(live, TicketEvent.DECODE_LOST, now_ns)
        live.opened, live.lost = False, None
        live.num_output_tokens = max(live.num_output_tokens, event.num_output_tokens)
        exclude = dict.fromkeys((*live.request.exclude, event.replica_id) if event.replica_id else live.request.exclude)
        live.request = msgspec.structs.replace(
            live.request,
            exclude=tuple(exclude),
            num_output_tokens=live.num_output_tokens,
            # It will read no page that was there before: no replica is better for what it has cached.
            prefix_hashes=() if event.page_integrity else live.request.prefix_hashes,
            disaggregate=live.request.disaggregate and live.ticket.attempt < ALONE_AFTER,
        )
        # The old attempt is void from here on, also while the ticket waits for its new place.
        live.ticket = msgspec.structs.replace(live.ticket, attempt=live.ticket.attempt + 1, epoch=self.epoch)
        self._wait_again(live, call_id, now_ns)

    def _wait_again(self, live: TicketRecord, call_id: CallId, now_ns: int) -> None:
        generation = (live.generation or None) if live.num_output_tokens else None
        until_ns = now_ns + self._queue_ns
        waiting = Waiting(call_id, live.request, now_ns, until_ns, 0.0, live.ticket.ticket_id, generation)
        if live.ticket.attempt > ALONE_AFTER:  # what keeps failing is tried ever more slowly, to outlive a storm
            waiting.not_before_ns = now_ns + (BACK_OFF_NS << (live.ticket.attempt - ALONE_AFTER - 1))
        self.room.put(waiting)
        self._drain_queue(now_ns)

    def _again(self, live: TicketRecord, choice: Choice, now_ns: int) -> Ticket:
        """A ticket that lost its replica has a new place."""
        live.ticket = self._ticket(live.ticket.ticket_id, live.ticket.attempt, live.request, choice)
        self._place(live, choice, now_ns)
        self._add("retried")
        return live.ticket

    def _lost_unknown(self, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        if event.request is not None and self._presumed_dead.pop(event.ticket_id, None) is not None:
            self._add("revived")
            self.registry.reopen(event.ticket_id, (event.request.frontend_id, event.request.request_id))
        outcome = self.registry.ended.get(event.ticket_id)
        if event.request is None or outcome is not None:
            ended = f"has ended as {outcome}" if outcome else "is not known here"
            self._reply(call_id, Overloaded(reason=f"ticket {event.ticket_id} {ended}", retry_after_s=0))
            return
        ticket = Ticket(
            ticket_id=event.ticket_id,
            attempt=event.attempt,
            request_id=event.request.request_id,
            frontend_id=event.request.frontend_id,
            epoch=epoch_of(event.ticket_id),
            decode=event.replica_id if event.role is Role.DECODE else "",
            num_prompt_tokens=event.request.num_prompt_tokens,
        )
        self._claim(Claim(ticket=ticket, request=event.request, num_output_tokens=event.num_output_tokens), now_ns)
        if event.ticket_id in self.registry.tickets:
            self._replica_lost(event, call_id, now_ns)
        else:
            self._reply(call_id, Overloaded(reason="the request has another ticket", retry_after_s=0))

    def _ended(self, event: Ended, call_id: CallId, now_ns: int) -> None:
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            self._add("ended_absorbed")
            self.registry.ended.setdefault(event.ticket_id, event.outcome)
            return
        live.num_output_tokens = max(live.num_output_tokens, event.num_output_tokens)
        if event.outcome is Outcome.DONE:
            decode_ns = now_ns - live.changed_ns if live.state is TicketState.DECODING else 0
            self.forecast.learn(live.request, event.num_output_tokens, decode_ns)
            self.forecast.learn_stay(now_ns - live.placed_ns)
        self._close(live, event.outcome, now_ns)

    def _close(self, live: TicketRecord, outcome: Outcome, now_ns: int) -> None:
        ticket = live.ticket
        places = (live.decode_at, live.prefill_at)
        if outcome is not Outcome.DONE:
            for place in places:
                if place is not None:
                    place.cancel[(ticket.ticket_id, ticket.attempt)] = CANCEL_REPEATS
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.STALE)
        for waiting in [w for w in self.room if w.ticket_id == ticket.ticket_id] if live.decode_at is None else ():
            self.room.drop(waiting.call_id)
            self._answer(waiting, Overloaded(reason="the request has ended", retry_after_s=0))
        self.registry.close(live, outcome, OUTCOME_EVENT[outcome], now_ns)
        self._add(str(outcome))
        self._add("output_tokens", live.num_output_tokens)
        self._add("prompt_tokens", live.request.num_prompt_tokens)
        for place in places:
            if place is not None and not place.fenced:
                self.chooser.refresh(place)
        self._drain_queue(now_ns)

    # -- frontends

    def _frontend_heartbeat(self, event: FrontendHeartbeat, call_id: CallId, now_ns: int) -> None:
        self.frontends[event.frontend_id] = now_ns
        known = True
        self._advance_epoch(event.live_tickets)
        for ticket_id in event.live_tickets:
            if ticket_id in self.registry.tickets:
                continue
            outcome = self.registry.ended.get(ticket_id)
            if self._unclaimed(ticket_id, now_ns):
                known = False
            elif (ticket := self._presumed_dead.get(ticket_id)) is not None:  # a false alarm: it may go on elsewhere
                reason = "nobody claimed it for too long"
                order = FrontendCommand(
                    kind=CommandKind.LOST,
                    ticket_id=ticket_id,
                    attempt=ticket.attempt,
                    replica_id=ticket.decode,
                    reason=reason,
                )
                self._out.append(ToFrontend(event.frontend_id, order))
            elif outcome is not Outcome.DONE:  # a frontend that has finished it knows that by itself
                reason = f"the controller has {outcome} it" if outcome else "the controller does not know it"
                order = FrontendCommand(
                    kind=CommandKind.CANCELLED, ticket_id=ticket_id, attempt=ATTEMPTS_MAX, reason=reason
                )
                self._out.append(ToFrontend(event.frontend_id, order))
        for ticket_id in sorted(self.registry.by_frontend.get(event.frontend_id, set()).difference(event.live_tickets)):
            live = self.registry.tickets[ticket_id]
            # Said after a reply that was given long after the ticket was: it is unknown there, its grant lost.
            # (A heartbeat that was under way for long itself proves nothing.)
            if (
                now_ns >= event.stamp
                and event.stamp - max(live.admitted_ns, live.changed_ns) >= self._stale_ns
                and not self._waits(live)
            ):
                self._add("unclaimed_tickets")
                self._suspect(live.ticket)
                self._close(live, Outcome.CANCELLED, now_ns)
        self._reply(call_id, FrontendReply(epoch=self.epoch, known=known, stamp=now_ns))

    def _adopt(self, event: Adopt, call_id: CallId, now_ns: int) -> None:
        self.frontends[event.frontend_id] = now_ns
        for claim in event.claims:
            known = self.registry.tickets.get(claim.ticket.ticket_id)
            if known is None:
                self._attempt(self._claim, claim, now_ns)

    def _claim(self, claim: Claim, now_ns: int) -> None:
        """A live ticket of an older epoch comes back into the registry, in the state its frontend knows."""
        ticket, request = claim.ticket, claim.request
        ticket_id = ticket.ticket_id
        request = msgspec.structs.replace(request, num_output_tokens=claim.num_output_tokens)
        outcome = self.registry.ended.get(ticket_id)
        if outcome is not None or (ticket.frontend_id, ticket.request_id) in self.registry.by_request:
            reason = f"it has ended as {outcome}" if outcome else "its request has another ticket"
            order = FrontendCommand(
                kind=CommandKind.CANCELLED, ticket_id=ticket_id, attempt=ticket.attempt, reason=reason
            )
            self._out.append(ToFrontend(ticket.frontend_id, order))
            return
        live = TicketRecord(ticket, request, TicketState.ADMITTED, now_ns, now_ns, now_ns + self._hand_over_ns)
        live.num_output_tokens = claim.num_output_tokens
        decode = self.registry.replicas.get(ticket.decode)
        decode = decode if decode is not None and not decode.fenced else None
        output = self.forecast.output_tokens(request)
        block_tokens = decode.announcement.block_tokens if decode else self.spec.pools.decode.block_tokens
        live.slots = min(request.num_sequences, decode.slots) if decode else request.num_sequences
        live.reserved = blocks_for(request, output, block_tokens, live.slots)
        live.growth = live.slots * SECOND / (self.forecast.token_ns * block_tokens)
        live.ends_ns = now_ns + int(self.forecast.token_ns * max(1, output - claim.num_output_tokens))
        live.prefill_tokens = ticket.num_prompt_tokens
        live.generation = decode.announcement.generation if decode else ""
        self._add("claimed")
        self.registry.open(live)
        if claim.decoding or ticket.prefill is None:
            self.registry.move(live, TicketEvent.DECODE_ALONE, now_ns)
        self.registry.attach(live, decode, self.registry.replicas.get(ticket.prefill or ""))
        if decode is None:
            self._orphaned_by_replica.setdefault(ticket.decode, TrackedSet()).add(ticket_id)
        else:
            self.chooser.refresh(decode)
        sealed = self._seals.pop(ticket_id, None)
        call_id, attempt = self._early.pop(ticket_id, (0, 0))
        if call_id and attempt == ticket.attempt:
            live.wanted_by = call_id
        elif call_id:
            self._reply(call_id, Verdict.STALE)
        if sealed is not None:
            node = self.registry.nodes[sealed.lease.node_id]
            self._sealed(sealed, node, now_ns)

    # -- time

    def _tick(self, event: Tick, call_id: CallId, now_ns: int) -> None:
        self._ticked_ns = now_ns
        for replica in list(self.registry.replicas.values()):
            self._attempt(self._watch, replica, now_ns)
        for node in self.registry.nodes.values():
            self._attempt(self._watch_node, node, now_ns)
        for frontend_id in self.registry.by_frontend:
            self.frontends.setdefault(frontend_id, now_ns)  # nobody's tickets may go unwatched
        for frontend_id, heard_ns in list(self.frontends.items()):
            if now_ns - heard_ns >= self._fence_ns:  # its streams on decode have ended long before, if it is dead
                self._attempt(self._frontend_silent, frontend_id, "is silent", now_ns)
        for waiting in self.room.expired(now_ns):
            self._attempt(self._give_up_waiting, waiting, now_ns)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, call_id, ticket_id = self._deadlines.pop(0)
            self._attempt(self._hand_over_late, call_id, ticket_id)
        for part in (
            self._resend_orders,
            self._end_rebuilding,
            self._drain_queue,
            self._reforecast,
            self._decide_scale,
        ):
            self._attempt(part, now_ns)

    def _watch_node(self, node: Node, now_ns: int) -> None:
        if not node.stale and now_ns - node.heard_ns >= self._fence_ns:
            node.stale = True
            self._node_lost(node, f"the transfer actor of {node.status.node_id} is silent", now_ns)
            self._out.append(Replace("transfer", node.status.node_id))

    def _reforecast(self, now_ns: int) -> None:
        if len(self.room):
            self._reschedule(now_ns)

    def _decide_scale(self, now_ns: int) -> None:
        for decision in self.autoscaler.decide(self.registry, self.room, self.forecast, now_ns):
            self._add(f"scale_{decision.pool}_{'up' if decision.target > decision.current else 'down'}")
            self._out.append(Log(f"scale {decision.pool} {decision.current} -> {decision.target}: {decision.reason}"))
        members = ((r.role, not (r.fenced or r.draining_since_ns)) for r in self.registry.replicas.values())
        self._out += [Log(line) for line in self.autoscaler.sizes.look(members, now_ns)]

    def _shift_deadlines_after_stall(self, now_ns: int) -> None:
        """When this process was away, nobody else was silent: what they said meanwhile is still in the mail."""
        gap_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        if now_ns - gap_ns < self.rebuilding_until_ns:
            self._away_ns += gap_ns
        for replica in self.registry.replicas.values():
            replica.heard_ns = min(now_ns, replica.heard_ns + gap_ns)
        for node in self.registry.nodes.values():
            node.heard_ns = min(now_ns, node.heard_ns + gap_ns)
        self.autoscaler.sizes.shift(gap_ns)
        for frontend_id, heard_ns in self.frontends.items():
            self.frontends[frontend_id] = min(now_ns, heard_ns + gap_ns)
        for waiting in self.room:
            waiting.until_ns += gap_ns
        self._deadlines = TrackedList(
            (when_ns + gap_ns, call, ticket_id) for when_ns, call, ticket_id in self._deadlines
        )
        self._add("own_pauses")
        self._out.append(Log(f"the controller itself was away for {gap_ns / SECOND:.1f} s"))

    def _watch(self, replica: Replica, now_ns: int) -> None:
        silent = now_ns - replica.heard_ns
        if replica.fenced:
            if silent >= FORGET_FENCED_NS:
                del self.registry.replicas[replica.id]
            return
        if silent >= self._fence_ns:
            replica.fenced = True
            self._add("fenced")
            self._drop_replica(replica, f"{replica.id} has been silent for {silent / SECOND:.1f} s", now_ns, keep=True)
            self._out.append(Replace("replica", replica.id))
            return
        if silent >= self._stale_ns and not replica.stale:
            replica.stale = True
            self.chooser.refresh(replica)
        since = replica.draining_since_ns
        if since and self._drain_ns is not None and now_ns - since >= self._drain_ns:
            for ticket_id in sorted(replica.tickets):
                live = self.registry.tickets[ticket_id]
                if live.lost is None:
                    self._order(CommandKind.MOVE, live, replica.role, replica.id, f"{replica.id} is leaving", now_ns)

    def _frontend_gone(self, event: FrontendGone, call_id: CallId, now_ns: int) -> None:
        self._frontend_silent(event.frontend_id, "is gone", now_ns)

    def _frontend_silent(self, frontend_id: str, why: str, now_ns: int) -> None:
        self.frontends.pop(frontend_id, None)
        tickets = sorted(self.registry.by_frontend.get(frontend_id, ()))
        for waiting in [w for w in self.room if w.request.frontend_id == frontend_id]:
            self.room.drop(waiting.call_id)  # all of them first: a place given back now goes to somebody else
            self._answer(waiting, Overloaded(reason=f"frontend {frontend_id} {why}", retry_after_s=1))
        for ticket_id in tickets:
            live = self.registry.tickets[ticket_id]
            self._suspect(live.ticket)
            self._close(live, Outcome.CANCELLED, now_ns)
        self._out.append(Log(f"frontend {frontend_id} {why}: {len(tickets)} tickets cancelled"))

    def _suspect(self, ticket: Ticket) -> None:
        """It is cancelled because nobody seems to want it; should somebody do so after all, it is revived."""
        self._presumed_dead[ticket.ticket_id] = ticket

    def _give_up_waiting(self, waiting: Waiting, now_ns: int) -> None:
        waited_s = (waiting.until_ns - waiting.since_ns) / SECOND
        self._refuse(waiting, f"no room on decode within {waited_s:g} s", self._next_start_ns(now_ns), now_ns)
        if waiting.ticket_id and (live := self.registry.tickets.get(waiting.ticket_id)) is not None:
            self._close(live, Outcome.FAILED, now_ns)

    def _hand_over_late(self, call_id: CallId, ticket_id: TicketId) -> None:
        live = self.registry.tickets.get(ticket_id)
        if live is not None and live.wanted_by == call_id:
            live.wanted_by = 0
            self._add("hand_over_late")
            self._reply(call_id, Verdict.MISSING)
        elif self._early.get(ticket_id, (0, 0))[0] == call_id:
            del self._early[ticket_id]
            self._reply(call_id, Verdict.MISSING)

    def _resend_orders(self, now_ns: int) -> None:
        """Says again what a frontend has not acted on: an order may have been lost with a connection."""
        for ticket_id, told_ns in list(self._order_sent_ns.items()):
            live = self.registry.tickets.get(ticket_id)
            if live is None or live.lost is None:
                del self._order_sent_ns[ticket_id]
            elif now_ns - told_ns >= ORDER_AGAIN_NS and not self._waits(live):
                self._order_sent_ns[ticket_id] = now_ns
                self._out.append(ToFrontend(live.ticket.frontend_id, live.lost))

    def _end_rebuilding(self, now_ns: int) -> None:
        if now_ns < self.rebuilding_until_ns or not (self._seals or self._early or self._orphaned_by_replica):
            return
        for sealed in self._seals.values():
            if (node := self.registry.nodes.get(sealed.lease.node_id)) is not None:
                node.release[(sealed.seal.ticket_id, sealed.seal.attempt)] = None
        for call_id, _ in self._early.values():
            self._reply(call_id, Verdict.STALE)
        for replica_id, tickets in self._orphaned_by_replica.items():
            for ticket_id in sorted(tickets):
                live = self.registry.tickets.get(ticket_id)
                if live is not None and live.decode_at is None and live.lost is None:
                    self._tell_lost(live, Role.DECODE, replica_id, f"{replica_id} has not come back", now_ns)
        self._seals.clear()
        self._early.clear()
        self._orphaned_by_replica.clear()

    # -- scaling

    def _replica_starting(self, event: ReplicaStarting, call_id: CallId, now_ns: int) -> None:
        if event.replica_id not in self.registry.replicas:
            self.autoscaler.sizes.starting(event.pool, event.replica_id, now_ns)

    def _platform_size(self, event: PlatformSize, call_id: CallId, now_ns: int) -> None:
        wanted, line = self.autoscaler.sizes.hear(event.pool, event.current, event.target, now_ns)
        if line:
            self._out.append(Log(line))
        self._reply(call_id, wanted)

    def _set_target(self, event: SetTarget, call_id: CallId, now_ns: int) -> None:
        problem = self.autoscaler.set_by_hand(event.pool, event.target, event.hold_s, now_ns)
        self._out.append(Log(f"{event.pool} set to {event.target} by hand: {problem or 'taken'}"))
        self._reply(call_id, problem)

    def _configure(self, event: Configure, call_id: CallId, now_ns: int) -> None:
        if event.deployment < self.deployment:
            return  # of a frontend that is being replaced
        self.deployment = event.deployment
        if event.spec == self.spec:
            return
        self._read(event.spec)
        self.chooser.configure(event.spec.admission, event.spec.transfer.staging_bytes_max)
        self.room.size_max = event.spec.admission.queue_max
        self.autoscaler.configure(event.spec)
        self._out.append(Log("the configuration has changed"))
