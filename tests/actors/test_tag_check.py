"""The worker's check alone: batches of any order against a model that looks at every entry.

1. A row is named exactly if one of its used entries points at a page whose tag is not the expected one, and the
   position is the first such; nothing is named otherwise, whatever order the batch has and however it changes.
2. A named row writes nothing (`slot_mapping` -1) and reads the null page; other rows keep every slot and entry.
3. A row without an expectation is not counted as checked.
4. The self-test passes, and fails when the comparison or the masking is broken.
5. A proof survives the way to the scheduler; of several ranks the least careful one counts.
6. With `integrity.mode: off` nothing of this exists.
"""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.integrity.tag_check import IntegrityError, NoCheck, TagCheck, self_test
from actors.engine.integrity.tracker import IntegrityDelta, Mismatch, NoTracker, Proof
from actors.engine.runner_view import StepView
from actors.engine.scheduler_half import FerryConnectorScheduler
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import Role
from kernels import dispatch

pytestmark = pytest.mark.compiles  # the real kernels

PAGE_TOKENS = 4
NUM_PAGES = 40
MAX_ROWS = 6
MAX_PAGES = 8


class DeviceCheck(TagCheck):
    """The CUDA code on the CPU: scattered updates, masks without looking, a proof that answers later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_cpu = False
        self.waited = 0

    def _pinned(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((2, num), dtype=dtype)

    def _recorded(self) -> Any:
        def synchronize() -> None:
            self.waited += 1

        return SimpleNamespace(synchronize=synchronize)


class Batch:
    """A model of the engine's side: requests with pages, a batch order, tags by page."""

    def __init__(self, rng: random.Random, kind: type[TagCheck] = TagCheck) -> None:
        self.rng = rng
        self.check = kind(NUM_PAGES, PAGE_TOKENS, MAX_ROWS, MAX_PAGES)
        self.delta = IntegrityDelta()
        self.tags: dict[int, int] = {}
        self.pages: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.next_tag = 1
        self.next_name = 0

    def take(self, request: str, count: int) -> None:
        held = {page for pages in self.pages.values() for page in pages}
        free = [page for page in range(1, NUM_PAGES) if page not in held]
        new = self.rng.sample(free, min(count, MAX_PAGES - len(self.pages[request]), len(free)))
        for page in new:
            self.tags[page] = self.delta.tags[page] = self.next_tag
            self.next_tag += 1
        first = len(self.pages[request])
        self.pages[request] += new
        tags = [self.tags[page] for page in new]
        self.expected[request] += tags
        if request in self.delta.claims:
            self.delta.claims[request][1].extend(tags)
        else:
            self.delta.claims[request] = (first, tags)

    def admit(self) -> None:
        self.next_name += 1
        request = f"r{self.next_name}"
        self.pages[request], self.expected[request] = [], []
        shared = self.rng.choice(sorted(self.pages))
        if shared != request and self.rng.random() < 0.3:
            some = self.pages[shared][: self.rng.randint(0, 3)]
            self.pages[request] += some
            self.expected[request] += [self.tags[page] for page in some]
            self.delta.claims[request] = (0, list(self.expected[request]))
        self.take(request, self.rng.randint(1, 4))

    def drop(self, request: str) -> None:
        del self.pages[request], self.expected[request]
        self.delta.claims.pop(request, None)
        self.delta.gone.append(request)

    def change(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            do = self.rng.random()
            if not self.pages or (do < 0.4 and len(self.pages) < 12):
                self.admit()
            elif do < 0.6:
                self.drop(self.rng.choice(sorted(self.pages)))
            elif do < 0.7:  # preempted and back in the same step, with other pages
                request = self.rng.choice(sorted(self.pages))
                self.drop(request)
                self.pages[request], self.expected[request] = [], []
                self.take(request, self.rng.randint(1, 4))
            else:
                self.take(self.rng.choice(sorted(self.pages)), 1)

    def step(self, spoil: int) -> None:
        rows = [r for r in self.pages if self.pages[r]]
        self.rng.shuffle(rows)
        rows = rows[: self.rng.randint(0, MAX_ROWS)]
        table = torch.zeros((max(1, len(rows)), MAX_PAGES), dtype=torch.int32)
        lengths = []
        for row, request in enumerate(rows):
            pages = self.pages[request]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            table[row, len(pages) :] = self.rng.randrange(NUM_PAGES)  # padding belongs to no request
            lengths.append(self.rng.randint((len(pages) - 1) * PAGE_TOKENS + 1, len(pages) * PAGE_TOKENS))
        for _ in range(spoil if rows else 0):
            row = self.rng.randrange(len(rows))
            position = self.rng.randrange(len(self.pages[rows[row]]))
            table[row, position] = self.rng.choice([self.rng.randrange(NUM_PAGES), NUM_PAGES, -1, 1 << 30])
        queries = [self.rng.randint(1, 3) for _ in rows]
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32)
        slots = torch.arange(1000, 1000 + sum(queries) + 2)
        before, slots_before = table.clone(), slots.clone()
        view = StepView(rows, table[: len(rows)], torch.tensor(lengths, dtype=torch.int32), starts, slots)
        delta, self.delta = self.delta, IntegrityDelta()
        self.check.step(delta, view if rows else None)
        proof = self.check.proof()
        wrong = {}
        for row, request in enumerate(rows):
            for position, page in enumerate(before[row, : len(self.pages[request])].tolist()):
                found = self.tags.get(page, 0) if 0 <= page < NUM_PAGES else None
                if found != self.expected[request][position]:
                    wrong[request] = Mismatch(request, position, page)
                    break
        if not rows:
            assert proof is None
            return
        assert proof is not None and proof.rows == len(rows)
        if isinstance(self.check, DeviceCheck):
            assert self.check.waited == 0  # nothing in the step asks the device
            proof = pickle.loads(pickle.dumps(proof))
            assert self.check.waited == 1 and type(proof) is Proof
            self.check.waited = 0
        assert proof.pages == sum(len(self.pages[r]) for r in rows)
        assert {m.request_id: m for m in proof.mismatches} == wrong
        for row, request in enumerate(rows):
            begin, end = int(starts[row]), int(starts[row + 1])
            used = len(self.pages[request])
            if request in wrong:
                assert slots[begin:end].tolist() == [-1] * (end - begin)
                assert table[row, :used].tolist() == [0] * used
            else:
                assert torch.equal(slots[begin:end], slots_before[begin:end])
                assert torch.equal(table[row], before[row])
        assert torch.equal(slots[sum(queries) :], slots_before[sum(queries) :])


