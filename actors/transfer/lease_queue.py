"""Who waits for staging bytes, and in which order they get them. Pure.

First come, first served, with two additions. Who is at the front and does not fit keeps a stretch of the memory: what
frees up there is given to no other, so that a large lease gets its turn. Who does not fit into what is left waits
behind; the others pass, since they cannot delay the front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from actors.transfer.staging import Key, Region, Staging


@dataclass(frozen=True, slots=True)
class Call:
    """A replica's call that is not answered yet; `engines` are to write or to read."""

    call_id: int
    engines: tuple[str, ...]
    until_ns: int


@dataclass(slots=True)
class Waiting:
    """Bytes that are asked for and not granted yet. Without `calls`, for a fetch, whose own calls have deadlines."""

    key: Key
    num_bytes: int
    engines: tuple[str, ...] = ()  # that will write
    calls: list[Call] = field(default_factory=list)
    is_fetch: bool = False
    keep_ns: int = 0  # the lease ends when there is no progress for so long


class LeaseQueue:
    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self._front: tuple[Key, int, int] | None = None  # whose turn it is; offset and size of the stretch kept for it
        self._came_later: set[Key] = set()  # granted since the front's stretch is kept
        self._num_changes = 0
        self._served_at = (-1, -1)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def kept(self) -> tuple[Key, int, int] | None:
        """Key of the front, offset and size of what is kept for it; None while none waits for bytes to free up."""
        return self._front

    def get(self, key: Key) -> Waiting | None:
        return next((waiting for waiting in self._waiting if waiting.key == key), None)

    def join(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)
        self.changed()

    def leave(self, waiting: Waiting) -> None:
        self._waiting.remove(waiting)
        self.changed()

    def changed(self) -> None:
        """A lease may be granted now that was not before, for another reason than bytes that were given back."""
        self._num_changes += 1

    def serve(
        self, staging: Staging, now_ns: int, may_write: Callable[[tuple[str, ...]], bool]
    ) -> list[tuple[Waiting, Region]]:
        """Grants what can be granted now. A lease that may not be written yet keeps its place and delays no other."""
        state = (self._num_changes, staging.num_freed)
        if self._served_at == state:
            return []
        self._served_at = state
        granted: list[tuple[Waiting, Region]] = []
        front: tuple[Key, int, int] | None = None
        for waiting in self:
            if not may_write(waiting.engines):
                continue
            region = staging.grant(waiting.key, waiting.num_bytes, now_ns + waiting.keep_ns, front and front[1:])
            if region is not None:
                region.keep_ns = waiting.keep_ns
                self._waiting.remove(waiting)
                granted.append((waiting, region))
                if front is not None:
                    self._came_later.add(waiting.key)
            elif front is None:
                front = self._keep_for(waiting, staging)
        self._front = front
        return granted

    def _keep_for(self, waiting: Waiting, staging: Staging) -> tuple[Key, int, int]:
        if self._front is not None and self._front[0] == waiting.key:
            return self._front
        self._came_later.clear()
        return (waiting.key, *staging.emptiest(waiting.num_bytes))

    def came_later(self, regions: Iterable[Region]) -> list[Region]:
        """Those granted while the stretch of the present front was kept."""
        return [region for region in regions if region.key in self._came_later]

    def hold(self) -> None:
        """Nothing is granted and nothing kept for now."""
        self._front = None
        self._came_later.clear()
        self.changed()
