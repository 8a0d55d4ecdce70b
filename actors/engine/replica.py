"""PrefillReplica and DecodeReplica: what Ray Serve runs. They find the actors that an engine server works with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve

from actors import logs
from actors.controller.actor import get_or_create
from actors.engine.config import set_environment
from actors.engine.decode import DecodeServer
from actors.engine.prefill import PrefillServer
from actors.engine.server import EngineServer
from actors.messages import ReplicaStarting, Role
from actors.transfer import actor as transfer_shell
from cluster.spec import ClusterSpec

ANNOUNCE_EVERY_S = 3.0


class _Place:
    """Who this replica is, and whom its engine server talks to."""

    def __init__(self, spec: ClusterSpec, role: Role, deployment: int) -> None:
        set_environment(spec, role)  # before anything imports vLLM
        context = serve.get_replica_context()
        self._spec, self._role, self._deployment = spec, role, deployment
        self._application = context.app_name
        self._replica_id = context.replica_id.unique_id

    def controller(self) -> Any:
        return get_or_create(self._application, self._spec, self._deployment)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Says that this process is there, again and again, while its engine loads: a thread, since loading blocks."""
        loaded = threading.Event()

        def announce() -> None:
            while not loaded.wait(ANNOUNCE_EVERY_S):
                with contextlib.suppress(Exception):  # the controller is away: said again soon
                    self.controller().call.remote(ReplicaStarting(self._replica_id, self._role))

        self.controller().call.remote(ReplicaStarting(self._replica_id, self._role))
        thread = threading.Thread(target=announce, daemon=True)
        thread.start()
        try:
            yield
        finally:
            loaded.set()

    async def wiring(self) -> dict[str, Any]:
        node_id = ray.get_runtime_context().get_node_id()

        transfer, tracing = self._spec.transfer, self._spec.tracing

        def get_transfer() -> Any:
            return transfer_shell.get_or_create(
                node_id, transfer.staging_bytes_max, transfer.lease_s, self._application, tracing
            )

        # The actor may be there already, from before the settings were changed.
        place = await get_transfer().start.remote(transfer.staging_bytes_max, transfer.lease_s, tracing)
        return {
            "replica_id": self._replica_id,
            "node_id": node_id,
            "get_transfer": get_transfer,
            "socket_path": place["socket"],
            "get_controller": self.controller,
            "host": ray.util.get_node_ip_address(),
        }


class _Replica(EngineServer):
    """An engine server that Serve makes, wired to the actors of its application and its node."""

    async def __init__(self, spec_tree: dict[str, Any], deployment: int) -> None:
        logs.below_serve()
        spec = ClusterSpec.parse(spec_tree)
        place = _Place(spec, self.role, deployment)
        with place.announced():
            super().__init__(spec, **await place.wiring())
            await self.start()

    async def __del__(self) -> None:
        await self.end()


class PrefillReplica(_Replica, PrefillServer):
    """Serve deployment `Prefill`."""


class DecodeReplica(_Replica, DecodeServer):
    """Serve deployment `Decode`."""
