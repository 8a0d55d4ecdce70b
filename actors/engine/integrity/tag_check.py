"""The tag check, worker side: before the forward, on the block table that attention is about to read.

Holds two things that came by different roads (`integrity.IntegrityDelta`): `page_tags`, the tag of each page's present
life, and `expected`, what each request must find at each position, one row a request in the order of the batch. One
kernel call compares `page_tags[block_table]` with `expected` for all rows (`kernels.dispatch.check_tags`). A row that
is wrong gets `slot_mapping` -1, so that it writes nothing, and the null page in its table, so that it reads nobody's
page (and no page outside the cache); its request is named in the step's `Proof`.

On CUDA nothing here waits for the device: masks are applied by device operations, the answer is copied into pinned
memory behind the check, and the `Proof` waits for that copy when it leaves the worker, which is when the step's own
results leave. The CUDA road has not run on the machines this was written on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.integrity.tracker import IntegrityDelta, Mismatch, Proof
from kernels import dispatch

logger = logging.getLogger("pageferry.integrity")

NO_TAG = -1  # no page has it: a position without an expectation can never pass


class IntegrityError(RuntimeError):
    """The check does not work here; the replica must not start with `integrity.mode: check`."""


class Check(Protocol):
    enabled: bool

    def step(self, delta: IntegrityDelta | None, forward: Forward | None) -> None: ...

    def proof(self) -> Proof | None: ...

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool: ...


@dataclass(slots=True)
class Forward:
    """What a step's attention will read. `req_ids[i]` is row i; layers that share metadata appear once."""

    req_ids: Sequence[str]
    metadata: list[Any]
    slot_mappings: list[torch.Tensor]
    fallback_table: torch.Tensor | None = None


class NoCheck:
    enabled = False

    def step(self, delta: IntegrityDelta | None, forward: Forward | None) -> None:
        pass

    def proof(self) -> None:
        return None

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool:
        return True


@dataclass(slots=True, eq=False)
class _Expected:
    """One request's expectation, in host memory; grows."""

    tags: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(16, np.int64))
    length: int = 0

    def extend(self, first: int, tags: Sequence[int]) -> None:
        end = first + len(tags)
        if end > len(self.tags):
            grown = np.empty(max(end, 2 * len(self.tags)), np.int64)
            grown[: self.length] = self.tags[: self.length]
            self.tags = grown
        self.tags[first:end] = tags
        self.length = end


class _DeviceProof(Proof):
    """A proof whose answer is still on its way from the device."""

    def __init__(self, rows: int, pages: int, req_ids: Sequence[str], answer: torch.Tensor, done: Any) -> None:
        super().__init__(rows, pages)
        self._req_ids = req_ids
        self._answer = answer  # int32 [2, R] pinned: first wrong position or -1, page found there
        self._done = done

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        self._done.synchronize()
        firsts, pages = self._answer.tolist()
        return tuple(
            Mismatch(request_id, first, page)
            for request_id, first, page in zip(self._req_ids, firsts, pages)
            if first >= 0
        )


