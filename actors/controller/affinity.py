"""Where a request has been before: a hash ring for sessions, an index of prompt prefixes, an index of load. Pure.

All three answer in time that does not grow with the number of replicas, and come out the same in every process and
after every restart (no `hash()`, no randomness).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

from actors.controller.journal import Tracked, TrackedDict, TrackedList, TrackedSet
from actors.nouns import ReplicaId

RING_POINTS = 64  # a replica; more points, more even shares
LEVELS = 512


def point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class HashRing(Tracked):
    """Consistent hashing: when a replica comes or goes, only the sessions on its own arcs move."""

    def __init__(self) -> None:
        self._points: TrackedList[tuple[int, ReplicaId]] = TrackedList()
        self._members: TrackedSet[ReplicaId] = TrackedSet()

    def add(self, replica_id: ReplicaId) -> None:
        if replica_id not in self._members:
            self._members.add(replica_id)
            for index in range(RING_POINTS):
                insort(self._points, (point(f"{replica_id}/{index}"), replica_id))

    def drop(self, replica_id: ReplicaId) -> None:
        if replica_id in self._members:
            self._members.discard(replica_id)
            for index in range(RING_POINTS):
                at = bisect_left(self._points, (point(f"{replica_id}/{index}"), replica_id))
                del self._points[at]

    def __len__(self) -> int:
        return len(self._members)

    def owners(self, key: str, most: int = 2) -> Iterator[ReplicaId]:
        """The replica for `key`, then the ones that would take over, at most `most`."""
        start = bisect_right(self._points, (point(key), ""))
        seen: list[ReplicaId] = []
        for step in range(len(self._points)):
            replica_id = self._points[(start + step) % len(self._points)][1]
            if replica_id not in seen:
                seen.append(replica_id)
                yield replica_id
                if len(seen) >= most:
                    return


@lru_cache(maxsize=4096)
def landmarks(num_pages: int) -> tuple[int, ...]:
    """The page numbers (1-based, ascending) whose prefix hashes are indexed: 1, 2, 4, 8, then every 16th.

    Chained hashes make every landmark stand for its whole prefix, so few are enough; the last page always is one.
    """
    marks = [mark for mark in (1, 2, 4, 8) if mark <= num_pages]
    marks += range(16, num_pages + 1, 16)
    if num_pages and (not marks or marks[-1] != num_pages):
        marks.append(num_pages)
    return tuple(marks)


class PrefixIndex(Tracked):
    """Which replicas have probably cached which prompt prefixes.

    A guess, never a promise: the engine's own prefix cache decides what is a hit, and a holder named here may be gone.
    What has not been used for a while is forgotten half the index at a time, which costs nothing in between.
    """

    def __init__(self, entries_max: int = 100_000, holders_max: int = 2) -> None:
        self._half = max(1, entries_max // 2)
        self._holders_max = holders_max
        self._young: TrackedDict[int, tuple[ReplicaId, ...]] = TrackedDict()
        self._old: TrackedDict[int, tuple[ReplicaId, ...]] = TrackedDict()

    def __len__(self) -> int:
        return len(self._young) + sum(key not in self._young for key in self._old)

    def note(self, hashes: tuple[int, ...], replica_id: ReplicaId) -> None:
        """`replica_id` is about to have this prompt in its cache."""
        young, old = self._young, self._old
        for mark in landmarks(len(hashes)):
            key = hashes[mark - 1]
            holders = young.get(key) or old.get(key)
            if holders is None:
                young[key] = (replica_id,)
            elif holders[0] == replica_id:
                young[key] = holders
            else:
                others = [holder for holder in holders if holder != replica_id]
                young[key] = (replica_id, *others[: self._holders_max - 1])  # latest first
        if len(young) > self._half:
            self._young, self._old = TrackedDict(), young

    def longest(self, hashes: tuple[int, ...]) -> tuple[int, tuple[ReplicaId, ...]]:
        """Pages of the longest known prefix, and who holds it (latest first); (0, ()) when nobody does."""
        young, old = self._young, self._old
        marks = landmarks(len(hashes))
        low, high = 0, len(marks)  # a known prefix has all its shorter ones known: binary search
        found: tuple[ReplicaId, ...] = ()
        while low < high:
            middle = (low + high) // 2
            key = hashes[marks[middle] - 1]
            holders = young.get(key) or old.get(key)
            if holders:
                low, found = middle + 1, holders
            else:
                high = middle
        return (marks[low - 1], found) if low else (0, ())


class LoadIndex(Tracked):
    """Replicas by load in `LEVELS` steps. Moving one and finding the least loaded are constant-time."""

    def __init__(self) -> None:
        self._level: TrackedDict[ReplicaId, int] = TrackedDict()
        self._buckets: list[TrackedDict[ReplicaId, None]] = [TrackedDict() for _ in range(LEVELS)]
        self._filled = 0  # bit `l` set: bucket `l` is not empty

    def __len__(self) -> int:
        return len(self._level)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._level

    def put(self, replica_id: ReplicaId, load: float) -> None:
        """`load` from 0 (idle) to 1 (full); above counts as full."""
        level = min(max(int(load * (LEVELS - 1)), 0), LEVELS - 1)
        old = self._level.get(replica_id)
        if old == level:  # to the end of its step, so that equals take turns
            del self._buckets[level][replica_id]
            self._buckets[level][replica_id] = None
            return
        if old is not None:
            self._take(replica_id, old)
        self._level[replica_id] = level
        self._buckets[level][replica_id] = None
        self._filled |= 1 << level

    def drop(self, replica_id: ReplicaId) -> None:
        if (old := self._level.pop(replica_id, None)) is not None:
            self._take(replica_id, old)

    def _take(self, replica_id: ReplicaId, level: int) -> None:
        bucket = self._buckets[level]
        del bucket[replica_id]
        if not bucket:
            self._filled &= ~(1 << level)

    def least(self) -> Iterator[ReplicaId]:
        """From the least loaded up. The index must not change while this is read."""
        filled = self._filled
        while filled:
            lowest = filled & -filled
            yield from self._buckets[lowest.bit_length() - 1]
            filled ^= lowest
