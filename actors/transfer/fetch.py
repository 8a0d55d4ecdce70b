"""Carries out a `ChunkFetch` in a thread: another node's bytes come into staging by the first way that works.

Streams of both ways say what comes in the same words; `actors.transfer.ways` opens them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.messages import Lease
from actors.transfer import chunks
from actors.transfer.direct import SLICE_BYTES
from actors.transfer.events import Measured

Bytes = npt.NDArray[np.uint8]
Read = Callable[[Lease, int, int], "concurrent.futures.Future[tuple[Bytes, int] | None]"]

POLL_S = 0.1  # a fetch that is stopped ends within this


class Stream(Protocol):
    """What was asked comes in the order asked. Anything raised by it means that it is broken."""

    @property
    def is_idle(self) -> bool: ...
    def ask(self, lease: Lease, ask: chunks.Ask, into: memoryview) -> None: ...
    def poll(self, timeout_s: float) -> chunks.Event: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """`keep`: takes a stream back that has nothing under way."""

    name: str
    open: Callable[[], Stream]
    keep: Callable[[Stream], None]


class ObjectStream:
    """Chunks as objects of Ray. `read` asks the other node's transfer actor for (bytes, checksum)."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._waiting: deque[tuple[chunks.Ask, memoryview, concurrent.futures.Future[tuple[Bytes, int] | None]]] = (
            deque()
        )

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def ask(self, lease: Lease, ask: chunks.Ask, into: memoryview) -> None:
        self._waiting.append((ask, into, self._read(lease, ask.first, ask.num_bytes)))

    def poll(self, timeout_s: float) -> chunks.Event:
        if not self._waiting:
            return chunks.Tick()
        ask, into, future = self._waiting[0]
        if not concurrent.futures.wait([future], timeout_s).done:
            return chunks.Tick()
        self._waiting.popleft()
        found = future.result()
        if found is None:
            return chunks.Gone(ask.stream)
        piece, checksum = found
        if piece.nbytes != ask.num_bytes:
            return chunks.Came(ask.stream, ask.index, False)
        source, seen = piece.data, 0
        for first in range(0, ask.num_bytes, SLICE_BYTES):
            into[first : first + SLICE_BYTES] = source[first : first + SLICE_BYTES]
            seen = zlib.crc32(into[first : first + SLICE_BYTES], seen)
        return chunks.Came(ask.stream, ask.index, seen == checksum)

    def close(self) -> None:
        for *_, future in self._waiting:
            future.cancel()


def fetch(
    source: Lease, target: memoryview, ways: Sequence[Way], stopped: Callable[[], bool], plan: chunks.ChunkFetch
) -> Measured:
    """When this returns, nothing writes to `target` any more."""
    began_ns, stream, way = time.monotonic_ns(), None, ways[0]
    effects = plan.begin(began_ns)
    try:
        while True:
            events: list[chunks.Event] = []
            for effect in effects:
                match effect:
                    case chunks.Open(number, index):
                        _close(stream)
                        stream, way = None, ways[index]
                        try:
                            stream = way.open()
                            events.append(chunks.Opened(number))
                        except Exception as error:  # Ray's many ways to say that an actor is away, and the network's
                            events.append(chunks.Broke(number, f"{way.name}: {error or type(error).__name__}"))
                    case chunks.Ask(number, _, first, num_bytes) if stream is not None and not events:
                        try:
                            stream.ask(source, effect, target[first : first + num_bytes])
                        except Exception as error:
                            events.append(chunks.Broke(number, f"{way.name}: {error or type(error).__name__}"))
                    case chunks.Ended(complete, reason):
                        if stream is not None and complete and stream.is_idle:
                            way.keep(stream)
                            stream = None
                        num_bytes = sum(plan.size(index) for index in plan.there)
                        busy_ns = time.monotonic_ns() - began_ns
                        return Measured(
                            source.node_id, way.name, complete, num_bytes, busy_ns, plan.asked_again, reason
                        )
            if not events:
                events.append(_next(stream, plan.stream, way.name))
            if stopped():
                events = [chunks.Stopped()]
            effects = [effect for event in events for effect in plan.step(event, time.monotonic_ns())]
    finally:
        _close(stream)


def _next(stream: Stream | None, number: int, name: str) -> chunks.Event:
    if stream is None:
        return chunks.Broke(number, f"{name} is not open")
    try:
        return stream.poll(POLL_S)
    except Exception as error:
        return chunks.Broke(number, f"{name}: {error or type(error).__name__}")


def _close(stream: Stream | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()