@pytest.mark.parametrize("kind", [TagCheck, DeviceCheck])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_batch_in_any_order(kind: type[TagCheck], seed: int) -> None:
    """Invariants 1 and 2."""
    rng = random.Random(seed)
    batch = Batch(rng, kind)
    for _ in range(25):
        batch.change()
        batch.step(spoil=rng.choice([0, 0, 0, 1, 2]))


def test_a_page_in_its_next_life_is_caught_even_if_the_table_is_right() -> None:
    batch = Batch(random.Random(1))
    batch.admit()
    batch.step(0)
    batch.tags[batch.pages["r1"][0]] = batch.delta.tags[batch.pages["r1"][0]] = 77
    batch.step(0)  # the model expects r1 to be named


def step_view(table: list[list[int]], lengths: list[int], *request_ids: str) -> StepView:
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    rows = torch.tensor(table, dtype=torch.int32)
    return StepView(request_ids, rows, torch.tensor(lengths, dtype=torch.int32), starts, torch.arange(len(lengths)))


def test_a_row_without_an_expectation_is_not_proven() -> None:
    check = TagCheck(NUM_PAGES, PAGE_TOKENS, MAX_ROWS, MAX_PAGES)
    check.step(IntegrityDelta(tags={1: 5}, claims={"a": (0, [5])}), None)
    check.step(None, step_view([[1], [2]], [3, 3], "a", "b"))
    proof = check.proof()
    assert proof is not None and proof.rows == 1 and check.rows_without_claim == 1  # 3
    assert [m.request_id for m in proof.mismatches] == ["b"]  # and what is not claimed is not read
    assert check.proof() is None


