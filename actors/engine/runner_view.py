"""The only place that knows vLLM's model runners: V1 (`gpu_model_runner`, on CPU) and V2 (`worker.gpu`, on GPUs).

The tag check, fault injection and the seed guard read a runner through a `RunnerView` and nothing of an attention
backend's metadata, which differs from backend to backend (MLA's and FlashInfer's hold no block table). What a step
will read and write is taken from the runner's persistent buffers: those that metadata is made of, in views, and that
CUDA graphs replay on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class RunnerError(RuntimeError):
    """This runner is not one that is known here."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What a step's attention reads and writes: the runner's own buffers, of which the first R rows count.

    Row i is request `request_ids[i]` (R of them). table: int32 [rows, columns]; seq_lens: int32 [rows], tokens after
    this step; query_start: int32 [rows + 1], row i's tokens in slot_mapping, int64 [tokens], the cache slots that are
    written. A step with the requests and buffers of the last one gets the last one's view, the same object.
    """

    request_ids: Sequence[str]
    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    slot_mapping: torch.Tensor


_NO_STEP = StepView((), *[torch.empty(0)] * 4)


def _same_or_new(
    last: StepView,
    request_ids: list[str],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> StepView:
    if (
        last.request_ids == request_ids
        and last.table is table
        and last.seq_lens is seq_lens
        and last.query_start is query_start
        and last.slot_mapping is slot_mapping
    ):
        return last
    return StepView(request_ids, table, seq_lens, query_start, slot_mapping)


class RunnerView(Protocol):
    version: str
    page_tokens: int
    num_pages: int

    def step(self, context: Any, arguments: Mapping[str, Any]) -> StepView | None:
        """The step that `start_load_kv(context, **arguments)` stands before; None: it has no forward."""

    def request_ids(self) -> list[str]:
        """Requests that the runner holds."""

    def pages(self, request_id: str) -> list[int]:
        """The request's block table, used entries only; empty for a request that the runner does not hold."""

    def num_computed(self, request_id: str) -> int:
        """Tokens in the request's pages, those of the last step not always counted."""

    def max_tokens(self, request_id: str) -> int:
        """Prompt tokens and the most that may follow."""

    def set_page(self, request_id: str, position: int, page: int) -> None:
        """Overwrites an entry of the request's block table. Fault injection only."""


def view_of(runner: Any) -> RunnerView:
    """Raises `RunnerError` for a runner of neither version, and for one whose buffers are not as they were read."""
    if hasattr(runner, "req_states") and hasattr(runner, "block_tables"):
        view: RunnerView = V2View(runner)
    elif hasattr(runner, "input_batch") and hasattr(runner, "requests"):
        view = V1View(runner)
    else:
        raise RunnerError(f"{type(runner).__module__}.{type(runner).__name__} is no model runner that is known here")
    return view


