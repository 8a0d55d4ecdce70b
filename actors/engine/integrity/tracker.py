"""The tag check, scheduler side: what each request must find where its block table points, and what follows if not.

Every page the pool hands out gets a new tag (`actors.engine.integrity.ledger`). When a request gets pages, the
tags they have at that moment are written down as what it expects; both go to the worker as deltas in the step's
metadata, by different paths: tags by page, from the pool's allocation callback; expectations by request and position,
from the allocation's result. The worker holds the one against the other through the block table that attention is
about to read (`tag_check`) and answers each step with a `Proof`. `scheduler` ends who the proof names,
before any token of that step leaves.

What the client sees: the request's last `EngineCoreOutput` has no new tokens, `finish_reason` ERROR and `stop_reason`
`PAGE_INTEGRITY` ("page_integrity"), so that a frontend can tell it from every other error: HTTP 500 with type
`page_integrity_error`, `finish_reason` "error" in streams, or, by policy `retry`, the request run again elsewhere from
its tokens so far (`app.request.state`).

`NoTracker` is what runs with `integrity.mode: off`: no delta, no proof, no tensor, no ledger. For the controller's page
book it reads vLLM's block tables when a heartbeat asks, so that pages have owners there too, without tags.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from actors.engine.integrity.block_pool_hooks import BlockPoolHooks
from actors.engine.integrity.ledger import Breach, Ledger
from actors.messages import PageDelta

REPORTS_KEPT = 64

# Totals that the tracker counts itself; the others of `ENGINE_COUNTERS` are the ledger's.
COUNTED = (
    "integrity_steps",
    "integrity_checks",
    "integrity_steps_unproven",
    "integrity_rows_checked",
    "integrity_pages_checked",
    "integrity_requests_ended",
)


@dataclass(slots=True)
class IntegrityDelta:
    """What changed since the last step. Apply in this order: tags, gone, claims.

    `tags`: page -> tag of its new life. `gone`: requests whose expectations end. `claims`: request -> (first position,
    expected tags from there on).
    """

    tags: dict[int, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    claims: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tags or self.gone or self.claims)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request's first wrong position: its block table named `page` there. -1: the row could not be checked."""

    request_id: str
    position: int
    page: int


class Proof(KVConnectorWorkerMetadata):
    """One worker's answer for one step: how much it checked, and who is wrong. Ranks are aggregated by vLLM.

    Subclasses may still be waiting for a device; `mismatches` then waits for the check itself, never for the forward.
    """

    def __init__(self, rows: int, pages: int, mismatches: Sequence[Mismatch] = ()) -> None:
        self.rows = rows
        self.pages = pages
        self._mismatches = tuple(mismatches)

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        return self._mismatches

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Proof:
        assert isinstance(other, Proof)
        # A step is proven as far as its least careful rank has looked.
        return Proof(min(self.rows, other.rows), min(self.pages, other.pages), self.mismatches + other.mismatches)

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaving the worker's process happens with the step's results: by then the device has answered.
        return (Proof, (self.rows, self.pages, self.mismatches))


@dataclass(frozen=True, slots=True)
class PageReport:
    """For `Heartbeat.pages`. `whole`: forget what earlier reports said, this one begins with what is held now."""

    whole: bool
    deltas: list[PageDelta]


class Tracker(Protocol):
    """What the scheduler half needs of integrity; `CheckTracker` does it, `NoTracker` does nothing."""

    def bind(self, manager: Any) -> None:
        """Once, when the KV cache manager exists."""

    def on_allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        """All pages of a request that was just admitted or resumed, in order."""

    def delta(self, step: Any) -> IntegrityDelta | None:
        """Once a step, with its SchedulerOutput; None: the worker gets nothing."""

    def tags(self, block_ids: Iterable[int]) -> list[int] | None:
        """The tags that pages have now, for a writer that must not write into a later life; None: not tracked."""

    def report(self) -> dict[str, Any]:
        """What `pageferry_scheduler` adds to its answer."""

    def audit(self, idle: bool, forget: bool = False) -> dict[str, Any]:
        """Every ledger law, now; the latest breaches and verdicts, which `forget` clears."""

    def take_page_deltas(self, pages_max: int, whole: bool = False) -> PageReport:
        """Who gave everything back, then who took which pages, since the last call; at most `pages_max` pages.

        What does not fit stays for the next call. The first call, and one with `whole`, starts with all that is held.
        """


