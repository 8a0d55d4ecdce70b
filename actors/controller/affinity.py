"""Where a request has been before: a hash ring for sessions, an index of prompt prefixes, an index of load. Pure.

All three answer in time that does not grow with the number of replicas, and come out the same in every process and
after every restart (no `hash()`, no randomness).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from actors.nouns import ReplicaId

RING_POINTS = 64  # a replica; more points, more even shares
LEVELS = 512


def point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class HashRing:
    """Consistent hashing: when a replica comes or goes, only the sessions on its own arcs move."""

    def __init__(self) -> None:
        self._points: list[tuple[int, ReplicaId]] = []
        self._members: set[ReplicaId] = set()

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


def landmarks(num_pages: int) -> list[int]:
    """The page numbers (1-based, ascending) whose prefix hashes are indexed: 1, 2, 4, 8, then every 16th.

    Chained hashes make every landmark stand for its whole prefix, so few are enough; the last page always is one.
    """
    marks = [mark for mark in (1, 2, 4, 8) if mark <= num_pages]
    marks += range(16, num_pages + 1, 16)
    if num_pages and (not marks or marks[-1] != num_pages):
        marks.append(num_pages)
    return marks


class PrefixIndex:
    """Which replicas have probably cached which prompt prefixes; least recently used ones are forgotten.

    A guess, never a promise: the engine's own prefix cache decides what is a hit.
    """

    def __init__(self, entries_max: int = 200_000, holders_max: int = 4) -> None:
        self._entries_max = entries_max
        self._holders_max = holders_max
        self._holders: OrderedDict[int, list[ReplicaId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, hashes: tuple[int, ...], replica_id: ReplicaId) -> None:
        for mark in landmarks(len(hashes)):
            key = hashes[mark - 1]
            holders = self._holders.get(key)
            if holders is None:
                self._holders[key] = [replica_id]
                continue
            self._holders.move_to_end(key)
            if holders[0] != replica_id:
                if replica_id in holders:
                    holders.remove(replica_id)
                holders.insert(0, replica_id)  # latest first
                del holders[self._holders_max :]
        while len(self._holders) > self._entries_max:
            self._holders.popitem(last=False)

    def longest(self, hashes: tuple[int, ...]) -> tuple[int, list[ReplicaId]]:
        """Pages of the longest known prefix, and who holds it (latest first); (0, []) when nobody does."""
        marks = landmarks(len(hashes))
        low, high = 0, len(marks)  # a known prefix has all its shorter ones known: binary search
        while low < high:
            middle = (low + high) // 2
            if hashes[marks[middle] - 1] in self._holders:
                low = middle + 1
            else:
                high = middle
        return (marks[low - 1], self._holders[hashes[marks[low - 1] - 1]]) if low else (0, [])

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica and its cache are gone."""
        for key in [key for key, holders in self._holders.items() if replica_id in holders]:
            holders = self._holders[key]
            holders.remove(replica_id)
            if not holders:
                del self._holders[key]


class LoadIndex:
    """Replicas by load in `LEVELS` steps. Moving one and finding the least loaded are constant-time."""

    def __init__(self) -> None:
        self._level: dict[ReplicaId, int] = {}
        self._buckets: list[dict[ReplicaId, None]] = [{} for _ in range(LEVELS)]
        self._filled = 0  # bit `l` set: bucket `l` is not empty

    def __len__(self) -> int:
        return len(self._level)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._level

    def put(self, replica_id: ReplicaId, load: float) -> None:
        """`load` from 0 (idle) to 1 (full); above counts as full."""
        level = min(max(int(load * (LEVELS - 1)), 0), LEVELS - 1)
        old = self._level.get(replica_id)
        if old == level:
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
