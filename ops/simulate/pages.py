"""A decode engine's pages: the shipped ledger, and in the place of vLLM's block pool a free list and counts."""

from __future__ import annotations

from collections import deque

from actors.engine.integrity.ledger import FreeAnswer, Ledger


class PagePool:
    """Page 0 is the null page, as in vLLM. Pages that were freed last are handed out last."""

    def __init__(self, num_pages: int, epoch: int) -> None:
        self.refs = [0] * (num_pages + 1)
        self.free = deque(range(1, num_pages + 1))
        self.ledger = Ledger(num_pages + 1, epoch, self.refs.__getitem__)
        self.held: dict[str, list[int]] = {}

    def take(self, owner: str, count: int) -> None:
        """`count` more pages at the end of the owner's table; the caller has seen that there are as many."""
        pages = []
        for _ in range(count):
            page = self.free.popleft()
            assert self.ledger.may_hand_out(page), f"page {page} is not to be handed out"
            self.ledger.allocated(page)
            self.refs[page] += 1
            pages.append(page)
        mine = self.held.setdefault(owner, [])
        self.ledger.claim(owner, len(mine), pages)
        mine += pages

    def give_back(self, owner: str) -> None:
        """Everything the owner has: an end, an abort or a preemption."""
        self.ledger.release(owner)
        for page in reversed(self.held.pop(owner, [])):
            if self.ledger.free(page) is not FreeAnswer.REFUSE:
                self.refs[page] -= 1
                self.free.append(page)

    def violations(self, idle: bool) -> list[str]:
        """The ledger's laws against the pool as it is, and every breach that it saw happen since the last call."""
        laws = self.ledger.idle_breaches(self.free) if idle else self.ledger.breaches(self.free)
        return laws + [str(breach) for breach in self.ledger.kept_breaches(forget=True)]
