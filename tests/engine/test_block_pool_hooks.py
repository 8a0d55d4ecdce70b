"""Ledger, guard, tracker and check round vLLM's real KV cache manager, with no model, with and without faults.

1. Without faults no law is ever broken and no row is ever wrong: prefix sharing, growth, preemption, ends.
2. With faults in the pool (a page freed early, a reference too few, a page freed and taken) vLLM's assertions are never
   reached, and the requests that the proof names are exactly those whose table points into another's page.
3. When all requests have gone and the quarantine is lifted, every page is free again, whatever happened before.
4. The hooks keep the pool's own behaviour: without faults, pages come and go in the same order as without the guard.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from actors.engine.integrity.tag_check import TagCheck
from actors.engine.integrity.tracker import CheckTracker, Mismatch
from actors.engine.runner_view import StepView

BLOCK = 4
NUM_PAGES = 24
MAX_PAGES = 12


def manager_of(num_pages: int = NUM_PAGES) -> KVCacheManager:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=BLOCK * MAX_PAGES,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=True,
    )


class Service:
    """What the scheduler does with the manager, one call after the other; `checked` puts the guard round it."""

    def __init__(self, checked: bool = True, num_pages: int = NUM_PAGES) -> None:
        self.manager = manager_of(num_pages)
        self.pool = self.manager.block_pool
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}
        self.tracker: CheckTracker | None = None
        self.admitted: list[str] = []
        self.grown: dict[str, list[int]] = {}
        self.names = 0
        if checked:
            self.tracker = CheckTracker(epoch=3)
            self.tracker.bind(self.manager)
            self.check = TagCheck(num_pages, BLOCK, 16, MAX_PAGES + 1)

    def admit(self, prompt: list[int]) -> str | None:
        self.names += 1
        name = f"r{self.names}"
        request = Request(name, prompt, SamplingParams(max_tokens=99), None, block_hasher=self.hasher)
        return name if self._schedule(request) else None

    def _schedule(self, request: Request) -> bool:
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is None:
            return False
        request.num_computed_tokens = request.num_tokens
        self.requests[request.request_id] = request
        if self.tracker is not None:
            self.tracker.on_allocated(request.request_id, self.manager.get_block_ids(request.request_id)[0])
        return True

    def grow(self, name: str, num_tokens: int) -> bool:
        request = self.requests[name]
        if request.num_tokens + num_tokens > BLOCK * MAX_PAGES:
            return False
        request.append_output_token_ids([hash((name, request.num_tokens + i)) % 997 for i in range(num_tokens)])
        new = self.manager.allocate_slots(request, num_tokens)
        if new is None:
            self.end(name)
            return False
        request.num_computed_tokens = request.num_tokens
        self.grown.setdefault(name, []).extend(new.get_block_ids()[0])
        return True

    def end(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))
        self.grown.pop(name, None)

    def preempt_and_resume(self, name: str) -> None:
        request = self.requests.pop(name)
        self.manager.free(request)
        self.grown.pop(name, None)
        request.num_computed_tokens = 0
        self._schedule(request)

    def step(self, rng: random.Random) -> list[Mismatch]:
        """One forward over all requests: deltas to the worker, block tables as the manager has them, a verdict."""
        assert self.tracker is not None
        rows = list(self.requests)
        rng.shuffle(rows)
        rows = rows[:16]
        cached = SimpleNamespace(
            req_ids=list(self.grown),
            new_block_ids=[(pages,) if pages else None for pages in self.grown.values()],
            resumed_req_ids=set(),
        )
        scheduled = dict.fromkeys(rows, 1)
        delta = self.tracker.delta(SimpleNamespace(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled))
        self.grown = {}
        table = torch.zeros((len(rows), MAX_PAGES + 1), dtype=torch.int32)
        lengths = []
        for row, name in enumerate(rows):
            pages = self.manager.get_block_ids(name)[0]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            lengths.append(self.requests[name].num_tokens)
        starts, slots = torch.arange(len(rows) + 1, dtype=torch.int32), torch.arange(len(rows))
        view = StepView(rows, table, torch.tensor(lengths, dtype=torch.int32), starts, slots)
        self.check.step(delta, view if rows else None)
        mismatches = self.tracker.judge(scheduled, self.check.proof())
        for mismatch in mismatches:
            self.tracker.fail_requests(mismatch, 99)
            self.end(mismatch.request_id)
        return mismatches

    def empty(self) -> None:
        for name in list(self.requests):
            self.end(name)
        if self.tracker is not None:
            self.tracker.lift_quarantine()


PREFIXES = [[i] * (BLOCK * 3) for i in (1, 2)]


def act(service: Service, rng: random.Random) -> None:
    do = rng.random()
    names = list(service.requests)
    if not names or do < 0.4:
        head = rng.choice(PREFIXES)[: rng.randint(0, 3) * BLOCK]
        service.admit(head + [rng.randrange(1000) for _ in range(rng.randint(1, 9))])
    elif do < 0.65:
        service.grow(rng.choice(names), rng.randint(1, 5))
    elif do < 0.8:
        service.end(rng.choice(names))
    else:
        service.preempt_and_resume(rng.choice(names))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_honest_histories_are_clean(seed: int) -> None:
    """Invariants 1 and 3."""
    rng, service = random.Random(seed), Service()
    tracker = service.tracker
    assert tracker is not None
    for _ in range(60):
        act(service, rng)
        if rng.random() < 0.6:
            assert service.step(rng) == []
        if rng.random() < 0.1:
            assert tracker.audit(idle=not service.requests)["laws_broken"] == []
    service.empty()
    audit = tracker.audit(idle=True)
    assert audit["laws_broken"] == [] and audit["breaches"] == []
    counters = tracker.report()["counters"]
    assert counters["integrity_steps"] == counters["integrity_checks"] and counters["integrity_steps_unproven"] == 0


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_spoiled_pool_never_kills_and_never_fools(seed: int) -> None:
    """Invariants 2 and 3."""
    rng, service = random.Random(seed), Service()
    tracker = service.tracker
    assert tracker is not None
    for _ in range(60):
        act(service, rng)
        if service.requests and rng.random() < 0.15:
            spoil(service, rng)
        if rng.random() < 0.6:
            lives = {name: list(tracker.ledger.tags_of(name)) for name in service.requests}
            wrong = {
                name
                for name, tags in lives.items()
                if [tracker.ledger.tag(p) for p in service.manager.get_block_ids(name)[0]][: len(tags)] != tags
            }
            seen = {m.request_id for m in service.step(rng)}
            assert seen == wrong & seen and (len(lives) > 16 or seen == wrong)
    service.empty()
    assert tracker.audit(idle=True)["laws_broken"] == []
    assert service.pool.get_num_free_blocks() == NUM_PAGES - 1
    assert all(block.ref_cnt == 0 for block in service.pool.blocks[1:])


def spoil(service: Service, rng: random.Random) -> None:
    tracker = service.tracker
    assert tracker is not None
    blocks = service.manager.coordinator.single_type_managers[0].req_to_blocks[rng.choice(list(service.requests))]
    block: Any = rng.choice(blocks)
    match rng.choice(("free", "free and take", "through the front", "reference")):
        case "free" if block.ref_cnt == 1:
            service.pool.evict_blocks({block.block_id})
            tracker.guard.pool_free([block])
        case "free and take" if block.ref_cnt == 1:
            service.pool.evict_blocks({block.block_id})
            tracker.guard.pool_free([block])
            tracker.guard.blind_to.add(block.block_id)
        case "through the front":
            service.pool.free_blocks([block])
        case "reference" if block.ref_cnt > 1:
            block.ref_cnt -= 1


@pytest.mark.parametrize("seed", range(20))
def test_the_guard_changes_nothing_that_is_honest(seed: int) -> None:
    """Invariant 4: the same pages in the same order, with and without."""
    with_guard, without = Service(), Service(checked=False)
    for service in (with_guard, without):
        rng = random.Random(seed)
        service.history = []  # type: ignore[attr-defined]
        for _ in range(80):
            act(service, rng)
            service.history.append(  # type: ignore[attr-defined]
                {name: tuple(service.manager.get_block_ids(name)[0]) for name in service.requests}
            )
    assert with_guard.history == without.history  # type: ignore[attr-defined]


def test_off_leaves_the_pool_alone() -> None:
    service = Service(checked=False)
    assert service.pool.metrics_collector is None
    assert not {"get_new_blocks", "free_blocks", "cache_full_blocks"} & set(vars(service.pool))
    assert "free" not in vars(service.manager)
    assert "get_new_blocks" in vars(Service().pool)


def test_when_nothing_else_is_left_a_held_page_is_handed_out_and_the_reader_is_stopped() -> None:
    service = Service(num_pages=6)
    tracker = service.tracker
    assert tracker is not None
    rng = random.Random(0)
    first = service.admit(list(range(100, 100 + 3 * BLOCK)))
    assert first is not None and service.step(rng) == []
    block = service.manager.coordinator.single_type_managers[0].req_to_blocks[first][1]
    service.pool.evict_blocks({block.block_id})
    tracker.guard.pool_free([block])
    second = service.admit(list(range(200, 200 + 3 * BLOCK)))  # two free pages and the one that is not
    assert second is not None
    assert [m.request_id for m in service.step(rng)] == [first]
    service.empty()
    assert tracker.audit(idle=True)["laws_broken"] == []


def test_each_fault_is_reported_once_and_as_what_it_is() -> None:
    service, rng = Service(), random.Random(0)
    tracker = service.tracker
    assert tracker is not None

    def verdicts() -> list[tuple[str, int]]:
        return [(breach["law"], breach["page"]) for breach in tracker.audit(idle=False, forget=True)["breaches"]]

    victim = service.admit(list(range(100, 100 + 3 * BLOCK)))
    assert victim is not None and service.step(rng) == [] and verdicts() == []
    block = service.manager.coordinator.single_type_managers[0].req_to_blocks[victim][1]
    service.pool.evict_blocks({block.block_id})
    tracker.guard.pool_free([block])
    tracker.guard.blind_to.add(block.block_id)
    taker = service.admit(list(range(200, 200 + 3 * BLOCK)))
    assert taker is not None and block.block_id in service.manager.get_block_ids(taker)[0]
    assert verdicts() == [("life", block.block_id)]
    assert [m.request_id for m in service.step(rng)] == [victim]
    assert verdicts() == []  # the victim's end gives the page to no other request, and asks for nothing
    service.end(taker)
    assert tracker.ledger.num_quarantined == 1 and block.block_id in tracker.ledger.quarantined()

    head = [7] * (2 * BLOCK)
    one, two = service.admit([*head, 1]), service.admit([*head, 2])
    assert one is not None and two is not None
    page = service.manager.get_block_ids(one)[0][0]
    assert page == service.manager.get_block_ids(two)[0][0]
    service.pool.blocks[page].ref_cnt -= 1
    service.end(one)
    assert verdicts() == [("freed_while_held", page)]
    assert service.pool.blocks[page].ref_cnt == 1 and service.step(rng) == []
    service.end(two)
    assert verdicts() == [] and page in tracker.ledger.quarantined()
    service.empty()
    assert tracker.audit(idle=True)["laws_broken"] == []


def test_a_spoiled_count_is_found_although_no_request_touches_the_page() -> None:
    service, rng = Service(), random.Random(0)
    tracker = service.tracker
    assert tracker is not None
    name = service.admit(list(range(20)))
    assert name is not None and service.step(rng) == []
    page = service.manager.get_block_ids(name)[0][2]
    service.pool.blocks[page].ref_cnt = 0
    for _ in range(-(-NUM_PAGES // 16)):
        service.step(rng)
    assert [breach["page"] for breach in tracker.audit(idle=False)["breaches"]] == [page]
    assert service.pool.blocks[page].ref_cnt == 1
