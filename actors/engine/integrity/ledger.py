"""The page ledger: which life of which page each request holds, and the laws that must hold for all of them. Pure.

A *life* of a page begins when the pool hands it out and is named by a tag that no other life in the cluster has. A
*claim* is a request's hold on one life of one page, recorded once, when the pages are allocated; it is compared with
what others say (the pool's reference counts and free list, the worker's block table) and never taken from them later.

    free(pool) + held + quarantined == total
    no page has two claims without two references          (two owners without sharing)
    no reference count is below zero or below its claims   (freed while read)
    no page that is claimed is in the free list            (freed while read)
    every claim names the page's present life
    no tag has two lives

A broken law is a `Breach`: counted, kept with the page's last events, and answered so that the engine lives on. A page
in doubt is withheld when its last holder leaves, at least until no living request claims it from before.

The pool is seen through numbers that its caller passes in; page 0 is vLLM's null page, never claimed, never tagged.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

COUNTER_BITS = 32
EPOCH_BITS = 31
EVENTS_KEPT = 65_536
BREACHES_KEPT = 256
HISTORY_SHOWN = 12
STEPS_IN_FLIGHT = 4  # more than vLLM ever schedules ahead


class Law(StrEnum):
    SHARING = "sharing"
    UNDERFLOW = "underflow"
    FREED_WHILE_HELD = "freed_while_held"
    LIFE = "life"


class FreeAnswer(StrEnum):
    GIVE = "give"  # one reference less; the page goes back to the pool if that was the last one
    WITHHOLD = "withhold"  # the last reference of a page in doubt: it stays out of the free list
    REFUSE = "refuse"  # nothing may change: a request still holds the page


@dataclass(frozen=True, slots=True)
class Breach:
    law: Law
    page: int
    text: str
    history: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.law}: page {self.page}: {self.text} [{'; '.join(self.history)}]"


@dataclass(slots=True)
class _Claim:
    born: int  # how many claims there had been
    pages: list[int]
    tags: list[int]


@dataclass(frozen=True, slots=True)
class Released:
    """`kept`: pages whose present life the request held, in order; `lost`: (position, page) of those that moved on."""

    kept: tuple[int, ...]
    lost: tuple[tuple[int, int], ...]


def tag_epoch(replica_id: str, incarnation: int) -> int:
    """31 bits that name one life of one replica. Two replicas drawn the same have probability 2^-31 a pair."""
    digest = hashlib.blake2b(f"{replica_id}\0{incarnation}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> (32 - EPOCH_BITS)


class Ledger:
    """`num_pages` counts the null page, as vLLM's pool does; `refs(page)` is the pool's reference count now."""

    def __init__(self, num_pages: int, epoch: int, refs: Callable[[int], int]) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages: the least is the null page and one more")
        if not 0 <= epoch < 1 << EPOCH_BITS:
            raise ValueError(f"epoch {epoch} is not within {EPOCH_BITS} bits")
        self.num_pages = num_pages
        self.epoch = epoch
        self._refs = refs
        self._counter = 0
        self._tags = [0] * num_pages
        self._num_claims = [0] * num_pages  # on the present life
        self._claims: dict[str, _Claim] = {}
        self._doubt: dict[int, str] = {}  # page -> why; may still be held
        self._births = 0
        # In doubt and held by no request, that is quarantined, oldest first: page -> (births, step) when it went in.
        self._withheld: dict[int, tuple[int, int]] = {}
        self._events: deque[tuple[int, int, str, str, int]] = deque(maxlen=EVENTS_KEPT)
        self._breaches: deque[Breach] = deque(maxlen=BREACHES_KEPT)
        self.num_breaches = dict.fromkeys(Law, 0)
        self.num_doubted = 0  # ever
        self.step = 0

    # -- what is

    @property
    def num_quarantined(self) -> int:
        return len(self._withheld)

    def tag(self, page: int) -> int:
        return self._tags[page]

    def num_claims(self, page: int) -> int:
        return self._num_claims[page]

    def claim_counts(self, first: int, last: int) -> list[int]:
        """`num_claims` of pages `first` to `last`, the last one not included."""
        return self._num_claims[first:last]

    def requests(self) -> list[str]:
        return list(self._claims)

    def num_claimed(self, request_id: str) -> int:
        claim = self._claims.get(request_id)
        return 0 if claim is None else len(claim.pages)

    def pages_of(self, request_id: str) -> tuple[int, ...]:
        claim = self._claims.get(request_id)
        return () if claim is None else tuple(claim.pages)

    def tags_of(self, request_id: str) -> tuple[int, ...]:
        claim = self._claims.get(request_id)
        return () if claim is None else tuple(claim.tags)

    def holders(self, page: int) -> list[str]:
        """Requests that claim the page's present life. Walks all claims: for reports, not for every step."""
        tag = self._tags[page]
        return [r for r, claim in self._claims.items() if any(t == tag for t in claim.tags)]

    def has_lost(self, request_id: str, first: int, last: int) -> bool:
        """Whether a page that the request claimed at a position from `first` to before `last` lives another life."""
        claim = self._claims.get(request_id)
        if claim is None:
            return False
        return any(
            not 0 < page < self.num_pages or self._tags[page] != tag
            for page, tag in zip(claim.pages[first:last], claim.tags[first:last])
        )

    def in_doubt(self, page: int) -> bool:
        return page in self._doubt

    def allocated(self, page: int) -> int:
        """The pool hands the page out: a new life. Returns its tag."""
        if self._num_claims[page]:
            self._breach(Law.LIFE, page, f"handed out while {self._names(page)} hold it")
            self._num_claims[page] = 0
        if page in self._withheld:
            self._breach(Law.LIFE, page, f"handed out while quarantined ({self._doubt[page]})")
            del self._withheld[page]
        self._counter += 1
        if self._counter >> COUNTER_BITS:
            self.epoch = (self.epoch + 1) & ((1 << EPOCH_BITS) - 1)
            self._counter = 1
        tag = self._tags[page] = self.epoch << COUNTER_BITS | self._counter
        self._note(page, "allocated", "")
        return tag

    def claim(self, request_id: str, first: int, pages: Sequence[int]) -> list[int]:
        """`request_id` holds `pages` at positions `first`, `first + 1`, ... Returns the tags it must see there.

        Positions that it holds already keep the claim they have; a table that says otherwise is a breach.
        """
        claim = self._claims.get(request_id)
        if claim is None:
            claim = self._claims[request_id] = _Claim(self._births, [], [])
            self._births += 1
        have = len(claim.pages)
        if first > have:
            self._breach(Law.LIFE, pages[0] if pages else 0, f"{request_id} skips positions {have}..{first - 1}")
            first = have
        for position, page in enumerate(pages[: have - first], first):
            if claim.pages[position] != page:
                self._breach(
                    Law.LIFE, page, f"position {position} of {request_id} was page {claim.pages[position]} when claimed"
                )
        new = pages[have - first :]
        for page in new:
            self._claim_one(request_id, claim, page)
        return claim.tags[have:]

    def _claim_one(self, request_id: str, claim: _Claim, page: int) -> None:
        if not 0 < page < self.num_pages:
            # A tag that no page has: the check will stop the request before it reads anything there.
            self._breach(Law.LIFE, page, f"{request_id} was given a page outside 1..{self.num_pages - 1}")
            claim.pages.append(page)
            claim.tags.append(-1)
            return
        self._num_claims[page] += 1
        claim.pages.append(page)
        claim.tags.append(self._tags[page])
        self._note(page, "claimed", request_id)
        if self._num_claims[page] > (refs := self._refs(page)):
            self._breach(
                Law.SHARING, page, f"{self._num_claims[page]} claims ({self._names(page)}) on {refs} references"
            )

    def release(self, request_id: str) -> Released:
        """The request gives up all its claims; its references in the pool are still to be given back."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            return Released((), ())
        kept, lost = [], []
        for position, (page, tag) in enumerate(zip(claim.pages, claim.tags)):
            if 0 < page < self.num_pages and self._tags[page] == tag and self._num_claims[page] > 0:
                self._num_claims[page] -= 1
                kept.append(page)
                self._note(page, "released", request_id)
            else:
                lost.append((position, page))
                self._note(page, "lost", request_id)
        return Released(tuple(kept), tuple(lost))

    # -- what the pool is about to do

    def free(self, page: int) -> FreeAnswer:
        """The pool is about to take one reference from `page`."""
        refs = self._refs(page)
        if refs <= 0:
            self._breach(Law.UNDERFLOW, page, f"freed with {refs} references")
            self.doubt(page, "reference count below zero")
            return FreeAnswer.REFUSE
        if refs - 1 < self._num_claims[page]:
            self._breach(Law.FREED_WHILE_HELD, page, f"freed while {self._names(page)} hold it")
            self.doubt(page, "freed while held")
            return FreeAnswer.REFUSE
        if refs == 1 and page in self._doubt:
            self._quarantine(page)
            return FreeAnswer.WITHHOLD
        if refs == 1:
            self._note(page, "freed", "")
        return FreeAnswer.GIVE

    def may_hand_out(self, page: int) -> bool:
        """Whether a page at the head of the free list may begin a new life."""
        if self._num_claims[page]:
            self._breach(Law.FREED_WHILE_HELD, page, f"in the free list while {self._names(page)} hold it")
            self.doubt(page, "in the free list while held")
            return False
        if (refs := self._refs(page)) != 0:
            self._breach(Law.UNDERFLOW, page, f"in the free list with {refs} references")
            self.doubt(page, "in the free list with references")
            return False
        return page not in self._doubt

    def short(self, page: int) -> bool:
        """Whether the pool counts fewer references than there are claims; a breach if so."""
        refs, claims = self._refs(page), self._num_claims[page]
        if refs >= claims:
            return False
        law = Law.UNDERFLOW if refs < 0 else Law.FREED_WHILE_HELD
        self._breach(law, page, f"{refs} references for {claims} claims ({self._names(page)})")
        self.doubt(page, "fewer references than claims")
        return True

    # -- quarantine

    def doubt(self, page: int, reason: str) -> None:
        """The page may hold what its holder does not expect: it is not handed out again until `lift`."""
        if 0 < page < self.num_pages and page not in self._doubt:
            self._doubt[page] = reason
            self.num_doubted += 1
            self._note(page, f"doubted ({reason})", "")

    def withhold(self, page: int) -> None:
        """The caller has taken a page in doubt out of the free list."""
        assert page in self._doubt, f"page {page} is not in doubt"
        self._quarantine(page)

    def _quarantine(self, page: int) -> None:
        self._withheld[page] = (self._births, self.step)
        self._note(page, "quarantined", "")

    def releasable(self) -> list[int]:
        """Quarantined pages that no living request claims since before they went in, oldest first.

        A claim on a former life counts too: that request still believes to hold the page. Steps that were in flight
        when a page went in have ended as well. Costs a look at every claim.
        """
        oldest: dict[int, int] = {}  # page -> birth of the oldest living claim on it
        for claim in self._claims.values():  # in the order of their births
            for page in self._withheld.keys() & claim.pages:
                oldest.setdefault(page, claim.born)
        return [
            page
            for page, (births, step) in self._withheld.items()
            if births <= oldest.get(page, births) and step + STEPS_IN_FLIGHT <= self.step
        ]

    def lift(self, pages: Sequence[int]) -> None:
        """Ends the quarantine of these pages; the caller gives them back to the pool."""
        for page in pages:
            del self._withheld[page], self._doubt[page]
            self._note(page, "lifted", "")

    def quarantined(self) -> list[int]:
        return list(self._withheld)

    # -- laws

    def breaches(self, free_pages: Iterable[int]) -> list[str]:
        """Every law, checked against the pool as it is now; empty when all hold. `free_pages`: its free list."""
        free = list(free_pages)
        in_free = set(free)
        broken = (
            [f"page {p} is in the free list twice" for p in in_free if free.count(p) > 1]
            if len(in_free) < len(free)
            else []
        )
        held = sum(1 for page in range(1, self.num_pages) if page not in in_free and page not in self._withheld)
        total = self.num_pages - 1
        if len(free) + held + len(self._withheld) != total:
            broken.append(f"free {len(free)} + held {held} + quarantined {len(self._withheld)} != total {total}")
        counted: dict[int, int] = {}
        lives: dict[int, int] = {}
        for request_id, claim in self._claims.items():
            for position, (page, tag) in enumerate(zip(claim.pages, claim.tags)):
                if not 0 < page < self.num_pages or self._tags[page] != tag:
                    broken.append(f"position {position} of {request_id} claims a past life of page {page}")
                    continue
                counted[page] = counted.get(page, 0) + 1
                if lives.setdefault(tag, page) != page:
                    broken.append(f"tag {tag:#x} names pages {lives[tag]} and {page}")
        for page in range(1, self.num_pages):
            broken += self._page_breaches(page, counted.get(page, 0), page in in_free)
        return broken

    def _page_breaches(self, page: int, claims: int, free: bool) -> list[str]:
        refs, broken = self._refs(page), []
        if claims != self._num_claims[page]:
            broken.append(f"page {page} has {claims} claims, the count says {self._num_claims[page]}")
        if refs < 0:
            broken.append(f"page {page} has {refs} references")
        if refs < claims:
            broken.append(f"page {page} has {refs} references for {claims} claims ({self._names(page)})")
        if free and (refs > 0 or claims):
            broken.append(f"page {page} is free with {refs} references and {claims} claims")
        if free and page in self._withheld:
            broken.append(f"page {page} is free and quarantined")
        if not free and refs <= 0 and page not in self._withheld:
            broken.append(f"page {page} has {refs} references and is not in the free list: lost")
        return broken

    def idle_breaches(self, free_pages: Iterable[int]) -> list[str]:
        """`breaches`, and what must not be left when no request is alive."""
        free = list(free_pages)
        broken = self.breaches(free)
        if self._claims:
            broken.append(f"{len(self._claims)} requests still have claims: {sorted(self._claims)[:8]}")
        if (held := self.num_pages - 1 - len(free) - len(self._withheld)) != 0:
            broken.append(f"{held} pages are held by no request")
        return broken

    def kept_breaches(self, forget: bool) -> list[Breach]:
        """The newest `BREACHES_KEPT` breaches that have not been forgotten."""
        kept = list(self._breaches)
        if forget:
            self._breaches.clear()
        return kept

    def history(self, page: int) -> tuple[str, ...]:
        """The page's last events, oldest first."""
        events = [event for event in self._events if event[1] == page][-HISTORY_SHOWN:]
        return tuple(
            f"step {step} {what}{f' by {request_id}' if request_id else ''} tag {tag:#x}"
            for step, _, what, request_id, tag in events
        )

    def summary(self) -> Mapping[str, int]:
        return {
            "requests": len(self._claims),
            "in_doubt": len(self._doubt),
            "quarantined": len(self._withheld),
            "lives": self._counter,
            **{f"breaches_{law}": count for law, count in self.num_breaches.items()},
        }

    def _names(self, page: int) -> str:
        return ", ".join(self.holders(page)[:4]) or "no request"

    def _note(self, page: int, what: str, request_id: str) -> None:
        tag = self._tags[page] if 0 <= page < self.num_pages else 0
        self._events.append((self.step, page, what, request_id, tag))

    def _breach(self, law: Law, page: int, text: str) -> None:
        self.num_breaches[law] += 1
        self._breaches.append(Breach(law, page, text, self.history(page)))
