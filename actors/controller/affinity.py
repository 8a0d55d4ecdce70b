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
from actors.messages import ReplicaId

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

    A guess: the engine's own prefix cache decides what is a hit. A replica's entry is forgotten once as many pages as
    its cache holds were allocated there since the entry was used last (the cache drops the least recently used page),
    when the replica is dropped, and when its engine reports fewer cached tokens (`evicted`). What has not been used
    for a while is forgotten half the index at a time.
    """

    def __init__(self, entries_max: int = 100_000, holders_max: int = 2) -> None:
        self._half = max(1, entries_max // 2)
        self._holders_max = holders_max
        # By hash: holders, latest first, each with the pages allocated there when it was used last.
        self._young: TrackedDict[int, tuple[tuple[ReplicaId, int], ...]] = TrackedDict()
        self._old: TrackedDict[int, tuple[tuple[ReplicaId, int], ...]] = TrackedDict()
        self._capacity: TrackedDict[ReplicaId, int] = TrackedDict()  # pages
        self._allocated: TrackedDict[ReplicaId, int] = TrackedDict()  # pages, ever
        self._evicted: TrackedDict[ReplicaId, int] = TrackedDict()  # what was used up to there is gone

    def __len__(self) -> int:
        return len(self._young) + sum(key not in self._young for key in self._old)

    def put(self, replica_id: ReplicaId, capacity: int) -> None:
        """The replica's cache holds `capacity` pages."""
        if self._capacity.get(replica_id) != capacity:
            self._capacity[replica_id] = capacity
            self._allocated.setdefault(replica_id, 0)

    def drop(self, replica_id: ReplicaId) -> None:
        """The replica is gone, and its cache with it."""
        if self._capacity.pop(replica_id, None) is not None:
            self.evicted(replica_id, self._allocated[replica_id])

    def allocated(self, replica_id: ReplicaId, num_pages: int) -> None:
        self._allocated[replica_id] = self._allocated.get(replica_id, 0) + num_pages

    def note(self, hashes: tuple[int, ...], replica_id: ReplicaId) -> None:
        """`replica_id` is about to have this prompt in its cache."""
        young, old = self._young, self._old
        newest = (replica_id, self._allocated.get(replica_id, 0) + 1)
        for mark in landmarks(len(hashes)):
            key = hashes[mark - 1]
            holders = young.get(key) or old.get(key) or ()
            others = tuple(holder for holder in holders if holder[0] != replica_id)
            young[key] = (newest, *others[: self._holders_max - 1])
        if len(young) > self._half:
            self._young, self._old = TrackedDict(), young

    def used(self, page_hash: int, replica_id: ReplicaId) -> int:
        """Pages allocated on the replica when it used this prefix last; 0 when it does not have it."""
        return next((then for name, then in self._holders(page_hash) if name == replica_id), 0)

    def evicted(self, replica_id: ReplicaId, used: int) -> None:
        """The engine had not cached a prefix that it had `used` last then; so what it used before is gone as well."""
        self._evicted[replica_id] = max(used, self._evicted.get(replica_id, 0))

    def longest(self, hashes: tuple[int, ...]) -> tuple[int, tuple[ReplicaId, ...]]:
        """Pages of the longest known prefix, and who holds it (latest first); (0, ()) when no replica does."""
        marks = landmarks(len(hashes))
        low, high = 0, len(marks)  # a known prefix has all its shorter ones known: binary search
        holding: tuple[ReplicaId, ...] = ()
        while low < high:
            middle = (low + high) // 2
            holders = self._holders(hashes[marks[middle] - 1])
            if holders:
                low, holding = middle + 1, tuple(name for name, _ in holders)
            else:
                high = middle
        return (marks[low - 1], holding) if low else (0, ())

    def _holders(self, key: int) -> tuple[tuple[ReplicaId, int], ...]:
        """Those whose cache still has the page, latest first."""
        known = self._young.get(key) or self._old.get(key) or ()
        return tuple(holder for holder in known if self._has(*holder))

    def _has(self, replica_id: ReplicaId, used: int) -> bool:
        since = self._allocated.get(replica_id, 0) - used
        return since < self._capacity.get(replica_id, 0) and used > self._evicted.get(replica_id, 0)


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
