"""The controller's machine: `step(message, now_ns) -> effects`. Pure: no clock, no random, no socket, no Ray.

The Ray actor, the simulator and the tests all drive this one class. What a message means is decided by the ticket
table; what is held is the registry's; who gets what is the selector's. Messages may come early, late, twice or not at
all: every call that waits has a deadline, and every resource has an owner whose silence is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.controller.events import (
    CallId,
    Effect,
    Event,
    FrontendGone,
    Log,
    NodesDraining,
    Tick,
    Withdraw,
)
from actors.controller.forecast import SECOND
from actors.controller.membership import Membership
from actors.controller.state import FAILED, step_failed
from actors.messages import (
    AdmitRequest,
    Adopt,
    Configure,
    Ended,
    FrontendHeartbeat,
    Join,
    PlatformSize,
    ReplicaHeartbeat,
    ReplicaLeaving,
    ReplicaLeft,
    ReplicaLost,
    ReplicaStarting,
    SetTarget,
    TransferReport,
    WaitForHandOver,
)
from cluster.spec import ClusterSpec

PAUSE_NS = SECOND // 2  # a shorter gap between ticks is no pause, however soon replicas count as stale
# Answered as soon as they are taken in.
NOTICES = (ReplicaStarting, ReplicaLeft, ReplicaLeaving, Adopt, Configure, Ended)


class Machine(Membership):
    """One controller life. `epoch` must be higher than that of every life before it.

    `fresh`: the first life, of an application that starts. `deployment`: number of the configuration `spec`.
    """

    def __init__(self, spec: ClusterSpec, epoch: int, now_ns: int, fresh: bool = True, deployment: int = 0) -> None:
        super().__init__(spec, epoch, now_ns, fresh, deployment)
        self._handlers: dict[type, Callable[[Any, CallId, int], None]] = {
            Join: self._join,
            ReplicaHeartbeat: self._replica_heartbeat,
            ReplicaLeaving: self._replica_leaving,
            ReplicaLeft: self._replica_left,
            FrontendHeartbeat: self._frontend_heartbeat,
            FrontendGone: self._frontend_gone,
            NodesDraining: self._nodes_draining,
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

    def step(self, event: Event, now_ns: int, call_id: CallId = 0) -> list[Effect]:
        """`call_id` is answered with one `Reply`, now or in a later step; 0: no answer is wanted."""
        self._out = []
        # Before anything that is in the mail is judged by the clock.
        if now_ns - self._ticked_ns >= max(PAUSE_NS, self._stale_ns // 2):
            self._attempt(self._shift_deadlines_after_stall, now_ns)
        if self._attempt(self._handle, event, call_id, now_ns) is FAILED:
            self._reply(call_id, step_failed(type(event).__name__))
        return self._out

    def _handle(self, event: Event, call_id: CallId, now_ns: int) -> None:
        self._handlers[type(event)](event, call_id, now_ns)
        if isinstance(event, NOTICES):
            self._reply(call_id, None)

    def _tick(self, event: Tick, call_id: CallId, now_ns: int) -> None:
        self._ticked_ns = now_ns
        quiet_ns = now_ns - self._stale_ns
        for replica in [r for r in self.registry.replicas.values() if r.heard_ns <= quiet_ns or r.draining_since_ns]:
            self._attempt(self._watch, replica, now_ns)
        for node in self.registry.nodes.values():
            self._attempt(self._watch_node, node, now_ns)
        for frontend_id in self.registry.by_frontend:
            self.frontends.setdefault(frontend_id, now_ns)  # every owner of tickets is watched
        for frontend_id, heard_ns in list(self.frontends.items()):
            if now_ns - heard_ns >= self._fence_ns:  # its streams on decode have ended long before, if it is dead
                self._attempt(self._frontend_silent, frontend_id, "is silent", now_ns)
        for waiting in self.queue.expired(now_ns):
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

    def _decide_scale(self, now_ns: int) -> None:
        for decision in self.autoscaler.decide(self.registry, self.queue, self.forecast, now_ns):
            self._add(f"scale_{decision.pool}_{'up' if decision.target > decision.current else 'down'}")
            self._out.append(Log(f"scale {decision.pool} {decision.current} -> {decision.target}: {decision.reason}"))
        members = ((r.role, not (r.fenced or r.draining_since_ns)) for r in self.registry.replicas.values())
        self._out += [Log(line) for line in self.autoscaler.sizes.look(members, now_ns)]

    def _platform_size(self, event: PlatformSize, call_id: CallId, now_ns: int) -> None:
        wanted, line = self.autoscaler.sizes.hear(event.pool, event.current, event.target, now_ns)
        if line:
            self._add(f"targets_refused_{event.pool}")
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
        self.selector.configure(event.spec.admission, event.spec.transfer.staging_bytes_max)
        self.queue.size_max = event.spec.admission.queue_max
        self.autoscaler.configure(event.spec)
        self._full = None
        self._out.append(Log("the configuration has changed"))
