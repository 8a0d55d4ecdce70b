"""What one controller life knows, and how a part of a step is undone. Pure.

The machine is one object in layers, each a file: state, admission, tickets, recovery, membership, machine. A layer
calls only itself and the layers below it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from actors.controller.autoscale import Autoscaler
from actors.controller.capacity import Schedule, Short
from actors.controller.events import (
    CallId,
    Effect,
    Log,
    Reply,
    StepFailed,
    ToFrontend,
)
from actors.controller.forecast import SECOND, Forecast
from actors.controller.journal import RecentDict, Tracked, TrackedDeque, TrackedDict, TrackedList, TrackedSet, savepoint
from actors.controller.page_book import TagMismatch
from actors.controller.queue import AdmissionQueue
from actors.controller.rates import Buckets
from actors.controller.registry import EPOCH_SHIFT, Registry, TicketRecord, epoch_of
from actors.controller.selector import ReplicaSelector
from actors.controller.stalls import Stalls
from actors.messages import (
    CommandKind,
    FrontendCommand,
    ReplicaId,
    Role,
    Sealed,
    Ticket,
    TicketId,
    Verdict,
)
from cluster.spec import ClusterSpec

PRESUMED_DEAD_KEPT = 10_000
LEFT_KEPT = 1_000
MISMATCHES_KEPT = 64
SCHEDULE_EVERY_NS = SECOND // 2
FAILED: Any = object()  # what `_attempt` returns when its handler raised


def step_failed(what: str) -> StepFailed:
    return StepFailed(f"the controller could not handle {what}; its log has the reason")


class ControllerState(Tracked):
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
        self.selector = ReplicaSelector(spec.admission, self.forecast, self.registry, spec.transfer.staging_bytes_max)
        self.queue = AdmissionQueue(spec.admission.queue_max)
        self.buckets = Buckets()  # of tenants with limits
        self._schedules: dict[str, Schedule] = {}  # of those who wait, by tokenizer; only ever made anew or added to
        self._scheduled_ns = -SCHEDULE_EVERY_NS
        # When those who wait were looked at last, what they lacked, and counts that tell whether that is free now.
        self._full: tuple[frozenset[Short], int, int, int] | None = None
        self._full_ns = 0
        self.autoscaler = Autoscaler(spec, now_ns, fresh)
        self.frontends: TrackedDict[str, int] = TrackedDict()  # last heard
        self.stalls = Stalls()
        self.counters: TrackedDict[str, float] = TrackedDict()
        # Nodes that are about to go: when what runs there is taken elsewhere; 0: it may take its time.
        self._going_nodes: TrackedDict[str, int] = TrackedDict()
        self.mismatches: TrackedDeque[TagMismatch] = TrackedDeque(maxlen=MISMATCHES_KEPT)
        self._issued = 0
        # Of hand-over calls that wait, sorted.
        self._deadlines: TrackedList[tuple[int, CallId, TicketId]] = TrackedList()
        # Of an older epoch's tickets that no frontend has claimed yet.
        self._seals: TrackedDict[TicketId, Sealed] = TrackedDict()
        # Hand-over calls for such tickets: (call, attempt).
        self._early: TrackedDict[TicketId, tuple[CallId, int]] = TrackedDict()
        # Tickets whose frontend was asked to take them elsewhere: when.
        self._order_sent_ns: TrackedDict[TicketId, int] = TrackedDict()
        # Claimed tickets whose decode replica is not back yet.
        self._orphaned_by_replica: TrackedDict[ReplicaId, TrackedSet[TicketId]] = TrackedDict()
        # Cancelled because no frontend claimed them.
        self._presumed_dead: RecentDict[TicketId, Ticket] = RecentDict(PRESUMED_DEAD_KEPT)
        # Replicas that said goodbye: a late heartbeat brings none back.
        self._left_lives: RecentDict[tuple[ReplicaId, int], None] = RecentDict(LEFT_KEPT)
        self._out: list[Effect] = []
        self._read(spec)

    def _read(self, spec: ClusterSpec) -> None:
        self.spec = spec
        admission = spec.admission
        self._stale_ns = int(admission.stale_after_s * SECOND)
        self._fence_ns = int(max(admission.fence_after_s, admission.stale_after_s) * SECOND)
        self._queue_ns = int(admission.queue_wait_s * SECOND)
        self._hand_over_ns = int(spec.transfer.hand_over_s * SECOND)
        self._drain_ns = None if spec.scaling.drain_deadline_s is None else int(spec.scaling.drain_deadline_s * SECOND)

    def _attempt(self, handler: Callable[..., Any], *args: Any) -> Any:
        """What `handler` returns; `FAILED` when it raised: then all that it changed is undone, effects included."""
        num_effects = len(self._out)
        try:
            with savepoint():
                return handler(*args)
        except Exception:
            del self._out[num_effects:]
            self._add("steps_failed")
            name = getattr(handler, "__name__", "step")
            self._out.append(Log(f"{name.strip('_')} failed and is undone: {traceback.format_exc()}", is_error=True))
            return FAILED

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

    def _unclaimed(self, ticket_id: TicketId, now_ns: int) -> bool:
        """A ticket of an older epoch that its frontend may still claim."""
        return (
            epoch_of(ticket_id) < self.epoch
            and ticket_id not in self.registry.ended
            and now_ns < self.rebuilding_until_ns
        )

    def _reply(self, call_id: CallId, value: Any) -> None:
        if call_id:
            self._out.append(Reply(call_id, value))

    def _add(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def _tell_lost(
        self, live: TicketRecord, role: Role, replica_id: ReplicaId, reason: str, now_ns: int, died: bool = False
    ) -> None:
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.MISSING)
            live.wanted_by = 0
        self._order(CommandKind.LOST, live, role, replica_id, reason, now_ns, died)

    def _order(
        self,
        kind: CommandKind,
        live: TicketRecord,
        role: Role,
        replica_id: ReplicaId,
        reason: str,
        now_ns: int,
        died: bool = False,
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
            died=died,
        )
        self._order_sent_ns[ticket.ticket_id] = now_ns
        self._out.append(ToFrontend(ticket.frontend_id, live.lost))

    def _suspect(self, ticket: Ticket) -> None:
        """It is cancelled because no process seems to want it; if one does after all, it is revived."""
        self._presumed_dead[ticket.ticket_id] = ticket

    def _waits(self, live: TicketRecord) -> bool:
        return any(waiting.ticket_id == live.ticket.ticket_id for waiting in self.queue)
