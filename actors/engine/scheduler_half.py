"""The connector's scheduler half: which pages of which request are to be sealed or opened in a step.

Runs in the engine core's process, in the scheduler's thread. It touches no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from actors.engine.integrity.tracker import Tracker
from actors.engine.metadata import FerryMetadata, OpenJob, SealJob
from actors.engine.orders import OpenParams, SealParams, from_params


class Step(Protocol):
    """What is read of vLLM's SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Any
    scheduled_cached_reqs: Any


@dataclass(slots=True)
class _Sealing:
    order: SealParams
    num_pages: int
    sealed: int = 0


@dataclass(slots=True)
class Counters:
    """Running totals of this engine; see `cluster.metrics` for their meaning."""

    tokens_opened: int = 0
    tokens_recomputed: int = 0
    pages_sealed: int = 0
    opens_failed: int = 0


class FerryConnectorScheduler:
    """`block_ids_of(request_id)` gives the request's pages in order, as the KV cache manager knows them."""

    def __init__(self, block_tokens: int, block_ids_of: Callable[[str], list[int]], tracker: Tracker) -> None:
        self.block_tokens = block_tokens
        self.tracker = tracker
        self._block_ids_of = block_ids_of
        self._sealing: dict[str, _Sealing] = {}
        self._to_open: dict[str, OpenParams] = {}  # announced, pages not allocated yet
        self._loading: dict[str, int] = {}  # request -> tokens on their way into its pages
        self._next = FerryMetadata()
        self.counters = Counters()

    def on_new_request(self, request_id: str, params: dict[str, Any] | None) -> None:
        match from_params(params):
            case SealParams() as order:
                self._sealing[request_id] = _Sealing(order, -(-order.num_tokens // self.block_tokens))
            case OpenParams() as order:
                self._to_open[request_id] = order
            case None:
                pass

    # -- decode

    def num_external_tokens(self, request_id: str, num_computed_tokens: int) -> int:
        """Prompt tokens that can be opened beyond what the local prefix cache has (whole pages). 0: none."""
        order = self._to_open.get(request_id)
        if order is None:
            return 0
        external = order.hand_over.seal.num_tokens - num_computed_tokens
        if external <= 0:
            self._release_unread(request_id)
            return 0
        return external

    def on_allocated(self, request_id: str, block_ids: list[int], num_external_tokens: int) -> None:
        self.tracker.on_allocated(request_id, block_ids)
        if num_external_tokens <= 0:
            return
        order = self._to_open.pop(request_id, None)
        if order is None:
            return
        num_tokens = order.hand_over.seal.num_tokens
        first_page = (num_tokens - num_external_tokens) // self.block_tokens
        num_pages = -(-num_tokens // self.block_tokens)
        pages = block_ids[first_page:num_pages]
        tags = self.tracker.tags(pages)
        self._next.opens.append(OpenJob(request_id, order, pages, first_page, num_external_tokens, tags))
        self._loading[request_id] = num_external_tokens

    def on_loaded(self, finished: set[str], failed: set[str]) -> None:
        for request_id in finished:
            num_tokens = self._loading.pop(request_id, 0)
            if request_id in failed:
                self.counters.opens_failed += 1
                self.counters.tokens_recomputed += num_tokens
            else:
                self.counters.tokens_opened += num_tokens

    def _release_unread(self, request_id: str) -> None:
        order = self._to_open.pop(request_id, None)
        if order is not None:
            self._next.opens.append(OpenJob(request_id, order, [], 0, 0))

    # -- prefill

    def build(self, step: Step) -> FerryMetadata:
        """The step's metadata; seals cover pages that are complete once this step's forward has run."""
        if self._sealing:
            new = ((r.req_id, r.num_computed_tokens) for r in step.scheduled_new_reqs)
            cached = zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens)
            for request_id, num_computed in (*new, *cached):
                if (sealing := self._sealing.get(request_id)) is not None:
                    self._seal(request_id, sealing, num_computed + step.num_scheduled_tokens[request_id])
        metadata, self._next = self._next, FerryMetadata()
        metadata.integrity = self.tracker.delta(step)
        return metadata

    def _seal(self, request_id: str, sealing: _Sealing, num_computed: int) -> None:
        last = num_computed >= sealing.order.num_tokens
        ready = sealing.num_pages if last else num_computed // self.block_tokens
        # After a preemption the same pages are computed again; those sealed before stay as they are.
        if ready <= sealing.sealed:
            return
        block_ids = self._block_ids_of(request_id)[sealing.sealed : ready]
        self._next.seals.append(SealJob(sealing.order, block_ids, sealing.sealed, last))
        self.counters.pages_sealed += ready - sealing.sealed
        sealing.sealed = ready
        if last:
            del self._sealing[request_id]

    # -- both

    def on_finished(self, request_id: str) -> None:
        """The request has ended, whichever way, before its pages are freed."""
        if (sealing := self._sealing.pop(request_id, None)) is not None:
            self._next.abandoned.append((sealing.order.ticket_id, sealing.order.attempt))
        self._release_unread(request_id)
        if request_id in self._loading:
            self._next.cancelled.append(request_id)

    def idle(self) -> bool:
        """True when nothing of any ticket is left here."""
        return not (self._sealing or self._to_open or self._loading) and self._next.empty()