class NoTracker:
    def __init__(self) -> None:
        self._tables: Mapping[str, list[Any]] = {}  # vLLM's own block table of each request
        self._reported: dict[str, tuple[list[Any], int]] | None = None  # the table, and how many of its pages

    def bind(self, manager: Any) -> None:
        self._tables = manager.coordinator.single_type_managers[0].req_to_blocks

    def on_allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        pass

    def delta(self, step: Any) -> None:
        return None

    def tags(self, block_ids: Iterable[int]) -> None:
        return None

    def report(self) -> dict[str, Any]:
        return {"blocks_quarantined": 0, "counters": {}}

    def audit(self, idle: bool, forget: bool = False) -> dict[str, Any]:
        return {"mode": "off"}

    def take_page_deltas(self, pages_max: int, whole: bool = False) -> PageReport:
        """As the tables are now, with tag 0. A table that vLLM has made anew (preemption) is another one."""
        whole = whole or self._reported is None
        reported = {} if whole or self._reported is None else self._reported
        self._reported = reported
        gone = [
            name for name, (table, num) in reported.items() if self._tables.get(name) is not table or len(table) < num
        ]
        deltas = [PageDelta(request_id=name, released=True) for name in gone]
        for name in gone:
            del reported[name]
        room = pages_max
        for name, table in self._tables.items():
            _, done = reported.get(name, (table, 0))
            new = table[done : done + room]
            if new:
                reported[name] = (table, done + len(new))
                deltas.append(PageDelta(request_id=name, added={int(block.block_id): 0 for block in new}))
                room -= len(new)
        return PageReport(whole, deltas)


