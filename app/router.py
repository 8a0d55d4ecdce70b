"""Addressing one replica through Serve: a request router that sends a call to the replica it names.

A handle call carries the replica's id as `handle.options(session_id=...)`. Replicas that Serve is draining take no new
tickets but stay reachable for what is already theirs; one that is dead fails the call at once with `ReplicaGone`.
Routers live in threads of Serve; `app.directory` is what the frontend sees of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app import directory
from app.ports import ReplicaGone

APPEAR_S = 10.0  # a replica joins the controller a moment before Serve tells the routers of it
MAX_LEAVING = 64


class AddressedRouter(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._named: dict[str, RunningReplica] = {}  # by the id that tickets carry
        self._leaving: OrderedDict[str, RunningReplica] = OrderedDict()
        self._dead: set[str] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        now = {replica.replica_id.unique_id: replica for replica in replicas}
        for name, replica in self._named.items():
            if name not in now and name not in self._dead:
                self._leaving[name] = replica
        for name in now:
            self._leaving.pop(name, None)
            self._dead.discard(name)
        while len(self._leaving) > MAX_LEAVING:
            self._leaving.popitem(last=False)
        self._named = now
        super().update_replicas([*replicas, *self._leaving.values()])
        directory.update(self._deployment_id.name, frozenset(now))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._dead.add(name)
        self._named.pop(name, None)
        self._leaving.pop(name, None)
        directory.update(self._deployment_id.name, frozenset(self._named))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = "" if pending_request is None else pending_request.metadata.session_id
        if not name:
            return [list(self._named.values())]
        found = self._named.get(name) or self._leaving.get(name)
        if found is not None:
            return [[found]]
        assert pending_request is not None
        why = "it died" if name in self._dead else ""
        if not why and time.time() - pending_request.created_at > APPEAR_S:
            why = f"Serve has not known it for {APPEAR_S:g} s"
        if not why:
            return []
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(name, why))
        return [candidate_replicas[:1]]  # nobody gets the call; the routing loop looks at the future and goes on
