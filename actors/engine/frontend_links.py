"""A replica's end of the sockets to its frontends: takes their calls, and sends what the engine puts out for them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
from typing import Any

from actors import link
from actors.engine.in_flight import EngineDied
from actors.messages import PrefillDone

logger = logging.getLogger("pageferry.replica")

GREETING_S = 10.0


class FrontendLinks:
    """`replica`: an engine server. `host`: the address where frontends reach this node. `sends_outputs`: it decodes."""

    def __init__(self, replica: Any, host: str, sends_outputs: bool) -> None:
        self._replica = replica
        self._host = host
        self._sends_outputs = sends_outputs
        self._numbers = itertools.count(1)
        self._invited: dict[int, tuple[str, bytes]] = {}  # invitation -> frontend and secret; good for one connection
        self._links: dict[int, asyncio.Task[None]] = {}  # by invitation
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def invite(self, frontend_id: str) -> link.Address:
        """An address and a secret for one connection of this frontend."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, self._host, 0)
        number, secret = next(self._numbers), os.urandom(link.SECRET_BYTES)
        self._invited[number] = (frontend_id, secret)
        return link.Address(self._host, self._server.sockets[0].getsockname()[1], number, secret)

    def end(self, invitation: int) -> None:
        """Its connection is closed: calls under way are cancelled, and what it has in the engine is aborted."""
        self._invited.pop(invitation, None)
        if (task := self._links.pop(invitation, None)) is not None:
            task.cancel()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for invitation in list(self._links):
            self.end(invitation)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                invitation, frontend_id = await self._greet(reader, writer)
        except (link.LinkError, OSError, EOFError, TimeoutError) as error:
            logger.warning("a connection to this replica was refused: %s: %s", type(error).__name__, error)
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(frontend_id, reader, writer))
        self._links[invitation] = task
        task.add_done_callback(lambda _: self._links.pop(invitation, None))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
        nonce = os.urandom(link.NONCE_BYTES)
        link.send(writer, link.Challenge(nonce))
        hello = await link.receive(reader, link.HELLO, link.GREETING_BYTES_MAX)
        frontend_id, secret = self._invited.get(hello.invitation, ("", b""))
        if not frontend_id or not hmac.compare_digest(hello.proof, link.proof(secret, nonce)):
            raise link.LinkError("who connected was not invited")
        del self._invited[hello.invitation]
        return hello.invitation, frontend_id

    async def _serve(self, frontend_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefills: dict[int, asyncio.Task[None]] = {}
        tasks = {asyncio.ensure_future(self._take_calls(frontend_id, reader, writer, prefills))}
        if self._sends_outputs:
            tasks.add(asyncio.ensure_future(self._send_outputs(frontend_id, writer)))
        else:
            link.send(writer, link.Welcome())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()
            tasks |= set(prefills.values())  # the rest is short, and is let through: what it brings has been aborted
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError | EOFError):
                    logger.warning("the link of frontend %s has ended: %s", frontend_id, result)

    async def _send_outputs(self, frontend_id: str, writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(self._replica.outputs(frontend_id)) as outputs:
            async for frames in outputs:
                link.send(writer, link.Outputs(frames) if frames else link.Welcome())
        link.send(writer, link.EngineEnded())

    async def _take_calls(
        self,
        frontend_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        prefills: dict[int, asyncio.Task[None]],
    ) -> None:
        while True:
            message = await link.receive(reader, link.TO_REPLICA)
            if isinstance(message, link.Cancel):
                if (prefill := prefills.get(message.call_id)) is not None:
                    prefill.cancel()
                continue
            task = asyncio.ensure_future(self._answer(frontend_id, message, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if isinstance(message, link.Prefill):
                prefills[message.call_id] = task
                task.add_done_callback(lambda _, call_id=message.call_id: prefills.pop(call_id, None))

    async def _answer(self, frontend_id: str, call: link.Call, writer: asyncio.StreamWriter) -> None:
        try:
            answer: link.ToFrontend = link.Answered(call.call_id, await self._perform(frontend_id, call))
        except asyncio.CancelledError:  # by its frontend, which waits no more, or by the controller
            answer = link.Failed(call.call_id, "Cancelled: the replica dropped it")
        except Exception as error:
            logger.warning("frontend %s, %s: %r", frontend_id, type(call).__name__, error)
            answer = link.Failed(call.call_id, f"{type(error).__name__}: {error}", isinstance(error, EngineDied))
        try:
            link.send(writer, answer)
        except link.LinkError as error:
            logger.error("frontend %s: %s; connection closed", frontend_id, error)
            writer.close()

    async def _perform(self, frontend_id: str, call: link.Call) -> PrefillDone | None:
        match call:
            case link.Prefill():
                done: PrefillDone = await self._replica.prefill(call.ticket, call.frames)
                return done
            case link.Submit():
                await self._replica.submit(frontend_id, call.frames, call.ticket, call.hand_over)
            case link.Abort():
                await self._replica.abort(frontend_id, call.request_ids)
        return None
