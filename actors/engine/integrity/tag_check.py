"""The tag check, worker side: before the forward, on the block table that attention is about to read.

Holds two things that came by different paths (`integrity.IntegrityDelta`): `page_tags`, the tag of each page's present
life, and `expected`, what each request must find at each position, one row a request that stays where it is while the
request lives. One kernel (`kernels.dispatch.check_tags`) compares `page_tags[table]` with `expected` for all rows of
the step and stops those that are wrong: `slot_mapping` -1, so that they write nothing, and the null page in the table,
so that they read no request's page (and no page outside the cache). Their requests are named in the step's `Proof`.

On CUDA nothing here waits for the device: the answer is copied into pinned memory behind the check, and the `Proof`
waits for that copy when it leaves the worker, which is when the step's own results leave. An attention backend that
turns the table into index lists before the check (FlashInfer) may still read a wrong page; its request ends all the
same. The CUDA form has not run on the machines this was written on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.integrity.tracker import IntegrityDelta, Mismatch, Proof
from actors.engine.runner_view import StepView
from kernels import dispatch

logger = logging.getLogger("pageferry.integrity")

NO_TAG = -1  # no page has it: a position without an expectation can never pass
NO_SLOT = -1


_Operands = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
_BUFFERS = ("table", "seq_lens", "query_start", "slot_mapping")


class IntegrityError(RuntimeError):
    """The check does not work here; the replica must not start with `integrity.mode: check`."""


class Check(Protocol):
    def step(self, delta: IntegrityDelta | None, view: StepView | None) -> None: ...

    def proof(self) -> Proof | None: ...

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool: ...


class NoCheck:
    def step(self, delta: IntegrityDelta | None, view: StepView | None) -> None:
        pass

    def proof(self) -> None:
        return None

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool:
        return True


@dataclass(slots=True, eq=False)
class _Claim:
    """What one request expects. `slot`: its row of `expected`; NO_SLOT until a step runs it for the first time."""

    tags: list[int] = field(default_factory=list)
    slot: int = NO_SLOT


class _DeviceProof(Proof):
    """A proof whose answer is still on its way from the device."""

    def __init__(self, rows: int, pages: int, request_ids: Sequence[str], answer: torch.Tensor, done: Any) -> None:
        super().__init__(rows, pages)
        self._request_ids = request_ids
        self._answer = answer  # int32 [2, R] pinned: first wrong position or -1, page found there
        self._done = done

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        self._done.synchronize()
        return tuple(_mismatches(self._request_ids, self._answer))


class TagCheck:
    """`max_rows` requests a step, `max_pages` positions a request, on `device`."""

    def __init__(
        self, num_pages: int, page_tokens: int, max_rows: int, max_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.page_tokens = page_tokens
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.page_tags = torch.zeros(num_pages, dtype=torch.int64, device=self.device)
        self.expected = torch.full((max_rows, max_pages), NO_TAG, dtype=torch.int64, device=self.device)
        self.lives = np.zeros(num_pages, np.int64)  # what `page_tags` should hold, in host memory, for `still_current`
        self._claims: dict[str, _Claim] = {}
        self._free_slots = list(range(max_rows - 1, -1, -1))
        self._written = [0] * max_rows  # positions of each row of `expected` that hold a tag
        self._proof: Proof | None = None
        # Of the last step, and of the next one as long as neither its rows nor what they expect change.
        self._view: StepView | None = None
        self._rows: list[_Claim | None] = []
        self._rows_changed = False
        self._known, self._pages, self._passed = 0, -1, Proof(0, 0)
        self._slots: torch.Tensor
        self._answer: torch.Tensor  # int32 [2, rows]: first wrong position or -1, page found there
        self._run: Callable[[int], int]
        self.checks = 0
        self.check_ns = 0
        self.rows_without_claim = 0

    # -- what the scheduler side says

    def step(self, delta: IntegrityDelta | None, view: StepView | None) -> None:
        """Once a step, before its forward; `view` None: the step has none."""
        started = time.perf_counter_ns()
        if delta:
            self._apply(delta)
        self._proof = None
        if view is not None:
            self._proof = self._check(view)
            self.checks += 1
            self.check_ns += time.perf_counter_ns() - started

    def proof(self) -> Proof | None:
        proof, self._proof = self._proof, None
        return proof

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool:
        """Whether these pages still live the lives that `tags` names; asked by a writer before it writes."""
        return tags is None or [int(self.lives[page]) for page in block_ids] == list(tags)

    def _apply(self, delta: IntegrityDelta) -> None:
        self._rows_changed |= bool(delta.gone)
        for request_id in delta.gone:
            claim = self._claims.pop(request_id, None)
            if claim is not None and claim.slot != NO_SLOT:
                self._free_slots.append(claim.slot)
        for request_id, (first, tags) in delta.claims.items():
            if (claim := self._claims.get(request_id)) is None:
                claim = self._claims[request_id] = _Claim()
                self._rows_changed = True
            self._pages = -1
            claim.tags[first:] = tags
            if claim.slot != NO_SLOT:
                self._write_expected(claim, first)
        if delta.tags:
            pages = np.fromiter(delta.tags.keys(), np.int64, len(delta.tags))
            values = np.fromiter(delta.tags.values(), np.int64, len(delta.tags))
            self.lives[pages] = values
            self._write(self.page_tags, pages, values)

    def _slot_of(self, claim: _Claim, request_ids: Sequence[str]) -> int:
        """`request_ids`: those of the step, whose slots must stay."""
        if claim.slot == NO_SLOT:
            if not self._free_slots:  # not with vLLM's schedulers: who has run either runs or gives its pages up
                other = next(c for r, c in self._claims.items() if c.slot != NO_SLOT and r not in request_ids)
                self._free_slots.append(other.slot)
                other.slot = NO_SLOT
            claim.slot = self._free_slots.pop()
            self._write_expected(claim, 0)
        return claim.slot

    def _write_expected(self, claim: _Claim, first: int) -> None:
        """From position `first` on; what another request expected behind the claim's end is gone."""
        width = self.expected.shape[1]
        length = min(len(claim.tags), width)
        row = np.full(max(length, self._written[claim.slot]) - first, NO_TAG, np.int64)
        row[: length - first] = claim.tags[first:length]
        self._written[claim.slot] = length
        self._write(self.expected, claim.slot * width + np.arange(first, first + len(row)), row)

    # The places where the device form touches CUDA itself; tests run that form on the CPU without them.

    def _write(self, target: torch.Tensor, at: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        """`target.view(-1)[at] = values`; on CUDA from pinned memory, without waiting."""
        if self.on_cpu:
            target.view(-1).numpy()[at] = values
            return
        host = self._pinned(len(at), torch.int64)
        host[0].numpy()[:], host[1].numpy()[:] = at, values
        index, value = host.to(self.device, non_blocking=True)
        target.view(-1).index_copy_(0, index, value)

    def _pinned(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((2, num), dtype=dtype, pin_memory=True)

    def _recorded(self) -> Any:
        """An event behind everything that was given to the device so far."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    # -- the check

    def _check(self, view: StepView) -> Proof:
        if view is not self._view or self._rows_changed:
            self._bind(view)
        if self._pages < 0:
            self._pages = sum(len(claim.tags) for claim in self._rows if claim is not None)
            self._passed = Proof(self._known, self._pages)
        rows = len(view.request_ids)
        self.rows_without_claim += rows - self._known
        if not self.on_cpu:
            return self._check_on_device(view, rows)
        if not self._run(rows):
            return self._passed
        return Proof(self._known, self._pages, _mismatches(view.request_ids, self._answer[:, :rows]))

    def _bind(self, view: StepView) -> None:
        """Which row of `expected` each row of the step is compared with; kept until either changes."""
        self._rows = [self._claims.get(request_id) for request_id in view.request_ids]
        slots = [NO_SLOT if claim is None else self._slot_of(claim, view.request_ids) for claim in self._rows]
        self._known, self._pages = len(slots) - slots.count(NO_SLOT), -1
        before, self._view, self._rows_changed = self._view, view, False
        if not self.on_cpu:
            self._slots = self._on_device(slots)
            return
        if before is None or any(getattr(before, name) is not getattr(view, name) for name in _BUFFERS):
            rows = min(len(view.table), len(view.seq_lens), len(view.query_start) - 1)
            self._slots = torch.full((rows,), NO_SLOT, dtype=torch.int32)
            self._answer = torch.full((2, rows), -1, dtype=torch.int32)
            self._run = dispatch.prepare_check(*self._operands(view, rows, self._answer))
        self._slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)

    def _operands(self, view: StepView, rows: int, answer: torch.Tensor) -> _Operands:
        """What `dispatch.check_tags` takes, for the first `rows` rows of the step."""
        table, seq_lens, query_start = view.table[:rows], view.seq_lens[:rows], view.query_start[: rows + 1]
        return (
            self.page_tags, table, seq_lens, self.page_tokens, self.expected, self._slots, query_start,
            view.slot_mapping, answer,
        )  # fmt: skip

    def _check_on_device(self, view: StepView, rows: int) -> Proof:
        answer = torch.empty((2, rows), dtype=torch.int32, device=self.device)
        dispatch.check_tags(*self._operands(view, rows, answer))
        landed = self._pinned(rows, torch.int32)
        landed.copy_(answer, non_blocking=True)
        return _DeviceProof(self._known, self._pages, tuple(view.request_ids), landed, self._recorded())

    def _on_device(self, slots: list[int]) -> torch.Tensor:
        host = self._pinned(len(slots), torch.int32)
        host[0].numpy()[:] = slots
        return host[0].to(self.device, non_blocking=True)


def _mismatches(request_ids: Sequence[str], answer: torch.Tensor) -> list[Mismatch]:
    """From the kernel's answer, in host memory."""
    firsts = answer[0].numpy()
    if firsts.max(initial=-1) < 0:
        return []
    rows = np.flatnonzero(firsts >= 0).tolist()
    return [Mismatch(request_ids[row], int(answer[0, row]), int(answer[1, row])) for row in rows]


def self_test(device: torch.device | str = "cpu") -> None:
    """Plants a wrong tag and must see it, through the code that checks every step. Raises `IntegrityError` if not."""
    check = TagCheck(num_pages=16, page_tokens=4, max_rows=4, max_pages=4, device=device)
    pages = {"a": [1, 2], "b": [3, 4, 5], "c": [1, 6]}
    tags = {page: 1000 + page for row in pages.values() for page in row}
    claims = {r: (0, [tags[p] for p in row]) for r, row in pages.items()}

    def run(table: list[list[int]]) -> tuple[set[tuple[str, int]], list[int]]:
        slot_mapping = torch.arange(100, 104, dtype=torch.int64, device=device)
        view = StepView(
            ["a", "b", "c"],
            torch.tensor(table, dtype=torch.int32, device=device),
            torch.tensor([7, 9, 8], dtype=torch.int32, device=device),
            torch.tensor([0, 1, 3, 4], dtype=torch.int32, device=device),
            slot_mapping,
        )
        check.step(None, view)
        proof = check.proof()
        if proof is None or proof.rows != 3:
            raise IntegrityError("self-test: the check gave no proof")
        return {(m.request_id, m.position) for m in proof.mismatches}, slot_mapping.tolist()

    right = [[1, 2, 0], [3, 4, 5], [1, 6, 0]]
    check.step(IntegrityDelta(tags=tags, claims=claims), None)
    if (seen := run(right)) != (set(), [100, 101, 102, 103]):
        raise IntegrityError(f"self-test: a right block table was refused: {seen}")
    for wrong in (4, 6, 15, 99):  # another position's, another request's, a free page, none at all
        if (seen := run([[1, 2, 0], [3, wrong, 5] if wrong != 4 else [3, 5, 4], [1, 6, 0]])) != (
            {("b", 1)},
            [100, -1, -1, 103],
        ):
            raise IntegrityError(f"self-test: page {wrong} in place of page 4 was not caught: {seen}")
    check.step(IntegrityDelta(tags={6: 2000}), None)
    if (seen := run(right)) != ({("c", 1)}, [100, 101, 102, -1]):
        raise IntegrityError(f"self-test: a page in its next life was not caught: {seen}")
