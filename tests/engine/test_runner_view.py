"""What `runner_view` reads of vLLM's runners, over vLLM's own batch, table and metadata classes.

1. A step is seen whatever the attention backend: the metadata of MLA holds neither table nor lengths.
2. What the check masks is what attention reads: the view's tensors are the runner's own memory.
3. A step without a forward is None; micro-batches and unknown runners are refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.states import RequestState

from actors.engine.integrity.tag_check import TagCheck
from actors.engine.integrity.tracker import IntegrityDelta
from actors.engine.runner_view import RunnerError, V1View, V2View, view_of

PAGE_TOKENS, NUM_PAGES, ROWS, WIDTH = 16, 32, 4, 8
PAGES = {"a": [3, 5], "b": [7, 8, 9]}
LENGTHS = {"a": 20, "b": 33}


def v1_runner() -> Any:
    tables = MultiGroupBlockTable(
        max_num_reqs=ROWS,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=[PAGE_TOKENS],
        max_num_blocks=[WIDTH],
    )
    for row, pages in enumerate(PAGES.values()):
        tables.add_row((pages,), row)
    for name in ("block_table", "slot_mapping"):  # as vLLM's CPU runner does
        buffer = getattr(tables[0], name)
        buffer.gpu = buffer.cpu
    batch = SimpleNamespace(block_table=tables, req_ids=[*PAGES, "stale"], num_reqs=2, req_id_to_index={"a": 0, "b": 1})
    return SimpleNamespace(
        input_batch=batch,
        requests={
            name: SimpleNamespace(
                block_ids=[pages],
                num_computed_tokens=LENGTHS[name] - 1,
                prompt_token_ids=[1] * 10,
                sampling_params=SimpleNamespace(max_tokens=30),
            )
            for name, pages in PAGES.items()
        },
        kv_cache_config=SimpleNamespace(num_blocks=NUM_PAGES),
        seq_lens=torch.tensor([*LENGTHS.values(), 0, 0], dtype=torch.int32),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 1, 3, 3, 3], dtype=torch.int32)),
    )


def v2_runner() -> Any:
    device = torch.device("cpu")
    states = RequestState(ROWS, WIDTH * PAGE_TOKENS, 64, 0, 100, device)
    tables = BlockTables([PAGE_TOKENS], ROWS, 64, [WIDTH], device)
    buffers = InputBuffers(ROWS, 64, device)
    for row, (name, pages) in enumerate(PAGES.items()):
        states.add_request(name, 10, [1] * 10, LENGTHS[name] - 1, 30)
        slot = states.req_id_to_index[name]
        tables.append_block_ids(slot, (pages,), True)
        tables.block_tables[0].gpu[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        tables.input_block_tables[0][row] = tables.block_tables[0].gpu[slot]  # as the gather kernel leaves it
    buffers.seq_lens[:2] = torch.tensor([*LENGTHS.values()])
    buffers.query_start_loc[:3] = torch.tensor([0, 1, 3])
    tables.slot_mappings[0] = torch.arange(64)
    return SimpleNamespace(
        req_states=states,
        block_tables=tables,
        input_buffers=buffers,
        kv_cache_config=SimpleNamespace(num_blocks=NUM_PAGES),
    )


def mla_metadata() -> MLACommonMetadata[Any]:
    """As a decode step of DeepSeek has it: the tables are inside its parts, views of the runner's."""
    metadata: MLACommonMetadata[Any] = object.__new__(MLACommonMetadata)
    assert not {"block_table", "seq_lens"} & set(MLACommonMetadata.__dataclass_fields__)
    return metadata


def step(runner: Any, view: Any) -> Any:
    if isinstance(view, V1View):
        return view.step(SimpleNamespace(attn_metadata={"layer.0": mla_metadata()}), {})
    return view.step(SimpleNamespace(attn_metadata=None), {"request_ids": list(PAGES)})


@pytest.fixture(autouse=True)
def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's CPU worker does before it makes a V2 runner."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)


@pytest.mark.parametrize("make", [v1_runner, v2_runner])
def test_a_wrong_entry_is_caught_and_masked_in_the_runners_own_buffers(make: Any) -> None:
    runner = make()
    view = view_of(runner)
    assert (view.page_tokens, view.num_pages) == (PAGE_TOKENS, NUM_PAGES)
    assert {name: view.pages(name) for name in PAGES} == PAGES and view.pages("gone") == []
    assert sorted(view.request_ids()) == ["a", "b"]
    assert [view.num_computed(name) for name in PAGES] == [19, 32] and view.max_tokens("a") == 40
    check = TagCheck(NUM_PAGES, PAGE_TOKENS, ROWS, WIDTH)
    tags = {page: 100 + page for pages in PAGES.values() for page in pages}
    claims = {name: (0, [tags[page] for page in pages]) for name, pages in PAGES.items()}
    check.step(IntegrityDelta(tags=tags, claims=claims), step(runner, view))
    proof = check.proof()
    assert proof is not None and proof.rows == 2 and proof.mismatches == ()  # 1
    view.set_page("b", 1, 3)
    if isinstance(view, V2View):
        runner.block_tables.input_block_tables[0][1, 1] = 3  # what the next gather copies
        table, slots = runner.block_tables.input_block_tables[0], runner.block_tables.slot_mappings[0]
    else:
        table = runner.input_batch.block_table[0].block_table.gpu
        slots = runner.input_batch.block_table[0].slot_mapping.gpu
        slots[:] = torch.arange(len(slots))
    check.step(None, step(runner, view))
    proof = check.proof()
    assert proof is not None and [(m.request_id, m.position, m.page) for m in proof.mismatches] == [("b", 1, 3)]
    assert table[1].tolist() == [0] * table.shape[1] and table[0, :2].tolist() == PAGES["a"]  # 2
    assert slots[:4].tolist() == [0, -1, -1, 3]


def test_what_is_no_step_and_what_is_not_known() -> None:
    assert V1View(v1_runner()).step(SimpleNamespace(attn_metadata=None), {}) is None  # 3
    assert V2View(v2_runner()).step(SimpleNamespace(attn_metadata=None), {}) is None
    with pytest.raises(RunnerError, match="micro-batches"):
        V1View(v1_runner()).step(SimpleNamespace(attn_metadata=[{}, {}]), {})
    with pytest.raises(RunnerError, match="no model runner that is known"):
        view_of(SimpleNamespace())
    strange = v2_runner()
    strange.input_buffers.seq_lens = strange.input_buffers.seq_lens.long()
    with pytest.raises(RunnerError, match="seq_lens is no contiguous"):
        view_of(strange)
