"""Which request holds which pages with which tags on one replica. Pure."""

from __future__ import annotations

from actors.nouns import Occupancy, PageDelta


class PageBook:
    """Pages of one replica by owner, from batched deltas: page id -> tag and number of owners."""

    __slots__ = ("owners", "pages", "suspicions")

    def __init__(self) -> None:
        self.owners: dict[str, dict[int, int]] = {}
        self.pages: dict[int, tuple[int, int]] = {}  # page -> (tag, owners)
        self.suspicions = 0  # a page taken under a new tag while another request still owned it under the old one

    def apply(self, delta: PageDelta) -> None:
        if delta.released:
            self._release(delta.request_id)
        if not delta.added:
            return
        owned = self.owners.setdefault(delta.request_id, {})
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

    def held_by(self, request_id: str) -> int:
        return len(self.owners.get(request_id, ()))

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
        if self.suspicions:
            found.append(f"{name}: {self.suspicions} pages were taken again while a request still owned them")
        if self.owners and len(self.pages) > occupancy.blocks_held + occupancy.blocks_quarantined:
            found.append(
                f"{name}: {len(self.pages)} pages have owners, the replica reports {occupancy.blocks_held} held"
            )
        return found
