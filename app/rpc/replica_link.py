"""A frontend's end of the socket to one replica: calls, their answers, and the outputs of its engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextvars import Context

from ray.exceptions import ActorUnavailableError, RayActorError

from actors import link
from actors.engine.in_flight import EngineDied
from actors.messages import PrefillDone, ReplicaId
from app.rpc.ports import ReplicaGone

logger = logging.getLogger("pageferry.frontend")

GREETING_S = 10.0
VERDICT_S = 1.0  # in which Ray says that the process behind a connection that broke has died; else it lives


class CallFailed(Exception):
    """The replica could not do what it was asked; the message is its error."""


def _why(error: BaseException) -> str:
    """In words that a client may read: Ray's own have addresses and process ids."""
    if isinstance(error, ReplicaGone):
        return error.why
    return "its process has died or cannot be reached" if isinstance(error, RayActorError) else "it cannot be reached"


class ReplicaLink:
    """Stands for as long as `presence`, Serve's stream from that replica, and the socket do. `open` makes one.

    `on_end` is called once, when either has ended.
    """

    def __init__(self, replica_id: ReplicaId, on_end: Callable[[ReplicaLink], None]) -> None:
        self.replica_id = replica_id
        self.outputs: asyncio.Queue[list[bytes] | None] = asyncio.Queue()  # None: no more
        self.reason = ""  # why it has ended
        self.died = False  # with the replica's process or engine
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[PrefillDone | None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    async def open(self, presence: AsyncGenerator[link.Address, None]) -> None:
        """Raises `ReplicaGone`. `presence` ends with the link."""
        try:
            async with asyncio.timeout(GREETING_S):
                reader = await self._greet(await anext(presence))
        except BaseException as error:
            self.end(_why(error))
            await presence.aclose()
            if not isinstance(error, Exception):
                raise
            logger.warning("replica %s cannot be reached: %r", self.replica_id, error)
            raise ReplicaGone(self.replica_id, self.reason) from None
        loop = asyncio.get_running_loop()
        # In a context of their own: Serve would end them with the HTTP request that happened to need the link first.
        self._tasks = [
            loop.create_task(self._read(reader), context=Context()),
            loop.create_task(self._watch(presence), context=Context()),
        ]

    async def _greet(self, address: link.Address) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(address.host, address.port)
        challenge = await link.receive(reader, link.CHALLENGE, link.GREETING_BYTES_MAX)
        link.send(self._writer, link.Hello(address.invitation, link.proof(address.secret, challenge.nonce)))
        await link.receive(reader, link.WELCOME, link.GREETING_BYTES_MAX)
        return reader

    async def call(self, make: Callable[[int], link.Call]) -> PrefillDone | None:
        """The answer to `make(call_id)`. Cancelling it cancels the work.

        Raises `ReplicaGone`, `CallFailed` or `EngineDied`.
        """
        if self._writer is None or self.reason:
            raise ReplicaGone(self.replica_id, self.reason or "it is not connected")
        call_id = next(self._numbers)
        future: asyncio.Future[PrefillDone | None] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(make(call_id))
            return await future
        except asyncio.CancelledError:
            if not self.reason:
                self._send(link.Cancel(call_id))
            raise
        finally:
            self._calls.pop(call_id, None)

    def _send(self, message: link.Call | link.Cancel) -> None:
        assert self._writer is not None
        try:
            link.send(self._writer, message)
        except link.LinkError as error:
            raise CallFailed(str(error)) from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason, died = "its connection has ended", False
        try:
            while True:
                message = await link.receive(reader, link.TO_FRONTEND)
                if isinstance(message, link.Outputs):
                    self.outputs.put_nowait(message.frames)
                    continue
                if isinstance(message, link.EngineEnded):
                    reason, died = "its engine has ended", True
                    return
                future = self._calls.get(message.call_id)
                if future is None or future.done():
                    continue  # its caller has left
                if isinstance(message, link.Failed):
                    future.set_exception((EngineDied if message.died else CallFailed)(message.error))
                else:
                    future.set_result(message.prefilled)
        except link.LinkError as error:
            logger.error("replica %s: %s; connection closed", self.replica_id, error)
        except (OSError, EOFError):  # its process, or only this connection: `_watch` may hear which
            await asyncio.sleep(VERDICT_S)
        finally:
            self.end(reason, died)

    async def _watch(self, presence: AsyncGenerator[link.Address, None]) -> None:
        reason, died = "it has ended its stream", False
        try:
            async for _ in presence:
                pass
        except Exception as error:
            logger.warning("replica %s: %r", self.replica_id, error)
            reason, died = _why(error), not isinstance(error, ActorUnavailableError)
        finally:
            self.end(reason, died)
            await presence.aclose()

    def end(self, reason: str, died: bool = False) -> None:
        """Idempotent. Calls under way raise `ReplicaGone`, and the replica aborts what this frontend has there."""
        if self.reason:
            return
        self.reason, self.died = reason, died
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ReplicaGone(self.replica_id, reason, died))
                future.exception()  # nothing may be waiting for it
        self.outputs.put_nowait(None)
        if self._writer is not None:
            self._writer.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._on_end(self)
