"""Collecting a ticket's seal, and what opening it found, from what the engine's workers report. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from actors.messages import Opened, Seal, Verdict
from actors.transfer.channel import PagesOpened, PagesSealed
from actors.transfer.staging import Key


@dataclass(slots=True)
class _Open:
    layout_fingerprint: str
    num_tokens: int
    num_shards: int
    digests: dict[int, list[int]] = field(default_factory=dict)  # shard -> pages so far
    complete: set[int] = field(default_factory=set)


class SealCollector:
    """Chunks in, one `Seal` out when the last chunk of the last shard is in.

    A doubled chunk is absorbed; a gap or a contradiction voids the ticket's seal for good (`void`), so that decode
    sees MISSING and not a proof that is half of one attempt and half of another.
    """

    def __init__(self) -> None:
        self._open: dict[Key, _Open] = {}
        self._void: set[Key] = set()
        self._done: set[Key] = set()
        self.duplicates = 0  # chunks of seals that were complete already
        self.late = 0  # chunks of tickets whose lease had ended

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._open)

    def add(self, message: PagesSealed) -> Seal | None:
        key = (message.ticket_id, message.attempt)
        if key in self._void:
            return None
        if key in self._done:
            self.duplicates += 1
            return None
        book = self._open.setdefault(key, _Open(message.layout_fingerprint, message.num_tokens, message.num_shards))
        if (message.layout_fingerprint, message.num_tokens, message.num_shards) != (
            book.layout_fingerprint,
            book.num_tokens,
            book.num_shards,
        ) or not 0 <= message.shard < message.num_shards:
            self.void(key)
            return None
        pages = book.digests.setdefault(message.shard, [])
        known = pages[message.first_page : message.first_page + len(message.digests)]
        if message.first_page > len(pages) or known != message.digests[: len(known)]:
            self.void(key)
            return None
        pages.extend(message.digests[len(known) :])
        if message.last:
            book.complete.add(message.shard)
        if len(book.complete) < book.num_shards:
            return None
        del self._open[key]
        self._done.add(key)
        return Seal(
            ticket_id=message.ticket_id,
            attempt=message.attempt,
            layout_fingerprint=book.layout_fingerprint,
            num_tokens=book.num_tokens,
            digests=tuple(tuple(book.digests[shard]) for shard in range(book.num_shards)),
        )

    def void(self, key: Key) -> None:
        self._open.pop(key, None)
        self._void.add(key)

    def is_void(self, key: Key) -> bool:
        return key in self._void

    def forget(self, key: Key) -> None:
        """The ticket's lease is gone: nothing of it will be asked for again."""
        self._open.pop(key, None)
        self._void.discard(key)
        self._done.discard(key)


class OpenedParts:
    """Reports of the shards in, one `Opened` out when the last shard's is in; a shard counts once."""

    def __init__(self) -> None:
        self._parts: dict[Key, dict[int, Opened]] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._parts)

    def add(self, message: PagesOpened) -> Opened | None:
        opened = message.opened
        key = (opened.ticket_id, opened.attempt)
        parts = self._parts.setdefault(key, {})
        parts[message.shard] = opened
        if len(parts) < message.num_shards:
            return None
        del self._parts[key]
        verdicts: dict[Verdict, int] = {}
        for part in parts.values():
            for verdict, count in part.verdicts.items():
                verdicts[verdict] = verdicts.get(verdict, 0) + count
        return Opened(
            ticket_id=opened.ticket_id,
            attempt=opened.attempt,
            replica_id=opened.replica_id,
            num_pages=opened.num_pages,
            num_bytes=sum(part.num_bytes for part in parts.values()),
            num_tokens=opened.num_tokens,
            verdicts=verdicts,
            seconds=max(part.seconds for part in parts.values()),
        )

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Forgets the parts of every other key."""
        for key in [key for key in self._parts if not wanted(key)]:
            del self._parts[key]
