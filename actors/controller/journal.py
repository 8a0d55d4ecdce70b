"""Undo for the machine's state: what a `savepoint` block changed is undone when the block raises. Pure.

The machine's state is made of the containers below and of objects that derive from `Tracked`. While a savepoint is
open, each change is recorded with what undoes it; outside of one, nothing is recorded. Undoing restores every value;
only the order of a dict's keys may differ. A step runs on one thread, so one log is enough for a process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, SupportsIndex, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_log: list[tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
_ABSENT: Any = object()
_SPARE = 64  # entries that a `RecentDict` holds above its size before the oldest are dropped together


@contextmanager
def savepoint() -> Iterator[None]:
    """May be nested; the exception goes on to the caller."""
    global _log
    outermost = _log is None
    log = _log = [] if _log is None else _log
    mark = len(log)
    try:
        yield
    except BaseException:
        while len(log) > mark:
            undo, args = log.pop()
            undo(*args)
        raise
    finally:
        if outermost:
            _log = None


class Tracked:
    """Attributes that are set inside a savepoint get their old values back when it raises."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if _log is not None and (old := getattr(self, name, _ABSENT)) is not _ABSENT:
            _log.append((object.__setattr__, (self, name, old)))
        object.__setattr__(self, name, value)


def _unsupported(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(f"{type(self).__name__} cannot undo this operation")


class TrackedDict(dict[K, V], Generic[K, V]):
    __slots__ = ()

    def __setitem__(self, key: K, value: V) -> None:
        if _log is not None:
            if (old := dict.get(self, key, _ABSENT)) is _ABSENT:
                _log.append((dict.pop, (self, key, None)))
            else:
                _log.append((dict.__setitem__, (self, key, old)))
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: K) -> None:
        if _log is not None:
            _log.append((dict.__setitem__, (self, key, self[key])))
        dict.__delitem__(self, key)

    def pop(self, key: K, default: Any = _ABSENT) -> Any:
        if key in self:
            value = self[key]
            del self[key]
            return value
        if default is _ABSENT:
            raise KeyError(key)
        return default

    def setdefault(self, key: K, default: V) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, other: dict[K, V]) -> None:  # type: ignore[override]
        for key, value in other.items():
            self[key] = value

    def clear(self) -> None:
        if _log is not None:
            _log.append((dict.update, (self, dict(self))))
        dict.clear(self)

    popitem = __ior__ = _unsupported


class RecentDict(TrackedDict[K, V]):
    """Keeps at least the `size` entries that were put in last."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self.size + _SPARE:  # many at once: the first key of a dict is slow to find
            for old in list(islice(self, _SPARE)):
                del self[old]


class TrackedSet(set[T], Generic[T]):
    __slots__ = ()

    def add(self, item: T) -> None:
        if item not in self:
            if _log is not None:
                _log.append((set.discard, (self, item)))
            set.add(self, item)

    def discard(self, item: object) -> None:
        if item in self:
            if _log is not None:
                _log.append((set.add, (self, item)))
            set.discard(self, item)

    remove = pop = clear = update = difference_update = intersection_update = _unsupported
    symmetric_difference_update = __ior__ = __iand__ = __isub__ = __ixor__ = _unsupported


class TrackedList(list[T], Generic[T]):
    __slots__ = ()

    def insert(self, index: SupportsIndex, item: T) -> None:
        """`index` from 0 to `len(self)`. `bisect.insort` comes here too."""
        list.insert(self, index, item)
        if _log is not None:
            _log.append((list.__delitem__, (self, index)))

    def append(self, item: T) -> None:
        self.insert(len(self), item)

    def __delitem__(self, index: Any) -> None:
        if _log is not None:
            _log.append((list.insert, (self, index, self[index])))
        list.__delitem__(self, index)

    def pop(self, index: SupportsIndex = -1) -> T:
        at = range(len(self))[index]
        item = self[at]
        del self[at]
        return item

    def remove(self, item: T) -> None:
        del self[self.index(item)]

    __setitem__ = clear = extend = sort = reverse = __iadd__ = __imul__ = _unsupported


class TrackedDeque(deque[T], Generic[T]):
    def append(self, item: T) -> None:
        dropped = list(islice(self, 1)) if len(self) == self.maxlen else []
        deque.append(self, item)
        if _log is not None:
            _log.append((_restore_append, (self, dropped)))

    def popleft(self) -> T:
        item = deque.popleft(self)
        if _log is not None:
            _log.append((deque.appendleft, (self, item)))
        return item

    def clear(self) -> None:
        if _log is not None:
            _log.append((deque.extend, (self, list(self))))
        deque.clear(self)

    pop = appendleft = remove = insert = extend = extendleft = rotate = _unsupported
    __setitem__ = __delitem__ = __iadd__ = _unsupported


def _restore_append(items: deque[Any], dropped: Iterable[Any]) -> None:
    deque.pop(items)
    for item in dropped:
        deque.appendleft(items, item)
