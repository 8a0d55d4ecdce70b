"""The ways to another node's bytes: straight over TCP, and as objects of Ray. Probed, and kept open between fetches.

Used from threads that move bytes; `loop` is the event loop of the actor's calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import select
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.messages import Lease
from actors.transfer import chunks
from actors.transfer.direct import PROBE_BYTES, DirectStream
from actors.transfer.events import LinkProbed
from actors.transfer.fetch import ObjectStream, Stream, Way

ANSWER_S = 5.0  # for a transfer actor that has nothing to move
IDLE_S = 60.0  # a connection without a fetch is kept so long
IDLE_MAX = 4  # a node
PROBES = 3  # of each kind; the quickest counts: a busy machine is no slow link


class Ways:
    """`get_actor` finds the transfer actor of a node; it blocks, and raises where there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, get_actor: Callable[[str], Any]) -> None:
        self._loop = loop
        self._get_actor = get_actor
        self._idle: dict[str, list[tuple[float, DirectStream]]] = {}
        self._closed = False

    def of(self, node_id: str) -> tuple[Way, Way]:
        return (
            Way("direct", lambda: self._direct(node_id), lambda stream: self._keep(node_id, stream)),
            Way("objects", lambda: self._objects(node_id), lambda stream: stream.close()),
        )

    def forget(self, node_id: str) -> None:
        """A stream to that node has broken: the idle ones may have as well."""
        for _, stream in self._idle.pop(node_id, []):
            stream.close()

    def close(self) -> None:
        """No stream is opened from here on."""
        self._closed = True
        for node_id in list(self._idle):
            self.forget(node_id)

    def probe(self, node_id: str) -> LinkProbed | None:
        """None: that node has no transfer actor yet."""
        try:
            actor = self._peer(node_id)
        except ValueError:
            return None
        try:
            with contextlib.closing(self._connect(actor)) as stream:
                trips = [_probe(stream, 1) for _ in range(PROBES)]
                busy_ns = min(_probe(stream, PROBE_BYTES) for _ in range(PROBES))
        except Exception as error:  # whatever is wrong there, Ray's objects remain
            return LinkProbed(node_id, "objects", reason=f"direct: {error or type(error).__name__}")
        return LinkProbed(node_id, "direct", min(trips), PROBE_BYTES, busy_ns)

    def _direct(self, node_id: str) -> DirectStream:
        idle = self._idle.get(node_id, [])
        while idle:
            since, stream = idle.pop()
            # Readable without a request: it has ended.
            if time.monotonic() - since < IDLE_S and not select.select([stream.sock], [], [], 0)[0]:
                return stream
            stream.close()
        return self._connect(self._peer(node_id))

    def _peer(self, node_id: str) -> Any:
        if self._closed:
            raise ValueError("this transfer actor has ended")
        return self._get_actor(node_id)

    def _connect(self, actor: Any) -> DirectStream:
        return DirectStream(self._call(actor.invite.remote).result(ANSWER_S))

    def _keep(self, node_id: str, stream: Stream) -> None:
        idle = self._idle.setdefault(node_id, [])
        if isinstance(stream, DirectStream) and len(idle) < IDLE_MAX:
            idle.append((time.monotonic(), stream))
        else:
            stream.close()

    def _objects(self, node_id: str) -> ObjectStream:
        actor = self._peer(node_id)

        def read(source: Lease, first: int, num_bytes: int) -> concurrent.futures.Future[Any]:
            return self._call(actor.read.remote, source, first, num_bytes)

        return ObjectStream(read)

    def _call(self, remote: Callable[..., Awaitable[Any]], *args: Any) -> concurrent.futures.Future[Any]:
        async def called() -> Any:
            return await remote(*args)

        return asyncio.run_coroutine_threadsafe(called(), self._loop)


def _probe(stream: DirectStream, num_bytes: int) -> int:
    """Nanoseconds that so many bytes took. Raises `OSError` when they do not come."""
    began_ns, into = time.monotonic_ns(), memoryview(bytearray(num_bytes))
    stream.ask(None, chunks.Ask(0, 0, 0, num_bytes), into)
    while time.monotonic_ns() - began_ns < ANSWER_S * 1e9:
        event = stream.poll(0.5)
        if isinstance(event, chunks.Came):
            if not event.intact:
                raise OSError("the probe's bytes are not what was sent")
            return time.monotonic_ns() - began_ns
    raise OSError(f"{num_bytes} bytes did not come in {ANSWER_S:g} s")
