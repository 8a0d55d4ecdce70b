"""How a replica asks its node's transfer actor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

from actors import deadlines, link
from actors.engine.in_flight import ReplicaError
from actors.messages import HandOver, Lease, Verdict
from actors.transfer import host_calls
from actors.transfer.host_calls import HostCall, Reply
from actors.transfer.staging import StagingError

logger = logging.getLogger("pageferry.replica")

AGAIN_S = 0.1  # between two attempts to reach an actor that is away
Make = Callable[[int], HostCall]


class TransferClient:
    """One connection, opened when it is needed. `get_transfer` finds the actor of node `node_id`, or starts it."""

    def __init__(self, node_id: str, get_transfer: Callable[[], Any], socket_path: str) -> None:
        self._node_id = node_id
        self._get = get_transfer
        self._path = host_calls.path_of(socket_path)
        self._actor = get_transfer()
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def lease(
        self,
        ticket_id: int,
        attempt: int,
        num_bytes: int,
        engines: list[str],
        wait_s: float,
        keep_s: float,
        trace: str = "",
    ) -> Lease | None:
        """None: no room within `wait_s`. Raises `StagingError` when there can never be, and `ReplicaError`."""
        reply = await self._ask(
            lambda call_id: host_calls.AskLease(call_id, ticket_id, attempt, num_bytes, engines, wait_s, keep_s, trace),
            wait_s + 1.0,
        )
        return reply.lease

    async def begin_read(
        self, hand_over: HandOver, engines: list[str], wait_s: float, trace: str = ""
    ) -> Lease | Verdict:
        """Raises `ReplicaError`."""
        reply = await self._ask(
            lambda call_id: host_calls.AskRead(call_id, hand_over, engines, wait_s, trace), wait_s + 1.0
        )
        answer = reply.verdict or reply.lease
        assert answer is not None
        return answer

    async def drop_writer(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        await self._tell(lambda call_id: host_calls.DropWriter(call_id, ticket_id, attempt, engines))

    async def drop_reader(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        await self._tell(lambda call_id: host_calls.DropReader(call_id, ticket_id, attempt, engines))

    async def release(self, ticket_id: int, attempt: int) -> None:
        await self._tell(lambda call_id: host_calls.Release(call_id, ticket_id, attempt))

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _tell(self, make: Make) -> None:
        """What it does not hear, the end of the lease tells it."""
        try:
            await self._ask(make, deadlines.ANSWER_S)
        except ReplicaError as error:
            logger.warning("%s", error)

    async def _ask(self, make: Make, timeout_s: float) -> Reply:
        """Repeated while the actor is started again. Raises `ReplicaError` when it is away or silent for too long."""
        away: Exception | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        reply = await self._call(make)
                        break
                    except (OSError, EOFError) as error:
                        away = error
                    with contextlib.suppress(Exception):  # Ray's many ways to say that an actor is away
                        self._actor = await asyncio.to_thread(self._get)
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            how = f"away: {away}" if away is not None else f"silent for {timeout_s:g} s"
            raise ReplicaError(f"the transfer actor of node {self._node_id} is {how}") from None
        except link.LinkError as error:
            raise ReplicaError(f"the transfer actor of node {self._node_id}: {error}") from None
        if reply.refused:
            raise StagingError(reply.refused)
        return reply

    async def _call(self, make: Make) -> Reply:
        writer = await self._connected()
        call_id = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            link.send(writer, make(call_id))
            return await future
        finally:
            del self._calls[call_id]

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._opening:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._reading = asyncio.get_running_loop().create_task(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        error: Exception = EOFError("its connection has ended")
        try:
            while True:
                reply = await link.receive(reader, host_calls.REPLY)
                future = self._calls.get(reply.call_id)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (OSError, EOFError, link.LinkError) as found:
            error = found
        finally:
            self._writer = None
            writer.close()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(error)
