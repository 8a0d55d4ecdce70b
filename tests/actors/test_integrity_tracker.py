"""What the tracker tells others: deltas for the controller's page book, proofs and their absence, counters.

1. Page deltas, applied one after the other, give the controller's book what the ledger knows.
2. A step without a full proof is counted, and the gauge of unproven seconds grows until the next full proof.
3. The counters are those of the table, and all are numbers.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from actors.controller.page_book import PageBook
from actors.engine.integrity.tracker import CheckTracker, Mismatch, NoTracker, Proof
from actors.messages import Occupancy
from cluster.metrics import ENGINE_COUNTERS


class Queue:
    """The two ends of vLLM's free list that the guard looks at."""

    def __init__(self, blocks: list[Any]) -> None:
        self.fake_free_list_head = SimpleNamespace(next_free_block=None)
        self.blocks = blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)

    def get_all_free_blocks(self) -> list[Any]:
        return list(self.blocks)


class Pool(BlockPool):
    """Without vLLM's constructor, which wants a model's cache."""

    def __init__(self, num_pages: int) -> None:
        self.num_gpu_blocks = num_pages
        self.blocks = [
            SimpleNamespace(block_id=i, ref_cnt=0, is_null=i == 0, next_free_block=None) for i in range(num_pages)
        ]
        self.free_block_queue = Queue(self.blocks[1:])
        self.metrics_collector: Any = None

    def get_new_blocks(self, num: int) -> list[Any]:
        new, self.free_block_queue.blocks = self.free_block_queue.blocks[:num], self.free_block_queue.blocks[num:]
        for block in new:
            block.ref_cnt = 1
            self.metrics_collector.on_block_allocated(block)
        return new

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.blocks.append(block)

    def evict_blocks(self, pages: set[int]) -> None:
        pass

    def cache_full_blocks(self, *args: Any) -> None:
        pass


class Manager(KVCacheManager):
    def __init__(self, num_pages: int) -> None:
        self.block_pool = Pool(num_pages)
        self.held: dict[str, list[Any]] = {}
        self.coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=self.held)])

    def free(self, request: Any) -> None:
        self.block_pool.free_blocks(reversed(self.held.pop(request.request_id)))

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        return self.held.pop(request.request_id)


@pytest.fixture
def tracker() -> CheckTracker:
    made = CheckTracker(epoch=9)
    made.bind(Manager(30))
    return made


def take(tracker: CheckTracker, name: str, num: int) -> None:
    manager = tracker.guard._manager
    manager.held.setdefault(name, []).extend(manager.block_pool.get_new_blocks(num))
    tracker.on_allocated(name, [block.block_id for block in manager.held[name]])


def leave(tracker: CheckTracker, name: str) -> None:
    tracker.guard._manager.free(SimpleNamespace(request_id=name))


def step(*names: str) -> Any:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(names, 1))


@pytest.mark.parametrize("seed", range(10))
def test_the_controllers_book_follows(tracker: CheckTracker, seed: int) -> None:
    rng, book = random.Random(seed), PageBook()
    manager = tracker.guard._manager
    for number in range(80):
        do, names = rng.random(), list(manager.held)
        if do < 0.4 and manager.block_pool.free_block_queue.num_free_blocks >= 3:
            take(tracker, f"r{number}", rng.randint(1, 3))
        elif do < 0.6 and names and manager.block_pool.free_block_queue.num_free_blocks:
            take(tracker, rng.choice(names), 1)
        elif do < 0.9 and names:
            leave(tracker, rng.choice(names))
        if rng.random() < 0.3:
            book = report(tracker, book, 10**6)
            assert book.owners == {
                name: {block.block_id: tracker.ledger.tag(block.block_id) for block in blocks}
                for name, blocks in manager.held.items()
            }
            held = sum(len(blocks) for blocks in manager.held.values())
            occupancy = Occupancy(blocks_total=29, blocks_free=29 - held, blocks_held=held)
            assert book.breaches("d", occupancy, 29) == []


def report(tracker: CheckTracker, book: PageBook, pages_max: int, whole: bool = False) -> PageBook:
    """One heartbeat: what the controller does with it."""
    report = tracker.take_page_deltas(pages_max, whole)
    assert sum(len(delta.added) for delta in report.deltas) <= pages_max
    book = PageBook() if report.whole else book
    for delta in report.deltas:
        assert book.apply(delta, 1 << 20) == []
    return book


def owners(tracker: CheckTracker) -> dict[str, dict[int, int]]:
    held = tracker.guard._manager.held
    return {name: {b.block_id: tracker.ledger.tag(b.block_id) for b in blocks} for name, blocks in held.items()}


@pytest.mark.parametrize("seed", range(10))
def test_a_bounded_report_lags_and_is_never_wrong(tracker: CheckTracker, seed: int) -> None:
    """Two pages a heartbeat: the book never counts more than is held, no page twice, and catches up."""
    rng, book = random.Random(seed), PageBook()
    manager = tracker.guard._manager
    for number in range(120):
        do, names = rng.random(), list(manager.held)
        if do < 0.4 and manager.block_pool.free_block_queue.num_free_blocks >= 3:
            take(tracker, f"r{number}", rng.randint(1, 3))
        elif do < 0.8 and names:
            leave(tracker, rng.choice(names))
        if rng.random() < 0.6:
            book = report(tracker, book, 2, whole=rng.random() < 0.1)
            held = sum(len(blocks) for blocks in manager.held.values())
            occupancy = Occupancy(blocks_total=29, blocks_free=29 - held, blocks_held=held)
            assert book.breaches("d", occupancy, 29) == [] and book.suspicions == 0
    for _ in range(30):
        book = report(tracker, book, 2)
    assert book.owners == owners(tracker)


