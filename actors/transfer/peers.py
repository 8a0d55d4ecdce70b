"""Who may touch a node's staging memory: the engines of the node, and copies from and to other nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from actors.messages import Lease
from actors.transfer.lease_queue import Call
from actors.transfer.staging import Key

GONE_REMEMBERED = 1_000
T = TypeVar("T")


class Engines:
    """The engines of this node. A link is one connection of an engine; only the latest counts."""

    def __init__(self) -> None:
        self.links: dict[str, int] = {}  # of each engine whose process lives
        self._detached: set[str] = set()
        self._ready: set[str] = set()  # have the staging memory mapped
        self._gone: dict[str, None] = {}

    def connect(self, engine: str, link: int) -> None:
        self.links[engine] = link
        self._detached.discard(engine)
        self._ready.discard(engine)
        self._gone.pop(engine, None)

    def set_ready(self, engine: str) -> bool:
        """False: its link has ended meanwhile."""
        if engine not in self.links or engine in self._detached:
            return False
        self._ready.add(engine)
        return True

    def detach(self, engine: str, link: int) -> bool:
        """Its link has ended, its process may live. False: it has another link by now."""
        if self.links.get(engine) != link:
            return False
        self._detached.add(engine)
        self._ready.discard(engine)
        return True

    def remove(self, engine: str, link: int) -> bool:
        """Its process has ended. False: it has another link by now."""
        if self.links.get(engine) != link:
            return False
        del self.links[engine]
        self._detached.discard(engine)
        self._ready.discard(engine)
        remember(self._gone, engine, GONE_REMEMBERED)
        return True

    def ready(self, engines: tuple[str, ...]) -> bool:
        """All of them have the memory mapped and can say that they are done with bytes."""
        return self._ready.issuperset(engines)

    def any_gone(self, engines: tuple[str, ...]) -> bool:
        return any(engine in self._gone for engine in engines)

    def map_again(self) -> list[tuple[str, int]]:
        """There is other memory: (engine, link) of those that have to map it before they are ready."""
        self._ready.clear()
        return [(engine, link) for engine, link in self.links.items() if engine not in self._detached]


@dataclass(slots=True)
class Fetch:
    """Bytes that lie on another node and are wanted here. `fetch_id` 0: it waits for room."""

    source: Lease
    calls: list[Call] = field(default_factory=list)
    fetch_id: int = 0


class Fetches:
    """`wanted`: by key, while they are waited for. `running`: fetches that may write, wanted or not."""

    def __init__(self) -> None:
        self.wanted: dict[Key, Fetch] = {}
        self.running: dict[int, Key] = {}
        self._latest = 0

    def start(self, key: Key) -> Fetch:
        fetch = self.wanted[key]
        self._latest = fetch.fetch_id = self._latest + 1
        self.running[fetch.fetch_id] = key
        return fetch

    def queued(self) -> dict[str, int]:
        """Bytes that are wanted, by the node where they lie."""
        found: dict[str, int] = {}
        for fetch in self.wanted.values():
            found[fetch.source.node_id] = found.get(fetch.source.node_id, 0) + fetch.source.num_bytes
        return found


def fetch_name(fetch_id: int) -> str:
    """The fetch as a writer of its region."""
    return f"fetch:{fetch_id}"


def copy_name(call_id: int) -> str:
    """A copy for another node as a reader of the region."""
    return f"copy:{call_id}"


def remember(memory: dict[T, None], thing: T, most: int) -> None:
    memory[thing] = None
    while len(memory) > most:
        del memory[next(iter(memory))]