class V1View:
    version = "V1"

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.page_tokens = int(self._table.block_size)
        self.num_pages = int(runner.kv_cache_config.num_blocks)
        _demand(runner, seq_lens=runner.seq_lens, query_start=runner.query_start_loc.gpu)
        _demand(runner, table=self._table.block_table.gpu, slot_mapping=self._table.slot_mapping.gpu)
        self._last = _NO_STEP

    @property
    def _table(self) -> Any:
        return self.runner.input_batch.block_table[0]

    def step(self, context: Any, arguments: Mapping[str, Any]) -> StepView | None:
        if isinstance(context.attn_metadata, list):
            raise RunnerError("micro-batches (enable_dbo) split a step; turn enable_dbo off")
        if not context.attn_metadata:
            return None
        runner = self.runner
        batch = runner.input_batch
        table = batch.block_table[0]
        self._last = _same_or_new(
            self._last,
            batch.req_ids[: batch.num_reqs],
            table.block_table.gpu,
            runner.seq_lens,
            runner.query_start_loc.gpu,
            table.slot_mapping.gpu,
        )
        return self._last

    def request_ids(self) -> list[str]:
        batch = self.runner.input_batch
        return list(batch.req_ids[: batch.num_reqs])

    def pages(self, request_id: str) -> list[int]:
        if request_id not in self.runner.input_batch.req_id_to_index:
            return []
        return [int(page) for page in self.runner.requests[request_id].block_ids[0]]

    def num_computed(self, request_id: str) -> int:
        return int(self.runner.requests[request_id].num_computed_tokens)

    def max_tokens(self, request_id: str) -> int:
        state = self.runner.requests[request_id]
        return len(state.prompt_token_ids) + int(state.sampling_params.max_tokens)

    def set_page(self, request_id: str, position: int, page: int) -> None:
        row = self.runner.input_batch.req_id_to_index[request_id]
        self._table.block_table.np[row, position] = page

    # -- for the seed guard, which V2 does not need: its sampler has no generator objects

    def take_discarded_generators(self) -> list[str]:
        """Takes the generators of rows whose sample is thrown away out of the batch; whose they are."""
        batch, thrown_away = self.runner.input_batch, self.runner.discard_request_mask.np
        rows = [row for row in batch.generators if thrown_away[row]]
        for row in rows:
            del batch.generators[row]
        return [batch.req_ids[row] for row in rows]

    def put_generator_back(self, request_id: str) -> None:
        row = self.runner.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            self.runner.input_batch.generators[row] = self.runner.requests[request_id].generator


class V2View:
    version = "V2"

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        tables = runner.block_tables
        self.page_tokens = int(tables.block_sizes[0])
        self.num_pages = int(runner.kv_cache_config.num_blocks)
        buffers = runner.input_buffers
        _demand(runner, seq_lens=buffers.seq_lens, query_start=buffers.query_start_loc)
        self._mappings, self._mapping = tables.slot_mappings, tables.slot_mappings[0]
        _demand(runner, table=tables.input_block_tables[0], slot_mapping=self._mapping)
        self._last = _NO_STEP

    def step(self, context: Any, arguments: Mapping[str, Any]) -> StepView | None:
        request_ids = arguments.get("request_ids")
        if not request_ids:
            return None
        tables, buffers = self.runner.block_tables, self.runner.input_buffers
        if tables.slot_mappings is not self._mappings:
            self._mappings, self._mapping = tables.slot_mappings, tables.slot_mappings[0]
        self._last = _same_or_new(
            self._last,
            list(request_ids),
            tables.input_block_tables[0],
            buffers.seq_lens,
            buffers.query_start_loc,
            self._mapping,
        )
        return self._last

    def _slot(self, request_id: str) -> int | None:
        slot: int | None = self.runner.req_states.req_id_to_index.get(request_id)
        return slot

    def request_ids(self) -> list[str]:
        return list(self.runner.req_states.req_id_to_index)

    def pages(self, request_id: str) -> list[int]:
        slot, tables = self._slot(request_id), self.runner.block_tables
        if slot is None:
            return []
        used = int(tables.num_blocks.np[0, slot])
        return [int(page) for page in tables.block_tables[0].gpu[slot, :used].tolist()]

    def num_computed(self, request_id: str) -> int:
        return int(self.runner.req_states.num_computed_tokens_np[self._slot(request_id)])

    def max_tokens(self, request_id: str) -> int:
        return int(self.runner.req_states.max_seq_len[self._slot(request_id)])

    def set_page(self, request_id: str, position: int, page: int) -> None:
        self.runner.block_tables.block_tables[0].gpu[self._slot(request_id), position] = page


_DTYPES = {"table": torch.int32, "seq_lens": torch.int32, "query_start": torch.int32, "slot_mapping": torch.int64}


def _demand(runner: Any, **buffers: Any) -> None:
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor) or buffer.dtype is not _DTYPES[name] or not buffer.is_contiguous():
            raise RunnerError(f"{type(runner).__name__}: its {name} is no contiguous {_DTYPES[name]} tensor")
