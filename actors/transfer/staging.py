"""Leased staging memory of one node. Pure: offsets and owners, no bytes, no clock.

A region is given back only when no process can touch it any more: its ticket no longer needs it (released or expired)
AND no engine that may still write or read it is left. A writer or reader says when it is done; a peer whose process has
ended can touch nothing. A closed connection alone gives nothing back. So a late writer can never hit bytes that already
belong to another ticket.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

ALIGN_BYTES = 4096

Key = tuple[int, int]  # ticket_id, attempt


class StagingError(ValueError):
    """A request that this staging area can never serve, or a key used twice."""


@dataclass(slots=True)
class Region:
    key: Key
    offset: int
    num_bytes: int
    expires_ns: int
    keep_ns: int = 0  # how long it is kept after its latest sign of progress
    writers: set[str] = field(default_factory=set)  # engines that may still write here
    readers: set[str] = field(default_factory=set)  # engines that may still read here
    released: bool = False
    is_copy: bool = False  # of bytes that lie on another node

    @property
    def size(self) -> int:
        return aligned(self.num_bytes)

    @property
    def in_use(self) -> bool:
        return bool(self.writers or self.readers)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Staging:
    """First-fit allocator with leases. Law: `bytes_free + bytes_held == bytes_max`, and no two regions overlap."""

    def __init__(self, bytes_max: int) -> None:
        if bytes_max < ALIGN_BYTES:
            raise StagingError(f"transfer.staging_bytes_max is {bytes_max}; the least is {ALIGN_BYTES}")
        self.bytes_max = bytes_max // ALIGN_BYTES * ALIGN_BYTES
        self._holes: list[tuple[int, int]] = [(0, self.bytes_max)]  # (offset, size), sorted, never adjacent
        self._regions: dict[Key, Region] = {}
        self.num_freed = 0  # regions given back so far

    # -- what is

    @property
    def bytes_held(self) -> int:
        return sum(region.size for region in self._regions.values())

    @property
    def bytes_free(self) -> int:
        return sum(size for _, size in self._holes)

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def get(self, key: Key) -> Region | None:
        return self._regions.get(key)

    # -- what happens

    def grant(self, key: Key, num_bytes: int, expires_ns: int, kept: tuple[int, int] | None = None) -> Region | None:
        """A region for `key`, or None when there is no room now. Raises when there can never be any.

        `kept`: offset and size of a stretch that is kept for another lease.
        """
        if num_bytes <= 0:
            raise StagingError(f"lease of {num_bytes} bytes for ticket {key}")
        size = aligned(num_bytes)
        if size > self.bytes_max:
            raise StagingError(
                f"ticket {key[0]} needs {num_bytes} staging bytes; transfer.staging_bytes_max is {self.bytes_max}: "
                "raise it"
            )
        if key in self._regions:
            raise StagingError(f"ticket {key[0]} attempt {key[1]} already holds a lease")
        first, last = (kept[0], kept[0] + kept[1]) if kept else (self.bytes_max, self.bytes_max)
        for index, (offset, hole) in enumerate(self._holes):
            end = offset + hole
            for start, stop in ((offset, min(end, first)), (max(offset, last), end)):
                if stop - start >= size:
                    rest = [(offset, start - offset), (start + size, end - start - size)]
                    self._holes[index : index + 1] = [piece for piece in rest if piece[1]]
                    region = self._regions[key] = Region(key, start, num_bytes, expires_ns)
                    return region
        return None

    def emptiest(self, num_bytes: int) -> tuple[int, int]:
        """Offset and size of the stretch for `num_bytes` in which the fewest bytes are held now."""
        size, last = aligned(num_bytes), self.bytes_max - aligned(num_bytes)
        spans = [(region.offset, region.offset + region.size) for region in self]
        # The number held changes its slope only where the stretch begins or ends at the edge of a region.
        starts = {0, last, *(e for span in spans for edge in span for e in (edge, edge - size) if 0 <= e <= last)}

        def held(start: int) -> int:
            return sum(max(0, min(end, start + size) - max(offset, start)) for offset, end in spans)

        return min(starts, key=lambda start: (held(start), start)), size

    def open_writer(self, key: Key, engine: str) -> bool:
        region = self._regions.get(key)
        if region is None or region.released:
            return False
        region.writers.add(engine)
        return True

    def open_reader(self, key: Key, engine: str) -> bool:
        region = self._regions.get(key)
        if region is None or region.released:
            return False
        region.readers.add(engine)
        return True

    def writer_done(self, key: Key, engine: str) -> bool:
        """True when this gave the bytes back."""
        region = self._regions.get(key)
        if region is None:
            return False
        region.writers.discard(engine)
        return self._collect(region)

    def reader_done(self, key: Key, engine: str) -> bool:
        region = self._regions.get(key)
        if region is None:
            return False
        region.readers.discard(engine)
        return self._collect(region)

    def renew(self, key: Key, now_ns: int) -> None:
        """There is progress: the lease time begins anew."""
        region = self._regions.get(key)
        if region is not None:
            region.expires_ns = max(region.expires_ns, now_ns + region.keep_ns)

    def release(self, key: Key) -> bool:
        """The ticket needs the bytes no more. Idempotent."""
        region = self._regions.get(key)
        if region is None:
            return False
        region.released = True
        return self._collect(region)

    def peer_gone(self, engine: str) -> list[Key]:
        """The engine's process has ended, or said that it touches nothing any more. Returns the keys it was writing."""
        was_writing = []
        for region in list(self._regions.values()):
            if engine in region.writers:
                was_writing.append(region.key)
            region.writers.discard(engine)
            region.readers.discard(engine)
            self._collect(region)
        return was_writing

    def expire(self, now_ns: int) -> list[Key]:
        """Releases leases whose time is over and returns their keys; bytes in use stay until their user is done."""
        over = [r for r in self._regions.values() if not r.released and now_ns >= r.expires_ns]
        for region in over:
            region.released = True
            self._collect(region)
        return [region.key for region in over]

    def _collect(self, region: Region) -> bool:
        if not region.released or region.in_use:
            return False
        del self._regions[region.key]
        self.num_freed += 1
        insort(self._holes, (region.offset, region.size))
        merged: list[tuple[int, int]] = []
        for offset, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged
        return True

    # -- laws

    def breaches(self) -> list[str]:
        """Broken conservation laws in plain words; empty when all hold."""
        broken = []
        if self.bytes_free + self.bytes_held != self.bytes_max:
            broken.append(f"staging free {self.bytes_free} + held {self.bytes_held} != max {self.bytes_max}")
        spans = sorted([(o, s, "hole") for o, s in self._holes] + [(r.offset, r.size, str(r.key)) for r in self])
        for (offset, size, name), (following, _, other) in itertools.pairwise(spans):
            if offset + size > following:
                broken.append(f"staging {name} at {offset}+{size} overlaps {other} at {following}")
        return broken
