"""Which request holds which pages with which tags on one replica; with integrity off every tag is 0. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from actors.controller.journal import Tracked, TrackedDict
from actors.engine.integrity.ledger import COUNTER_BITS, tag_epoch
from actors.messages import Announcement, Occupancy, PageDelta, ReplicaId, Role, TicketId

KEPT_NS = 15_000_000_000  # an engine gives pages back within a step, and its next reports say so


class TagMismatch(msgspec.Struct, frozen=True):
    """A request that its replica ended because its block table named a page that is not its own."""

    when_ns: int
    replica: ReplicaId
    role: Role
    request_id: str
    ticket_id: TicketId
    detail: str
    known: tuple[int, int] | None  # (page, tag) that the book has at that position, by a path of its own

    def __str__(self) -> str:
        book = "the book knows no page there"
        if self.known is not None:
            book = f"the book says page {self.known[0]}, tag {self.known[1]:#x}"
        return f"tag mismatch on {self.role} {self.replica}: request {self.request_id}: {self.detail}; {book}"


class Page(NamedTuple):
    """A page that requests own. Sharing is by prefix: all its owners have it at one position, for the same tokens."""

    tag: int
    owners: int
    position: int  # at which its first owner has it
    content: int  # hash of that owner's prompt up to the page's end, from its frontend; 0: not known


def _unknown(ticket_id: TicketId, position: int) -> int:
    return 0


class PageBook(Tracked):
    """Pages of one replica by owner, from batched deltas: page id -> tag and number of owners."""

    __slots__ = ("ended", "epoch", "owners", "pages", "suspicions", "tickets", "wrongly_shared")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # in the tags of the replica's present life; 0: there are no tags to check
        self.tickets: TrackedDict[str, TicketId] = TrackedDict()  # of owners, where the report named one
        self.ended: TrackedDict[str, int] = TrackedDict()  # owners whose ticket is over: since when
        self.owners: TrackedDict[str, TrackedDict[int, int]] = TrackedDict()
        self.pages: TrackedDict[int, Page] = TrackedDict()
        self.wrongly_shared: TrackedDict[str, str] = TrackedDict()  # owner -> what is wrong with one of its pages
        self.suspicions = 0  # ever: a page taken under a new tag while another request still owned it under the old one

    @classmethod
    def of(cls, replica: Announcement, tagged: bool) -> PageBook:
        return cls(tag_epoch(replica.replica_id, replica.incarnation) if tagged else 0)

    def apply(
        self, delta: PageDelta, blocks_total: int, content_of: Callable[[TicketId, int], int] = _unknown
    ) -> list[str]:
        """Returns what is wrong with the report, in plain words; it is taken in all the same.

        `content_of(ticket, position)`: hash of the ticket's prompt up to the end of that page; 0 where it is not known.
        """
        if delta.released:
            self._release(delta.request_id)
        if not delta.added:
            return []
        violations: list[str] = []
        if delta.ticket_id:
            self.tickets[delta.request_id] = delta.ticket_id
        owned = self.owners.setdefault(delta.request_id, TrackedDict())
        for page, tag in delta.added.items():
            had = owned.get(page)
            if had == tag:
                continue  # a doubled delta
            position = len(owned)
            if had is not None:
                self._drop(page, had)
                position = next(at for at, mine in enumerate(owned) if mine == page)
            known = self.pages.get(page)
            if known is not None and known.tag != tag:
                self.suspicions += 1
                violations.append(f"page {page} was taken with tag {tag:#x} while another request owned {known.tag:#x}")
                known = None
            if not 0 <= page <= blocks_total:
                violations.append(f"page {page} is outside 0 .. {blocks_total}")
            if self.epoch and (tag >> COUNTER_BITS) - self.epoch not in (0, 1):  # 1: its counter has run over
                violations.append(f"page {page} has tag {tag:#x}, of another life of the replica")
            owned[page] = tag
            content = content_of(delta.ticket_id, position)
            if known is None:
                self.pages[page] = Page(tag, 1, position, content)
                continue
            self.pages[page] = known._replace(owners=known.owners + 1)
            if wrong := self._sharing(page, known, position, content):
                self.wrongly_shared[delta.request_id] = text = f"request {delta.request_id}: {wrong}"
                violations.append(text)
        return violations

    @staticmethod
    def _sharing(page: int, known: Page, position: int, content: int) -> str:
        """Why this page cannot be shared; "" when it can. The engine's ledger sees a second reference, and no more."""
        if position != known.position:
            return f"page {page} is at its position {position}, and at {known.position} of another that owns it"
        if content and known.content and content != known.content:
            return f"page {page} holds another prompt's tokens at position {position}"
        return ""

    def look(self, is_live: Callable[[TicketId], bool], now_ns: int) -> list[str]:
        """Owners whose ticket has been over for too long; called at each report."""
        for request_id, ticket_id in self.tickets.items():
            if is_live(ticket_id):
                self.ended.pop(request_id, None)
            else:
                self.ended.setdefault(request_id, now_ns)
        late = [request_id for request_id, since_ns in self.ended.items() if now_ns - since_ns >= KEPT_NS]
        return [
            f"request {request_id} holds {len(self.owners.get(request_id, ()))} pages, its ticket "
            f"{self.tickets[request_id]} ended {(now_ns - self.ended[request_id]) / 1e9:.0f} s ago"
            for request_id in late
        ]

    def _release(self, request_id: str) -> None:
        self.tickets.pop(request_id, None)
        self.ended.pop(request_id, None)
        self.wrongly_shared.pop(request_id, None)
        for page, tag in self.owners.pop(request_id, {}).items():
            self._drop(page, tag)

    def _drop(self, page: int, tag: int) -> None:
        known = self.pages.get(page)
        if known is None or known.tag != tag:
            return  # the page has a new life already
        if known.owners > 1:
            self.pages[page] = known._replace(owners=known.owners - 1)
        else:
            del self.pages[page]

    def at(self, request_id: str, position: int) -> tuple[int, int] | None:
        """(page, tag) that the request holds at a position, as far as the reports have come."""
        owned = list(self.owners.get(request_id, {}).items())
        return owned[position] if 0 <= position < len(owned) else None

    def breaches(self, name: str, occupancy: Occupancy, blocks_total: int) -> list[str]:
        counted: dict[int, int] = {}
        for owned in self.owners.values():
            for page, tag in owned.items():
                if (known := self.pages.get(page)) is None or known.tag == tag:
                    counted[page] = counted.get(page, 0) + 1
        violations = [
            f"{name}: page {page} has {counted.get(page, 0)} owners, the book says {known.owners}"
            for page, known in self.pages.items()
            if counted.get(page, 0) != known.owners
        ]
        violations += [f"{name}: {text}" for text in self.wrongly_shared.values()]
        violations += [
            f"{name}: page {page} is outside 0 .. {blocks_total}"
            for page in self.pages
            if not 0 <= page <= blocks_total
        ]
        taken = [
            page
            for owned in self.owners.values()
            for page, tag in owned.items()
            if (known := self.pages.get(page)) is None or known.tag != tag
        ]
        if taken:
            violations.append(f"{name}: pages {taken[:8]} were taken again while a request still owned them")
        if self.owners and len(self.pages) > occupancy.blocks_held + occupancy.blocks_quarantined:
            violations.append(
                f"{name}: {len(self.pages)} pages have owners, the replica reports {occupancy.blocks_held} held"
            )
        return violations