class CheckTracker:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.ledger: Ledger
        self.guard: BlockPoolHooks
        self._next = IntegrityDelta()
        self._counters = dict.fromkeys(COUNTED, 0)
        self._spent_ns = 0  # in what is called once a step
        self._proven_at = time.monotonic()
        self._waiting_since = 0.0  # of the oldest step after the last full proof; 0: none
        self._reports: list[dict[str, Any]] = []
        self._untold: deque[dict[str, Any]] = deque(maxlen=REPORTS_KEPT)  # verdicts that no heartbeat has carried yet
        # Pages that no heartbeat has carried yet, by request: page -> tag. None until they are asked for.
        self._taken: dict[str, dict[int, int]] | None = None
        self._given_back: dict[str, None] = {}  # requests that were reported and have released everything since
        self._reported: set[str] = set()

    def bind(self, manager: Any) -> None:
        pool = manager.block_pool
        self.ledger = Ledger(pool.num_gpu_blocks, self.epoch, lambda page: int(pool.blocks[page].ref_cnt))
        self.guard = BlockPoolHooks(manager, self.ledger, on_life=self._on_life, on_released=self._on_released)

    # -- what the pool and the manager do

    def _on_life(self, page: int, tag: int) -> None:
        self._next.tags[page] = tag

    def _on_released(self, request_id: str) -> None:
        self._next.claims.pop(request_id, None)
        self._next.gone.append(request_id)
        if self._taken is not None:
            self._taken.pop(request_id, None)
        if request_id in self._reported:
            self._reported.remove(request_id)
            self._given_back[request_id] = None

    # -- what the scheduler half tells

    def on_allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        self._claim(request_id, 0, block_ids)

    def _claim(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        have = self.ledger.num_claimed(request_id)
        tags = self.ledger.claim(request_id, first, block_ids)
        if not tags:
            return
        if self._taken is not None:
            self._taken.setdefault(request_id, {}).update(zip(block_ids[have - first :], tags))
        pending = self._next.claims.get(request_id)
        if pending is None:
            self._next.claims[request_id] = (have, list(tags))
        else:
            pending[1].extend(tags)

    def delta(self, step: Any) -> IntegrityDelta:
        began = time.perf_counter_ns()
        self.ledger.step += 1
        cached = step.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids):
            # A resumed request's pages were written down when they were allocated.
            if new is not None and new[0] and request_id not in cached.resumed_req_ids:
                self._claim(request_id, self.ledger.num_claimed(request_id), new[0])
        if step.num_scheduled_tokens:
            self._counters["integrity_steps"] += 1
            self._waiting_since = self._waiting_since or time.monotonic()
        self.guard.check_some_pages()
        self.guard.trim_quarantine()
        delta, self._next = self._next, IntegrityDelta()
        self._spent_ns += time.perf_counter_ns() - began
        return delta

    def tags(self, block_ids: Iterable[int]) -> list[int]:
        return [self.ledger.tag(page) for page in block_ids]

    # -- what a proof says

    def judge(self, num_scheduled: Mapping[str, int], proof: object) -> list[Mismatch]:
        """Counts the step as proven or not; returns the mismatches it names."""
        if not num_scheduled:
            return []
        began = time.perf_counter_ns()
        self._count(num_scheduled, proof)
        self._spent_ns += time.perf_counter_ns() - began
        return list(proof.mismatches) if isinstance(proof, Proof) else []

    def _count(self, num_scheduled: Mapping[str, int], proof: object) -> None:
        if not isinstance(proof, Proof) or proof.rows < len(num_scheduled):
            self._counters["integrity_steps_unproven"] += 1
            if not isinstance(proof, Proof):
                return
        else:
            self._counters["integrity_checks"] += 1
            self._proven_at, self._waiting_since = time.monotonic(), 0.0
        self._counters["integrity_rows_checked"] += proof.rows
        self._counters["integrity_pages_checked"] += proof.pages

    def fail_requests(self, mismatch: Mismatch, first_written: int) -> list[str]:
        """Puts the pages in doubt that this verdict concerns; returns who must end with the request.

        `first_written`: the first position that the step (and those already scheduled after it) was to write for this
        request. Its row wrote nothing, so those pages are not what the prefix cache takes them for, and a request
        that was given one of them in the meantime has read it.
        """
        request_id = mismatch.request_id
        pages = self.ledger.pages_of(request_id)
        if 0 <= mismatch.position < len(pages):
            self.guard.doubt(pages[mismatch.position], f"tag mismatch of {request_id}")
        unwritten = pages[first_written:]
        self.guard.evict([p for p in pages if self.ledger.num_claims(p) <= 1 or p in unwritten])
        others = {
            other for page in unwritten if self.ledger.num_claims(page) > 1 for other in self.ledger.holders(page)
        }
        page = pages[mismatch.position] if 0 <= mismatch.position < len(pages) else mismatch.page
        what = f"page {mismatch.page} in the place of page {page}"
        if mismatch.position < 0:
            what = "it had read a page that another request's faulty step did not write"
        verdict = {
            "text": f"{what}, step {self.ledger.step}",
            "request_id": request_id,
            "position": mismatch.position,
            "page_found": mismatch.page,
            "page_expected": page,
            "step": self.ledger.step,
        }
        self._untold.append(verdict)
        self._reports.append(verdict | {"history": list(self.ledger.history(page))})
        del self._reports[:-REPORTS_KEPT]
        self._counters["integrity_requests_ended"] += 1
        return sorted(others - {request_id})

    # -- what outsiders ask

    def report(self) -> dict[str, Any]:
        now = time.monotonic()
        quarantined = self.ledger.num_quarantined
        breaches = sum(self.ledger.num_breaches.values())
        counters: dict[str, float] = dict(self._counters)
        counters["integrity_pages_doubted"] = self.ledger.num_doubted
        counters["integrity_breaches"] = breaches
        counters["integrity_unproven_s"] = now - self._waiting_since if self._waiting_since else 0.0
        counters["integrity_quarantined_share"] = quarantined / (self.ledger.num_pages - 1)
        return {"blocks_quarantined": quarantined, "counters": counters}

    def audit(self, idle: bool, forget: bool = False) -> dict[str, Any]:
        free = self.guard.free_pages()
        broken = self.ledger.idle_breaches(free) if idle else self.ledger.breaches(free)
        verdicts = list(self._reports)
        if forget:
            self._reports.clear()
        return {
            "mode": "check",
            "epoch": self.ledger.epoch,
            "laws_broken": broken,
            "breaches": [_breach(b) for b in self.ledger.kept_breaches(forget)],
            "verdicts": verdicts,
            "spent_ns": self._spent_ns,
            "proven_s_ago": time.monotonic() - self._proven_at,
            **self.ledger.summary(),
        }

    def take_page_deltas(self, pages_max: int, whole: bool = False) -> PageReport:
        whole = whole or self._taken is None
        if whole or self._taken is None:
            ledger = self.ledger
            self._taken = {r: dict(zip(ledger.pages_of(r), ledger.tags_of(r))) for r in ledger.requests()}
            self._given_back.clear()
            self._reported.clear()
        deltas = [PageDelta(request_id=request_id, released=True) for request_id in self._given_back]
        self._given_back.clear()
        room = pages_max
        while self._taken and room > 0:
            request_id, pages = next(iter(self._taken.items()))
            if len(pages) <= room:
                added = self._taken.pop(request_id)
            else:
                added = dict(itertools.islice(pages.items(), room))
                for page in added:
                    del pages[page]
            room -= len(added)
            self._reported.add(request_id)
            deltas.append(PageDelta(request_id=request_id, added=added))
        return PageReport(whole, deltas)

    def take_verdicts(self) -> list[dict[str, Any]]:
        """The verdicts since the last call, without the pages' histories; at most `REPORTS_KEPT`, the newest."""
        taken = list(self._untold)
        self._untold.clear()
        return taken

    def lift_quarantine(self) -> int:
        """Gives all quarantined pages back to the pool; only when no request is alive. Returns how many."""
        if self.ledger.requests():
            return 0
        pages = self.ledger.quarantined()
        self.guard.lift(pages)
        return len(pages)


def _breach(breach: Breach) -> dict[str, Any]:
    return {
        "law": str(breach.law),
        "page": breach.page,
        "text": breach.text,
        "history": list(breach.history),
    }
