"""One fetch of a lease's bytes from another node: `step(event, now_ns) -> effects`. Pure.

The bytes come in chunks over a stream of one of several ways, in the order asked. What holds at every moment:

1. A chunk is missing, asked or there, never two of these; the fetch is complete when all are there, and only then.
2. At most `window_bytes` are asked and not there (one chunk at least).
3. A stream that breaks or brings nothing for `quiet_ns` loses only what was asked of it: that is asked again.
4. After `tries` failures without a chunk between them the next way is taken; after the last way the fetch has failed.
5. It ends once; events after its end, and of a stream that was given up, change nothing.

There is no deadline for the whole: a fetch of any size goes on while chunks come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

CHUNK_BYTES = 4 << 20
WINDOW_BYTES = 16 << 20
QUIET_NS = 4_000_000_000
TRIES = 2


@dataclass(frozen=True, slots=True)
class Opened:
    stream: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Some bytes of the chunk that is next have come."""

    stream: int


@dataclass(frozen=True, slots=True)
class Came:
    """All bytes of chunk `index`. `intact`: as their checksum says."""

    stream: int
    index: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Broke:
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The other node has given the bytes up: no way leads to them."""

    stream: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The bytes are not wanted any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Opened | Moved | Came | Broke | Gone | Stopped | Tick


@dataclass(frozen=True, slots=True)
class Open:
    """Gives up every earlier stream, and opens one of way number `way`; then `Opened` or `Broke`."""

    stream: int
    way: int


@dataclass(frozen=True, slots=True)
class Ask:
    stream: int
    index: int
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`reason`: what was wrong with the last way; "": nothing was, the bytes are not wanted or not to be had."""

    complete: bool
    reason: str = ""


Effect = Open | Ask | Ended


class ChunkFetch:
    """`num_ways`: the ways there are, the best first."""

    def __init__(
        self,
        num_bytes: int,
        num_ways: int,
        chunk_bytes: int = CHUNK_BYTES,
        window_bytes: int = WINDOW_BYTES,
        quiet_ns: int = QUIET_NS,
        tries: int = TRIES,
    ) -> None:
        self.num_bytes, self.num_ways = num_bytes, num_ways
        self.chunk_bytes, self.window_bytes = chunk_bytes, max(window_bytes, chunk_bytes)
        self.quiet_ns, self.tries = quiet_ns, tries
        self.num_chunks = -(-num_bytes // chunk_bytes)
        self.missing = deque(range(self.num_chunks))
        self.asked: deque[int] = deque()  # of the present stream, in order
        self.there: set[int] = set()
        self.way = self.stream = self.asked_again = 0
        self.ended = self.is_open = False
        self._failures = 0  # since the last chunk
        self._heard_ns = 0

    def begin(self, now_ns: int) -> list[Effect]:
        return self._open(now_ns)

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        if self.ended or getattr(event, "stream", self.stream) != self.stream:
            return []
        match event:
            case Stopped() | Gone():
                return self._end(False)
            case Tick():
                quiet = now_ns - self._heard_ns >= self.quiet_ns
                return self._failed(f"nothing came for {self.quiet_ns / 1e9:g} s", now_ns) if quiet else []
            case Broke(_, reason):
                return self._failed(reason, now_ns)
            case Opened():
                self.is_open = True
            case Came(_, index, intact):
                if index not in self.asked:
                    return self._failed(f"chunk {index} came and was not asked for", now_ns)
                if not intact:
                    return self._failed(f"chunk {index} is not what was sent", now_ns)
                self.asked.remove(index)
                self.there.add(index)
                self._failures = 0
        self._heard_ns = now_ns
        return self._ask()

    def size(self, index: int) -> int:
        return min(self.chunk_bytes, self.num_bytes - index * self.chunk_bytes)

    def _ask(self) -> list[Effect]:
        if len(self.there) == self.num_chunks:
            return self._end(True)
        effects: list[Effect] = []
        outstanding = sum(self.size(index) for index in self.asked)
        while self.is_open and self.missing and outstanding + self.size(self.missing[0]) <= self.window_bytes:
            index = self.missing.popleft()
            self.asked.append(index)
            outstanding += self.size(index)
            effects.append(Ask(self.stream, index, index * self.chunk_bytes, self.size(index)))
        return effects

    def _failed(self, reason: str, now_ns: int) -> list[Effect]:
        self.asked_again += len(self.asked)
        self.missing.extendleft(reversed(self.asked))
        self.asked.clear()
        self._failures += 1
        if self._failures >= self.tries:
            self.way, self._failures = self.way + 1, 0
        if self.way >= self.num_ways:
            return self._end(False, reason)
        return self._open(now_ns)

    def _open(self, now_ns: int) -> list[Effect]:
        self.stream += 1
        self.is_open, self._heard_ns = False, now_ns
        return [Open(self.stream, self.way)]

    def _end(self, complete: bool, reason: str = "") -> list[Effect]:
        self.ended = True
        return [Ended(complete, reason)]
