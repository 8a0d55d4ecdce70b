"""Which request holds which pages with which tags on one replica. Pure."""

from __future__ import annotations

import msgspec

from actors.controller.journal import Tracked, TrackedDict
from actors.messages import Occupancy, PageDelta, ReplicaId, Role, TicketId


class TagMismatch(msgspec.Struct, frozen=True):
    """A request that its replica ended because its block table named a page that is not its own."""

    when_ns: int
    replica: ReplicaId
    role: Role
    request_id: str
    ticket_id: TicketId
    detail: str
    known: tuple[int, int] | None  # (page, tag) that the book has at that position, by a road of its own

    def __str__(self) -> str:
        book = "the book knows no page there"
        if self.known is not None:
            book = f"the book says page {self.known[0]}, tag {self.known[1]:#x}"
        return f"tag mismatch on {self.role} {self.replica}: request {self.request_id}: {self.detail}; {book}"


class PageBook(Tracked):
    """Pages of one replica by owner, from batched deltas: page id -> tag and number of owners."""

    __slots__ = ("owners", "pages", "suspicions")

    def __init__(self) -> None:
        self.owners: TrackedDict[str, TrackedDict[int, int]] = TrackedDict()
        self.pages: TrackedDict[int, tuple[int, int]] = TrackedDict()  # page -> (tag, owners)
        self.suspicions = 0  # ever: a page taken under a new tag while another request still owned it under the old one

    def apply(self, delta: PageDelta) -> None:
        if delta.released:
            self._release(delta.request_id)
        if not delta.added:
            return
        owned = self.owners.setdefault(delta.request_id, TrackedDict())
        for page, tag in delta.added.items():
            had = owned.get(page)
            if had == tag:
                continue  # a doubled delta
            if had is not None:
                self._drop(page, had)
            known_tag, owners = self.pages.get(page, (tag, 0))
            if known_tag != tag:
                self.suspicions += owners > 0
                owners = 0
            owned[page] = tag
            self.pages[page] = (tag, owners + 1)

    def _release(self, request_id: str) -> None:
        for page, tag in self.owners.pop(request_id, {}).items():
            self._drop(page, tag)

    def _drop(self, page: int, tag: int) -> None:
        known_tag, owners = self.pages.get(page, (tag, 0))
        if known_tag != tag:
            return  # the page has a new life already
        if owners > 1:
            self.pages[page] = (tag, owners - 1)
        else:
            self.pages.pop(page, None)

    def at(self, request_id: str, position: int) -> tuple[int, int] | None:
        """(page, tag) that the request holds at a position, as far as the reports have come."""
        owned = list(self.owners.get(request_id, {}).items())
        return owned[position] if 0 <= position < len(owned) else None

    def breaches(self, name: str, occupancy: Occupancy, blocks_total: int) -> list[str]:
        counted: dict[int, int] = {}
        for owned in self.owners.values():
            for page, tag in owned.items():
                if self.pages.get(page, (tag, 0))[0] == tag:
                    counted[page] = counted.get(page, 0) + 1
        found = [
            f"{name}: page {page} has {counted.get(page, 0)} owners, the book says {owners}"
            for page, (_, owners) in self.pages.items()
            if counted.get(page, 0) != owners
        ]
        found += [
            f"{name}: page {page} is outside 0 .. {blocks_total}"
            for page in self.pages
            if not 0 <= page <= blocks_total
        ]
        taken = [
            page
            for owned in self.owners.values()
            for page, tag in owned.items()
            if self.pages.get(page, (0, 0))[0] != tag
        ]
        if taken:
            found.append(f"{name}: pages {taken[:8]} were taken again while a request still owned them")
        if self.owners and len(self.pages) > occupancy.blocks_held + occupancy.blocks_quarantined:
            found.append(
                f"{name}: {len(self.pages)} pages have owners, the replica reports {occupancy.blocks_held} held"
            )
        return found
