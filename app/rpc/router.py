"""Addressing one replica through Serve: a request router that sends a call to the replica it names.

A handle call carries the replica's id as `handle.options(session_id=...)`. Replicas that Serve is draining take no new
tickets but stay reachable for what is already theirs. A name that the router does not know fails the call at once with
`ReplicaGone`: all routers of a process share one event loop, so nothing may wait in them. `app.rpc.directory` is
what the frontend sees of them, and where it waits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.rpc import directory
from app.rpc.ports import ReplicaGone

MAX_LEAVING = 64
MAX_DEAD = 1024


class AddressedRouter(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._named: dict[str, RunningReplica] = {}  # by the id that tickets carry
        self._leaving: OrderedDict[str, RunningReplica] = OrderedDict()
        self._dead: OrderedDict[str, None] = OrderedDict()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        now = {replica.replica_id.unique_id: replica for replica in replicas}
        for name, replica in self._named.items():
            if name not in now and name not in self._dead:
                self._leaving[name] = replica
        for name in now:
            self._leaving.pop(name, None)
            self._dead.pop(name, None)
        while len(self._leaving) > MAX_LEAVING:
            self._leaving.popitem(last=False)
        self._named = now
        super().update_replicas([*replicas, *self._leaving.values()])
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._dead[name] = None
        while len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        self._named.pop(name, None)
        self._leaving.pop(name, None)
        self._publish()

    def _publish(self) -> None:
        known = directory.Replicas(frozenset(self._named), frozenset(self._leaving), frozenset(self._dead))
        directory.update(self._deployment_id.name, known)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [list(self._named.values())]
        # Else Serve asks again without ever yielding its event loop when no choice can take the call now.
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.session_id
        if not name:
            return [list(self._named.values())]
        replica = self._named.get(name) or self._leaving.get(name)
        if replica is not None:
            return [[replica]]
        if not pending_request.future.done():
            why = "it died" if name in self._dead else "Serve does not know it"
            pending_request.future.set_exception(ReplicaGone(name, why))
        return [candidate_replicas[:1]]  # no replica gets the call; the routing loop looks at the future and goes on
