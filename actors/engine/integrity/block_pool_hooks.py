"""The ledger's hands on vLLM's block pool: hears of every new life, and stands before every free.

vLLM's pool tells of allocations (`metrics_collector`), but not of frees, and asserts where it should answer. So, in
check mode only, some methods of the two live objects are replaced by ones that ask the ledger first: `get_new_blocks`,
`free_blocks` and `cache_full_blocks` of the pool, `free` and `pop_blocks_for_free` of the KV cache manager. Everything
that ends a request's hold on pages (finish, abort, preemption, a failed load) passes one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from actors.engine.integrity.ledger import FreeAnswer, Ledger
from actors.engine.vllm_patches import replace

logger = logging.getLogger("pageferry.integrity")

SCRUBBED_PER_STEP = 16
TRIM_EVERY_STEPS = 16  # asking which pages can be lifted looks at every claim
QUARANTINED_SHARE_MAX = 0.05


class BlockPoolHooks:
    def __init__(
        self,
        manager: Any,
        ledger: Ledger,
        on_life: Callable[[int, int], None],
        on_released: Callable[[str], None],
    ) -> None:
        self.pool = manager.block_pool
        self.ledger = ledger
        self._manager = manager
        self._managers = manager.coordinator.single_type_managers
        self._on_life = on_life
        self._on_released = on_released
        self._next_checked = 1
        self._quarantine_max = max(1, int(QUARANTINED_SHARE_MAX * (ledger.num_pages - 1)))
        self.blind_to: set[int] = set()  # pages that fault injection takes past the screen below
        pool = self.pool
        self._chained, pool.metrics_collector = pool.metrics_collector, self
        self._pool_get = replace(pool, "get_new_blocks", self.get_new_blocks)
        self.pool_free = replace(pool, "free_blocks", self.free_blocks)
        self._pool_cache = replace(pool, "cache_full_blocks", self.cache_full_blocks)
        self._manager_free = replace(manager, "free", self.manager_free)
        self._manager_pop = replace(manager, "pop_blocks_for_free", self.manager_pop)

    # -- vLLM's metrics collector interface

    def on_block_allocated(self, block: Any) -> None:
        self._on_life(block.block_id, self.ledger.allocated(block.block_id))
        if self._chained is not None:
            self._chained.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        if self._chained is not None:
            self._chained.on_block_accessed(block)

    def on_block_evicted(self, block: Any) -> None:
        if self._chained is not None:
            self._chained.on_block_evicted(block)

    def reset(self) -> None:
        if self._chained is not None:
            self._chained.reset()

    def drain_events(self) -> list[Any]:
        return [] if self._chained is None else list(self._chained.drain_events())

    # -- in the place of the pool's methods

    def get_new_blocks(self, num_blocks: int) -> Any:
        """Pages that a request still holds, or that are in doubt, do not leave the free list."""
        queue = self.pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        seen = 0
        while seen < num_blocks and block is not None and block.block_id >= 0:
            following = block.next_free_block
            if block.block_id not in self.blind_to and not self.ledger.may_hand_out(block.block_id):
                if queue.num_free_blocks > num_blocks:
                    self._take_out(block)
                    block = following
                    continue
                # Nothing else is left: the tags will stop a request that still reads it.
                block.ref_cnt = 0
            seen += 1
            block = following
        return self._pool_get(num_blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        given: dict[int, Any] = {}  # kept together and in order: vLLM's eviction order comes from it
        for block in ordered_blocks:
            page = block.block_id
            if page in given:  # listed twice: the count must be right before it is asked again
                self.pool_free(given.values())
                given = {}
            answer = FreeAnswer.GIVE if block.is_null else self.ledger.free(page)
            if answer is FreeAnswer.GIVE:
                given[page] = block
                continue
            if answer is FreeAnswer.REFUSE:
                self._put_in_doubt(page, "freed while held")
                self.repair(block)
        self.pool_free(given.values())

    def cache_full_blocks(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        """A page that is another's by now is not offered under this request's hash; vLLM would die of the attempt."""
        if self.ledger.has_lost(request.request_id, num_cached_blocks, num_full_blocks):
            return
        self._pool_cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

    # -- in the place of the manager's methods

    def manager_free(self, request: Any) -> None:
        self._release(request.request_id)
        self._manager_free(request)

    def manager_pop(self, request: Any) -> Any:
        self._release(request.request_id)
        return self._manager_pop(request)

    def _release(self, request_id: str) -> None:
        for page in self.ledger.pages_of(request_id):
            if 0 < page < self.ledger.num_pages and self.ledger.short(page):
                self.repair(self.pool.blocks[page])
        released = self.ledger.release(request_id)
        if not released.kept and not released.lost:
            return
        self._on_released(request_id)
        if released.lost:
            self._forget(request_id, {position for position, _ in released.lost})

    def _forget(self, request_id: str, positions: set[int]) -> None:
        """Takes pages that are no longer the request's out of its list, so that they are not given back twice."""
        manager = self._managers[0]
        blocks = manager.req_to_blocks.get(request_id)
        if not blocks:
            return
        for position in positions:
            if position < len(blocks):
                self.doubt(blocks[position].block_id, f"lost by {request_id}")
        blocks[:] = [block for position, block in enumerate(blocks) if position not in positions]
        if request_id in manager.num_cached_block:
            manager.num_cached_block[request_id] = min(manager.num_cached_block[request_id], len(blocks))

    # -- doubt

    def doubt(self, page: int, reason: str) -> None:
        """Evicts the page from the prefix cache and keeps it from being handed out again."""
        if not 0 < page < self.ledger.num_pages:
            return
        self.ledger.doubt(page, reason)
        self._put_in_doubt(page, reason)
        block = self.pool.blocks[page]
        if block.ref_cnt == 0 and block.next_free_block is not None:
            self._take_out(block)

    def _put_in_doubt(self, page: int, reason: str) -> None:
        self.pool.evict_blocks({page})
        logger.error("page %d is in doubt (%s): %s", page, reason, "; ".join(self.ledger.history(page)))

    def evict(self, pages: Iterable[int]) -> None:
        """Out of the prefix cache: what these pages hold is not what their hashes promise."""
        self.pool.evict_blocks({page for page in pages if 0 < page < self.ledger.num_pages})

    def _take_out(self, block: Any) -> None:
        """Out of the free list: back to its holders if it has any, else into quarantine."""
        page = block.block_id
        self.pool.free_block_queue.remove(block)
        self.pool.evict_blocks({page})
        claims = self.ledger.num_claims(page)
        if claims:
            block.ref_cnt = claims
        else:
            block.ref_cnt = 1  # the quarantine's own: vLLM must see a held page
            self.ledger.withhold(page)

    def repair(self, block: Any) -> None:
        """Makes the pool's count agree with the claims again, so that no assertion of vLLM's meets it later."""
        page, claims = block.block_id, self.ledger.num_claims(block.block_id)
        self.pool.evict_blocks({page})
        if block.next_free_block is not None:
            if claims or self.ledger.in_doubt(page):
                self._take_out(block)
        elif block.ref_cnt < claims:
            block.ref_cnt = claims
        elif block.ref_cnt <= 0:
            block.ref_cnt = 1
            self.ledger.withhold(page)

    def check_some_pages(self) -> None:
        """A few pages a step: a count that fell below its claims is found even if no request touches the page."""
        begin, ledger = self._next_checked, self.ledger
        end = min(begin + SCRUBBED_PER_STEP, ledger.num_pages)
        for block, claims in zip(self.pool.blocks[begin:end], ledger.claim_counts(begin, end)):
            if block.ref_cnt < claims and ledger.short(block.block_id):
                self._put_in_doubt(block.block_id, "fewer references than claims")
                self.repair(block)
        self._next_checked = 1 if end == ledger.num_pages else end

    def trim_quarantine(self) -> None:
        """Keeps the quarantine from starving the scheduler: above its share it releases pages that no request holds."""
        excess = self.ledger.num_quarantined - self._quarantine_max
        if excess > 0 and self.ledger.step % TRIM_EVERY_STEPS == 0:
            self.lift(self.ledger.releasable()[:excess])

    def lift(self, pages: Sequence[int]) -> None:
        """Out of quarantine and back into the pool."""
        self.ledger.lift(pages)
        self.pool_free([self.pool.blocks[page] for page in pages])

    def free_pages(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
