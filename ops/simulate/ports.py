"""What a frontend has of Ray: a handle of the controller, calls to named replicas, and output streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from actors.messages import HandOver, PrefillDone, ReplicaId, ReplicaLost, Request, Ticket
from app.rpc.ports import ReplicaGone
from app.rpc.remote import RemoteController
from ops.simulate.controller import ControllerSim
from ops.simulate.decode import DecodeSim, TokenStream
from ops.simulate.network import ConnectionLost, Handler, Net
from ops.simulate.prefill import PrefillSim
from ops.simulate.world import Done

if TYPE_CHECKING:
    from ops.simulate.frontend import FrontendSim


class ActorHandle:
    """What a frontend has of the controller: `handle.method.remote(...)` is a future, or raises `RayActorError`."""

    def __init__(self, frontend: FrontendSim, net: Net, controller: ControllerSim) -> None:
        self._frontend = frontend
        self._net = net
        self._controller = controller

    @property
    def call(self) -> Method:
        return Method(self._call)

    @property
    def orders(self) -> Method:
        return Method(self._orders)

    async def _call(self, message: Request[Any]) -> Any:
        if isinstance(message, ReplicaLost):
            self._frontend.check_loss(message)
        return await self._ask(type(message).__name__, self._controller.handler_of(message))

    async def _orders(self, frontend_id: str, timeout_s: float) -> Any:
        return await self._ask("orders", self._controller.poll(frontend_id, timeout_s))

    async def _ask(self, kind: str, handler: Handler) -> Any:
        try:
            return await self._net.ask(self._frontend, self._controller, kind, handler)
        except ConnectionLost as error:
            raise RayActorError(error_msg=str(error)) from None


class Method:
    """A method of the handle: `remote(...)` begins the call."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._call(*args))


class ControllerPort(RemoteController):
    """The shipped one, with the simulated process ended instead of Ray's."""

    def __init__(self, frontend: FrontendSim) -> None:
        handle = ActorHandle(frontend, frontend.net, frontend.controller)
        super().__init__(lambda: handle, frontend.name, cancel=lambda call: call.cancel())
        self._frontend = frontend

    def restart(self) -> None:
        if self._frontend.alive:
            self._frontend.controller.restart()


class EnginePort:
    """Calls to one named replica, as Serve makes them: at most once, and cancelled with their caller."""

    def __init__(self, frontend: FrontendSim) -> None:
        self._frontend = frontend

    async def _call(self, replica_id: ReplicaId, kind: str, handler: Callable[[Any], Handler]) -> Any:
        replica = self._frontend.find(replica_id)
        if replica is None:
            raise ReplicaGone(replica_id, "no such replica")
        try:
            return await self._frontend.net.ask(self._frontend, replica, kind, handler(replica), once=True)
        except ConnectionLost as error:
            raise ReplicaGone(replica_id, str(error), died=not replica.alive) from None

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        return []


class PrefillPort(EnginePort):
    async def prefill(self, replica_id: ReplicaId, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        def handler(replica: PrefillSim) -> Handler:
            return lambda answer: replica.prefill(ticket, frames, answer)

        done: PrefillDone = await self._call(replica_id, "prefill", handler)
        return done


class DecodePort(EnginePort):
    async def submit(
        self, replica_id: ReplicaId, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None
    ) -> None:
        def handler(replica: DecodeSim) -> Handler:
            return lambda answer: replica.submit(self._frontend.name, frames, ticket, hand_over, answer)

        await self._call(replica_id, "submit", handler)
        self._frontend.submitted.add((ticket.ticket_id, ticket.attempt))

    async def abort(self, replica_id: ReplicaId, engine_ids: list[str]) -> None:
        def handler(replica: DecodeSim) -> Handler:
            def abort(answer: Done) -> None:
                replica.abort(engine_ids)
                answer(None)

            return abort

        await self._call(replica_id, "abort", handler)

    def outputs(self, replica_id: ReplicaId) -> Outputs:
        return Outputs(self, replica_id)


class Outputs:
    """An output stream as an async iterator: `[]` once it stands, then one message an engine step."""

    def __init__(self, port: DecodePort, replica_id: ReplicaId) -> None:
        self._port = port
        self._replica_id = replica_id
        self._stream: TokenStream | None = None

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> list[bytes]:
        if self._stream is None:
            await self._port._call(self._replica_id, "outputs", self._open)
        assert self._stream is not None
        frames = await self._stream.queue.get()
        if frames is None:
            raise ReplicaGone(self._replica_id, "its output stream broke", died=not self._stream.replica.alive)
        return frames

    def _open(self, replica: DecodeSim) -> Handler:
        frontend = self._port._frontend
        self._stream = stream = TokenStream(frontend.net, frontend, replica)
        return lambda answer: replica.open_stream(stream, answer)

    async def aclose(self) -> None:
        if self._stream is not None and self._stream.open:
            self._stream.close()