def test_a_step_like_the_last_one_is_checked_again_with_what_changed_since() -> None:
    """The same view, the same object: its rows are not looked up again, but growth, an end and a return are seen."""
    check = TagCheck(NUM_PAGES, PAGE_TOKENS, MAX_ROWS, MAX_PAGES)
    view = step_view([[1, 0], [2, 0]], [3, 3], "a", "b")
    check.step(IntegrityDelta(tags={1: 5, 2: 6}, claims={"a": (0, [5]), "b": (0, [6])}), view)

    def named(delta: IntegrityDelta | None) -> tuple[list[str], int, int]:
        check.step(delta, view)
        proof = check.proof()
        assert proof is not None
        return [m.request_id for m in proof.mismatches], proof.rows, proof.pages

    assert named(None) == ([], 2, 2)
    view.table[0, 1] = 3
    view.seq_lens[0] = 5
    assert named(None) == (["a"], 2, 2)  # it has grown, and nothing was said of it
    view.table[0] = torch.tensor([1, 3])
    assert named(IntegrityDelta(tags={3: 7}, claims={"a": (1, [7])})) == ([], 2, 3)
    assert named(IntegrityDelta(gone=["b"])) == (["b"], 1, 2)
    view.table[1, 0] = 2
    assert named(IntegrityDelta(tags={2: 8}, claims={"b": (0, [8])})) == ([], 2, 3)
    assert named(IntegrityDelta(tags={2: 9})) == (["b"], 2, 3)


def test_a_step_without_forward_still_hears_the_delta() -> None:
    check = TagCheck(NUM_PAGES, PAGE_TOKENS, MAX_ROWS, MAX_PAGES)
    check.step(IntegrityDelta(tags={3: 9}, claims={"a": (0, [9])}), None)
    assert check.proof() is None and check.checks == 0
    assert check.still_current([3], [9]) and not check.still_current([3], [8])
    check.step(IntegrityDelta(tags={3: 10}), None)
    assert not check.still_current([3], [9]) and check.still_current([3], None)


def test_the_self_test_passes_and_sees_a_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    self_test()
    real = dispatch.prepare_check

    def blind(*arguments: Any) -> Any:
        return lambda rows: 0

    def raging(*arguments: Any) -> Any:
        arguments[-1].fill_(0)
        return lambda rows: rows

    def sees_and_does_not_mask(*arguments: Any) -> Any:
        def call(rows: int) -> int:
            kept = arguments[-2].clone()
            found = real(*arguments)(rows)
            arguments[-2].copy_(kept)
            return found

        return call

    for broken, words in ((blind, "not caught"), (sees_and_does_not_mask, "not caught"), (raging, "was refused")):
        monkeypatch.setattr("kernels.dispatch.prepare_check", broken)
        with pytest.raises(IntegrityError, match=words):
            self_test()
    monkeypatch.undo()


def test_proofs_travel_and_add_up() -> None:
    """Invariant 5."""
    one, other = Proof(3, 30, [Mismatch("a", 1, 2)]), Proof(2, 31, [Mismatch("b", 0, 7)])
    both = pickle.loads(pickle.dumps(one.aggregate(other)))
    assert (both.rows, both.pages) == (2, 30)
    assert {m.request_id for m in both.mismatches} == {"a", "b"}
    assert one  # vLLM drops what is false


def test_off_is_nothing() -> None:
    """Invariant 6: no delta, no proof, no tensor, no state of a step's making (a heartbeat reads vLLM's own tables)."""
    tracker = NoTracker()
    before = dict(vars(tracker))
    half = FerryConnectorScheduler(32, lambda request: [], tracker)
    step = SimpleNamespace(num_scheduled_tokens={"a": 1}, scheduled_new_reqs=[], scheduled_cached_reqs=None)
    half.on_allocated("a", [1, 2], 0)
    metadata = half.build(step)
    assert metadata.integrity is None and metadata.empty()
    assert tracker.tags([1]) is None and vars(tracker) == before
    worker = FerryConnectorWorker("r", Role.DECODE, 0, 1, "/nowhere")
    try:
        assert type(worker.check) is NoCheck and vars(worker.check) == {}
        assert worker.check.proof() is None and worker.check.still_current([1], None)
    finally:
        worker.close()