class TagCheck:
    """`max_rows` requests a step, `max_pages` positions a request, on `device`."""

    enabled = True

    def __init__(
        self, num_pages: int, page_tokens: int, max_rows: int, max_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.page_tokens = page_tokens
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.page_tags = torch.zeros(num_pages, dtype=torch.int64, device=self.device)
        self.expected = torch.full((max_rows, max_pages), NO_TAG, dtype=torch.int64, device=self.device)
        self.lives = np.zeros(num_pages, np.int64)  # what `page_tags` should hold, in host memory, for `still_current`
        self._claims: dict[str, _Expected] = {}
        self._row_of: list[_Expected | None] = [None] * max_rows
        self._row_length = [0] * max_rows
        self._proof: Proof | None = None
        self._page_tags_np = self.page_tags.numpy() if self.on_cpu else None
        self._expected_np = self.expected.numpy() if self.on_cpu else None
        self.checks = 0
        self.check_ns = 0
        self.rows_without_claim = 0

    # -- what the scheduler side says

    def step(self, delta: IntegrityDelta | None, forward: Forward | None) -> None:
        """Once a step, before its forward; `forward` None: the step has none."""
        started = time.perf_counter_ns()
        if delta:
            self._apply(delta)
        self._proof = None
        if forward is not None and forward.req_ids:
            self._proof = self._check(forward)
            self.checks += 1
            self.check_ns += time.perf_counter_ns() - started

    def proof(self) -> Proof | None:
        proof, self._proof = self._proof, None
        return proof

    def still_current(self, block_ids: Sequence[int], tags: Sequence[int] | None) -> bool:
        """Whether these pages still live the lives that `tags` names; asked by a writer before it writes."""
        return tags is None or [int(self.lives[page]) for page in block_ids] == list(tags)

    def _apply(self, delta: IntegrityDelta) -> None:
        for request_id in delta.gone:
            self._claims.pop(request_id, None)
        for request_id, (first, tags) in delta.claims.items():
            claim = self._claims.get(request_id)
            if claim is None:
                claim = self._claims[request_id] = _Expected()
            claim.extend(first, tags)
        if delta.tags:
            pages = np.fromiter(delta.tags.keys(), np.int64, len(delta.tags))
            values = np.fromiter(delta.tags.values(), np.int64, len(delta.tags))
            self.lives[pages] = values
            self._write_tags(pages, values)

    def _write_tags(self, pages: npt.NDArray[np.int64], tags: npt.NDArray[np.int64]) -> None:
        if self._page_tags_np is not None:
            self._page_tags_np[pages] = tags
        else:
            self._scatter(self.page_tags, [pages], [tags])

    def _scatter(
        self, target: torch.Tensor, at: list[npt.NDArray[np.int64]], values: list[npt.NDArray[np.int64]]
    ) -> None:
        """`target.view(-1)[at] = values` on the device, from pinned memory, without waiting."""
        host = self._pinned(sum(map(len, at)), torch.int64)
        host[0].numpy()[:] = np.concatenate(at)
        host[1].numpy()[:] = np.concatenate(values)
        index, value = host.to(self.device, non_blocking=True)
        target.view(-1).index_copy_(0, index, value)

    # The two places where the device road touches CUDA itself; tests run that road on the CPU without them.

    def _pinned(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((2, num), dtype=dtype, pin_memory=True)

    def _recorded(self) -> Any:
        """An event behind everything that was given to the device so far."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    # -- rows

    def _align(self, req_ids: Sequence[str]) -> tuple[int, int]:
        """Brings `expected` into the order of the batch; returns rows with an expectation and their positions."""
        known = pages = 0
        at: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[np.int64]] = []
        for row, request_id in enumerate(req_ids):
            claim = self._claims.get(request_id)
            length = 0 if claim is None else claim.length
            had = self._row_length[row]
            if self._row_of[row] is not claim or had != length:
                start = had if self._row_of[row] is claim and had < length else 0
                tags = np.full(max(length, had) - start, NO_TAG, np.int64)
                if claim is not None:
                    tags[: length - start] = claim.tags[start:length]
                self._row_of[row], self._row_length[row] = claim, length
                if self._expected_np is not None:
                    self._expected_np[row, start : start + len(tags)] = tags
                elif len(tags):
                    at.append(row * self.expected.shape[1] + start + np.arange(len(tags)))
                    values.append(tags)
            known += claim is not None
            pages += length
        if at:
            self._scatter(self.expected, at, values)
        return known, pages

    # -- the check

    def _check(self, forward: Forward) -> Proof:
        req_ids = forward.req_ids
        num_rows = len(req_ids)
        known, pages = self._align(req_ids)
        self.rows_without_claim += num_rows - known
        # (first row, table, first wrong position of each row or -1): one for each table that attention may read.
        parts = [
            (begin, table, self._first_wrong(begin, table, seq_lens, metadata))
            for metadata in forward.metadata
            for begin, table, seq_lens in tables_of(metadata, num_rows, forward.fallback_table)
        ]
        if not parts:
            return Proof(0, 0)
        if self.on_cpu and all(int(first.max()) < 0 for _, _, first in parts):
            return Proof(known, pages)
        answer = self._combine(num_rows, parts)
        self._mask(forward, answer[0] >= 0)
        if self.on_cpu:
            firsts, founds = answer.tolist()
            wrong = [row for row in range(num_rows) if firsts[row] >= 0]
            return Proof(known, pages, [Mismatch(req_ids[row], firsts[row], founds[row]) for row in wrong])
        landed = self._pinned(num_rows, torch.int32)
        landed.copy_(answer, non_blocking=True)
        return _DeviceProof(known, pages, tuple(req_ids), landed, self._recorded())

    def _first_wrong(self, begin: int, table: torch.Tensor, seq_lens: torch.Tensor, metadata: Any) -> torch.Tensor:
        """int32 [rows of this table]: the first used position that points at a wrong page, -1 if none does."""
        longest = getattr(metadata, "max_seq_len", None)
        columns = min(table.shape[1], self.expected.shape[1])
        if isinstance(longest, int) and 0 < longest < columns * self.page_tokens:
            columns = -(-longest // self.page_tokens)
        num_pages = (seq_lens + (self.page_tokens - 1)) // self.page_tokens
        expected = self.expected[begin : begin + table.shape[0], :columns]
        return dispatch.check_tags(self.page_tags, table[:, :columns], num_pages, expected)[1]

    def _combine(self, num_rows: int, parts: list[tuple[int, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """int32 [2, num_rows]: first wrong position of each row or -1, and the page that its table named there."""
        answer = torch.full((2, num_rows), -1, dtype=torch.int32, device=self.device)
        for begin, table, first in parts:
            page = table.gather(1, first.clamp(min=0).to(torch.int64)[:, None])[:, 0]
            here = answer[:, begin : begin + len(first)]
            here.copy_(torch.where(first >= 0, torch.stack((first, page.to(torch.int32))), here))
        return answer

    def _mask(self, forward: Forward, bad: torch.Tensor) -> None:
        """Rows that are bad write nothing and read the null page. Device operations only."""
        num_rows = len(bad)
        padded = torch.cat((bad, bad.new_zeros(1)))
        done: set[int] = set()
        for metadata in forward.metadata:
            for begin, table, _ in tables_of(metadata, num_rows, forward.fallback_table):
                if table.data_ptr() not in done:
                    done.add(table.data_ptr())
                    table.masked_fill_(bad[begin : begin + table.shape[0], None], 0)
        starts = next((s for m in forward.metadata if (s := getattr(m, "query_start_loc", None)) is not None), None)
        if starts is None:
            raise IntegrityError("attention metadata has no query_start_loc: a wrong row cannot be kept from writing")
        ends = starts[1 : num_rows + 1].contiguous()
        mappings = [m.slot_mapping for m in forward.metadata if getattr(m, "slot_mapping", None) is not None]
        for mapping in (*mappings, *forward.slot_mappings):
            if mapping.data_ptr() in done:
                continue
            done.add(mapping.data_ptr())
            token = torch.arange(mapping.shape[0], dtype=ends.dtype, device=mapping.device)
            row = torch.searchsorted(ends, token, right=True)
            mapping.masked_fill_(padded[row], -1)


def tables_of(
    metadata: Any, num_rows: int, fallback: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first row, block table, sequence lengths) of every table that this metadata lets attention read.

    Raises `IntegrityError` for a backend whose metadata holds no table that is known here.
    """
    table = getattr(metadata, "block_table", None)
    seq_lens = getattr(metadata, "seq_lens", None)
    if table is not None and seq_lens is not None:
        rows = min(num_rows, table.shape[0])
        yield 0, table[:rows], seq_lens[:rows]
        return
    if fallback is not None and seq_lens is not None:
        # MLA and FlashInfer split the batch into views and copies of the runner's table; that one is checked.
        yield 0, fallback[:num_rows], seq_lens[:num_rows]
        return
    raise IntegrityError(
        f"attention metadata {type(metadata).__name__} has no block table that can be checked; set integrity.mode: off"
    )


def forward_of(context: Any, runner: Any, extra: dict[str, Any]) -> Forward | None:
    """The step's `Forward` from vLLM's forward context, its model runner (V1) or keyword arguments (V2)."""
    attention = extra.get("attn_metadata") or context.attn_metadata
    if not attention:
        return None
    if isinstance(attention, list):
        raise IntegrityError("micro-batches (dbo) are not checked; set integrity.mode: off or turn dbo off")
    req_ids = extra.get("request_ids")
    fallback = None
    if req_ids is None:
        if runner is None:
            return None
        batch = runner.input_batch
        req_ids = batch.req_ids[: batch.num_reqs]
        fallback = batch.block_table[0].get_device_tensor(len(req_ids))
    unique = {id(m): m for m in attention.values()} if isinstance(attention, dict) else {0: attention}
    mapping = getattr(context, "slot_mapping", None)
    slots = {id(s): s for s in mapping.values()} if isinstance(mapping, dict) else {}
    return Forward(list(req_ids), list(unique.values()), list(slots.values()), fallback)


def self_test(device: torch.device | str = "cpu") -> None:
    """Plants a wrong tag and must see it, through the code that checks every step. Raises `IntegrityError` if not."""
    check = TagCheck(num_pages=16, page_tokens=4, max_rows=4, max_pages=4, device=device)
    pages = {"a": [1, 2], "b": [3, 4, 5], "c": [1, 6]}
    tags = {page: 1000 + page for row in pages.values() for page in row}
    claims = {r: (0, [tags[p] for p in row]) for r, row in pages.items()}

    def run(table: list[list[int]]) -> tuple[set[tuple[str, int]], list[int]]:
        slots = torch.arange(100, 104, dtype=torch.int64, device=device)
        metadata = SimpleNamespace(
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            seq_lens=torch.tensor([7, 9, 8], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, 1, 3, 4], dtype=torch.int32, device=device),
            slot_mapping=slots,
            max_seq_len=9,
        )
        check.step(None, Forward(["a", "b", "c"], [metadata], []))
        proof = check.proof()
        if proof is None or proof.rows != 3:
            raise IntegrityError("self-test: the check gave no proof")
        return {(m.request_id, m.position) for m in proof.mismatches}, slots.tolist()

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
