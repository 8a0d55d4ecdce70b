"""PrefillReplica and DecodeReplica: what Ray Serve runs. They find their actors and put an engine host between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import ray
from ray import serve

from actors import logs
from actors.controller.actor import get_or_create
from actors.engine.config import set_environment
from actors.engine.server import DecodeServer, PrefillServer
from actors.messages import HandOver, PrefillDone, ReplicaStarting, Role, Ticket
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

        def get_transfer() -> Any:
            transfer = self._spec.transfer
            return transfer_shell.get_or_create(
                node_id, transfer.staging_bytes_max, transfer.lease_s, self._application
            )

        place = await get_transfer().start.remote()
        return {
            "replica_id": self._replica_id,
            "node_id": node_id,
            "get_transfer": get_transfer,
            "socket_path": place["socket"],
            "get_controller": self.controller,
        }


async def _end(replica: Any) -> None:
    """Serve calls this when nothing is in progress any more."""
    if (host := getattr(replica, "host", None)) is not None:
        await host.say_goodbye()
        host.shutdown()


class PrefillReplica:
    """Serve deployment `Prefill`: computes prompts and seals their pages."""

    async def __init__(self, spec_tree: dict[str, Any], deployment: int) -> None:
        logs.below_serve()
        spec = ClusterSpec.parse(spec_tree)
        place = _Place(spec, Role.PREFILL, deployment)
        with place.announced():
            self.host = PrefillServer(spec, **await place.wiring())
            await self.host.start()

    async def prefill(self, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        return await self.host.prefill(ticket, frames)

    async def abort(self, ticket_ids: list[int]) -> None:
        await self.host.abort(ticket_ids)

    async def audit(self) -> dict[str, Any]:
        return await self.host.audit()

    async def fault(self, kind: str, trial: int, target: str | int, more: float) -> dict[str, Any]:
        return await self.host.fault(kind, trial, target, more)

    async def utility(self, method: str, args: list[Any]) -> Any:
        return await self.host.utility(method, args)

    async def check_health(self) -> None:
        await self.host.check_health()

    async def __del__(self) -> None:
        await _end(self)


class DecodeReplica:
    """Serve deployment `Decode`: opens pages and decodes."""

    async def __init__(self, spec_tree: dict[str, Any], deployment: int) -> None:
        logs.below_serve()
        spec = ClusterSpec.parse(spec_tree)
        place = _Place(spec, Role.DECODE, deployment)
        with place.announced():
            self.host = DecodeServer(spec, **await place.wiring())
            await self.host.start()

    async def submit(self, frontend_id: str, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None) -> None:
        await self.host.submit(frontend_id, frames, ticket, hand_over)

    async def abort(self, frontend_id: str, request_ids: list[str]) -> None:
        await self.host.abort(frontend_id, request_ids)

    async def outputs(self, frontend_id: str) -> AsyncGenerator[list[bytes], None]:
        async for frames in self.host.outputs(frontend_id):
            yield frames

    async def audit(self) -> dict[str, Any]:
        return await self.host.audit()

    async def fault(self, kind: str, trial: int, target: str | int, more: float) -> dict[str, Any]:
        return await self.host.fault(kind, trial, target, more)

    async def utility(self, method: str, args: list[Any]) -> Any:
        return await self.host.utility(method, args)

    async def check_health(self) -> None:
        await self.host.check_health()

    async def __del__(self) -> None:
        await _end(self)