def test_a_controller_that_has_forgotten_gets_everything(tracker: CheckTracker) -> None:
    take(tracker, "a", 2)
    assert tracker.take_page_deltas(100).whole, "the first report is the whole state"
    leave(tracker, "a")
    take(tracker, "b", 3)
    assert not tracker.take_page_deltas(100).whole
    book = report(tracker, PageBook(), 100, whole=True)
    assert book.owners == owners(tracker) and list(book.owners) == ["b"]
    assert book.at("b", 1) == list(book.owners["b"].items())[1] and book.at("b", 3) is None
    assert tracker.take_page_deltas(100).deltas == []


def test_a_request_that_came_and_went_between_two_reports_is_not_reported(tracker: CheckTracker) -> None:
    tracker.take_page_deltas(100)
    take(tracker, "a", 2)
    leave(tracker, "a")
    assert tracker.take_page_deltas(100).deltas == []


def test_without_tags_the_tables_as_they_are_give_the_book() -> None:
    """Random traffic, three pages a report; a request that was preempted has other pages under its old name."""
    rng, tracker, book = random.Random(3), NoTracker(), PageBook()
    tables: dict[str, list[Any]] = {}
    tracker.bind(
        SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=tables)]))
    )
    free = set(range(1, 60))

    def take(name: str, num: int) -> None:
        taken = [free.pop() for _ in range(num)]
        tables.setdefault(name, []).extend(SimpleNamespace(block_id=page) for page in taken)

    def leave(name: str) -> None:
        free.update(block.block_id for block in tables.pop(name))

    def report(pages_max: int, whole: bool = False) -> None:
        nonlocal book
        found = tracker.take_page_deltas(pages_max, whole)
        assert sum(len(delta.added) for delta in found.deltas) <= pages_max
        book = PageBook() if found.whole else book
        for delta in found.deltas:
            assert book.apply(delta, 60) == []
        held = 59 - len(free)
        assert book.breaches("d", Occupancy(blocks_total=59, blocks_free=len(free), blocks_held=held), 59) == []

    for number in range(400):
        do, names = rng.random(), list(tables)
        if do < 0.5 and len(free) >= 5:
            take(rng.choice([*names, f"r{number}"]), rng.randint(1, 5))
        elif do < 0.8 and names:
            leave(rng.choice(names))
        elif names and (name := rng.choice(names)):  # preempted, and back at once
            leave(name)
            take(name, rng.randint(1, 5))
        report(3, whole=rng.random() < 0.05)
    for _ in range(30):
        report(3)
    assert {name: list(owned) for name, owned in book.owners.items()} == {
        name: [block.block_id for block in table] for name, table in tables.items()
    }
    assert tables and tracker.take_page_deltas(100).deltas == []


def test_verdicts_are_reported_once(tracker: CheckTracker) -> None:
    take(tracker, "a", 2)
    pages = [block.block_id for block in tracker.guard._manager.held["a"]]
    tracker.guard.doubt = lambda page, reason: None  # type: ignore[method-assign]
    tracker.fail_requests(Mismatch("a", 1, 29), 2)
    [verdict] = tracker.take_verdicts()
    assert (verdict["request_id"], verdict["page_found"], verdict["page_expected"]) == ("a", 29, pages[1])
    assert tracker.take_verdicts() == [] and len(tracker.audit(idle=False)["verdicts"]) == 1


def test_steps_must_be_proven(tracker: CheckTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    take(tracker, "a", 1)

    def counters() -> dict[str, float]:
        found: dict[str, float] = tracker.report()["counters"]
        return found

    tracker.delta(step("a"))
    assert tracker.judge({"a": 1}, Proof(1, 1)) == []
    clock[0] += 60
    assert counters()["integrity_unproven_s"] == 0  # idle is not unproven
    for proof in (None, object(), Proof(0, 0)):
        tracker.delta(step("a"))
        assert tracker.judge({"a": 1}, proof) == []
        clock[0] += 5
    assert counters()["integrity_unproven_s"] == 15 and counters()["integrity_steps_unproven"] == 3
    named = Mismatch("a", 0, 7)
    tracker.delta(step("a"))
    assert tracker.judge({"a": 1}, Proof(1, 1, [named])) == [named]
    assert counters()["integrity_unproven_s"] == 0
    assert (counters()["integrity_steps"], counters()["integrity_checks"]) == (5, 2)
    assert tracker.judge({}, None) == [] and counters()["integrity_steps_unproven"] == 3  # no forward, nothing to prove


def test_the_counters_are_those_of_the_table(tracker: CheckTracker) -> None:
    counters = tracker.report()["counters"]
    assert set(counters) == {name for name in ENGINE_COUNTERS if name.startswith("integrity_")}
    assert all(isinstance(value, int | float) for value in counters.values())


def test_a_delta_says_in_order_what_the_worker_needs(tracker: CheckTracker) -> None:
    take(tracker, "a", 2)
    first = tracker.delta(step("a"))
    pages = [block.block_id for block in tracker.guard._manager.held["a"]]
    assert first.claims == {"a": (0, [first.tags[page] for page in pages])} and first.gone == []
    assert not tracker.delta(step("a"))
    take(tracker, "a", 1)
    leave(tracker, "a")  # within one step: claimed, given up, claimed again from the start
    take(tracker, "a", 1)
    again = tracker.delta(step("a"))
    assert again.gone == ["a"] and again.claims["a"][0] == 0 and len(again.claims["a"][1]) == 1
    assert set(first.tags.values()).isdisjoint(again.tags.values())
