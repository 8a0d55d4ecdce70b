"""How the replicas of a node call its transfer actor: typed, bounded messages over a local socket, and their answers.

Not as calls of a Ray actor, which take milliseconds: a lease is waited for before a prompt is computed, and the right
to read before its pages are opened. Only processes of the same user are heard. Every call may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from actors import link
from actors.messages import HandOver, Lease, Verdict
from actors.transfer.staging import StagingError

logger = logging.getLogger("pageferry.transfer")

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class AskLease(msgspec.Struct, frozen=True, tag=True):
    """See `KVTransfer.lease`, as the next ones for its other methods."""

    call_id: int
    ticket_id: int
    attempt: int
    num_bytes: int
    engines: list[str]
    wait_s: float
    keep_s: float
    trace: str = ""


class AskRead(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    hand_over: HandOver
    engines: list[str]
    wait_s: float
    trace: str = ""


class DropWriter(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    ticket_id: int
    attempt: int
    engines: list[str]


class DropReader(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    ticket_id: int
    attempt: int
    engines: list[str]


class Release(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    ticket_id: int
    attempt: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """`refused`: the message of a `StagingError`."""

    call_id: int
    lease: Lease | None = None
    verdict: Verdict | None = None
    refused: str = ""


HostCall = AskLease | AskRead | DropWriter | DropReader | Release

TO_TRANSFER: msgspec.msgpack.Decoder[HostCall] = msgspec.msgpack.Decoder(HostCall)
REPLY = msgspec.msgpack.Decoder(Reply)


def path_of(socket_path: str) -> str:
    """Of the socket for calls, beside the one where engines get the memory."""
    return socket_path.removesuffix(".sock") + "-c.sock"


class HostCalls:
    """The transfer actor's end. `transfer`: the `KVTransfer` that does what is asked."""

    def __init__(self, transfer: Any, socket_path: str) -> None:
        self._transfer = transfer
        self.path = path_of(socket_path)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self.path)
        os.chmod(self.path, 0o600)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            Path(self.path).unlink(missing_ok=True)
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            peer: socket.socket = writer.get_extra_info("socket")
            _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid != os.getuid():
                raise link.LinkError(f"a process of user {uid} is not heard")
            while True:
                call = await link.receive(reader, TO_TRANSFER)
                task = asyncio.ensure_future(self._answer(call, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (OSError, EOFError):
            pass  # the replica has ended; its engines' links say what becomes of their bytes
        except link.LinkError as error:
            logger.error("a replica's call: %s; connection closed", error)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, call: HostCall, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._perform(call)
        except StagingError as error:
            reply = Reply(call.call_id, refused=str(error))
        except Exception:
            logger.exception("%s", call)
            writer.close()
            return
        try:
            link.send(writer, reply)
        except link.LinkError as error:
            logger.error("a replica's answer: %s; connection closed", error)
            writer.close()

    async def _perform(self, call: HostCall) -> Reply:
        transfer = self._transfer
        match call:
            case AskLease():
                key = (call.ticket_id, call.attempt)
                lease = await transfer.lease(*key, call.num_bytes, call.engines, call.wait_s, call.keep_s, call.trace)
                return Reply(call.call_id, lease=lease)
            case AskRead():
                answer = await transfer.begin_read(call.hand_over, call.engines, call.wait_s, call.trace)
                if isinstance(answer, Verdict):
                    return Reply(call.call_id, verdict=answer)
                return Reply(call.call_id, lease=answer)
            case DropWriter():
                await transfer.drop_writer(call.ticket_id, call.attempt, call.engines)
            case DropReader():
                await transfer.drop_reader(call.ticket_id, call.attempt, call.engines)
            case Release():
                await transfer.release([(call.ticket_id, call.attempt)])
        return Reply(call.call_id)
