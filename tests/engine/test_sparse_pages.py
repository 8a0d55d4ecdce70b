"""Pages of models with sparse attention (DeepSeek V3.2, GLM 5) through both worker halves and a transfer actor.

vLLM's own specs, grouping and allocation make the caches, in each of its cache layouts, and its own backends name
them; no engine runs such a model on a CPU. Latent rows become decode's format, byte for byte; index keys stay.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import page_oracle as oracle
import pytest
import torch
from llama_config import config_of
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseTRTLLMBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.worker.utils import allocate_kv_cache

from actors.engine import layouts
from actors.engine.connector import _refuse_unchecked
from actors.messages import Role, Verdict
from cluster.spec import PoolSpec
from kernels.layout import PageOrder
from ops.worker_pair import EngineCache, WorkerPair

BLOCK, LAYERS = 64, 4
OWNERS = (0, 2)  # layers with an indexer
INDEX_BYTES = 132


def engine_cache(folder: Path, cache_dtype: str, backend: Any, order: str) -> EngineCache:
    """What vLLM would register: 128 e4m3 values and a float32 scale a token in the indexer's cache."""
    rows = {"fp8_ds_mla": 656}.get(cache_dtype)
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "max_tp_shards": 1}
    specs: dict[str, KVCacheSpec] = {}
    layers: dict[str, Any] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn"
        specs[f"{name}.attn"] = MLAAttentionSpec(
            **sizes, head_size=576, dtype=dtype, cache_dtype_str=cache_dtype, state_content_bytes=rows
        )
        layers[f"{name}.attn"] = SimpleNamespace(
            get_attn_backend=lambda: backend, _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0),
            _k_scale_float=1.0, _v_scale_float=1.0,
        )  # fmt: skip
        if layer in OWNERS:
            specs[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                **sizes, head_size=INDEX_BYTES, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
            )
            layers[f"{name}.indexer.k_cache"] = SimpleNamespace(get_attn_backend=lambda: DeepseekV32IndexerBackend)
    config = config_of(folder, PoolSpec(block_tokens=BLOCK))
    config.cache_config.kv_cache_layout = order
    groups = get_kv_cache_groups(config, specs)
    made = get_kv_cache_config_from_groups(config, groups, 4 << 20)
    _refuse_unchecked(config, made)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(made, torch.device("cpu"), layout, [BLOCK])
    return EngineCache(caches, layers, cache_dtype)


def bits(cache: torch.Tensor) -> Any:
    cache = cache.squeeze(1).contiguous()
    return (
        (cache.view(torch.int16) if cache.dtype is torch.bfloat16 else cache)
        .numpy()
        .view(np.uint16 if cache.dtype is torch.bfloat16 else np.uint8)
    )


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize(
    ("cache_dtype", "backend"),
    [("fp8_ds_mla", FlashMLASparseBackend), ("fp8", FlashInferMLASparseTRTLLMBackend), ("auto", FlashMLASparseBackend)],
    ids=["H200", "B200", "BF16"],
)
async def test_latent_rows_are_converted_and_index_keys_moved(
    tmp_path: Path, cache_dtype: str, backend: Any, order: str
) -> None:
    prefill = engine_cache(tmp_path, "auto", FlashMLASparseBackend, order)
    decode = engine_cache(tmp_path, cache_dtype, backend, order)
    noise = torch.Generator().manual_seed(5)
    for cache in prefill.caches.values():
        if cache.dtype is torch.bfloat16:
            cache.copy_(torch.randn(cache.shape, generator=noise) * 3)
        else:
            cache.copy_(torch.randint(0, 256, cache.shape, generator=noise))
    source_ids, target_ids = [4, 1, 3], [0, 5, 2]
    async with WorkerPair(prefill, decode) as pair:
        src, wire = pair.prefill.layout, pair.decode.layout
        assert src is not None and wire is not None
        assert [region.num_layers for region in wire.regions] == [LAYERS, len(OWNERS)]
        assert wire.order is (PageOrder.FP8_DS_MLA if cache_dtype == "fp8_ds_mla" else PageOrder.MLA)
        sealed = await pair.seal(7, 2 * BLOCK + 9, source_ids, chunk_pages=2)
        assert await pair.open(sealed, target_ids) == {Verdict.OK: 3}
    held = [bits(cache) for cache in layouts.in_order(prefill.caches, prefill.layers).values()]
    expected = oracle.seal(held, src, wire, source_ids, 3)
    after = [bits(cache) for cache in layouts.in_order(decode.caches, decode.layers).values()]
    np.testing.assert_array_equal(oracle.seal(after, wire, wire, target_ids, 3), expected)
    keys = [name for name in prefill.caches if name.endswith("k_cache")]
    assert len(keys) == len(OWNERS)
    for name in keys:
        assert torch.equal(decode.caches[name][target_ids], prefill.caches[name][source_ids])
    untouched = [i for i in range(len(next(iter(decode.caches.values())))) if i not in target_ids]
    assert not any(cache[untouched].any() for cache in decode.caches.values())


async def test_a_changed_index_key_stops_the_whole_page(tmp_path: Path) -> None:
    prefill = engine_cache(tmp_path, "auto", FlashMLASparseBackend, "LBHNC")
    decode = engine_cache(tmp_path, "fp8_ds_mla", FlashMLASparseBackend, "LBHNC")
    for cache in prefill.caches.values():
        cache.fill_(3)
    async with WorkerPair(prefill, decode) as pair:
        sealed = await pair.seal(8, 2 * BLOCK, [1, 2], chunk_pages=2)
        layout = pair.decode.layout
        assert layout is not None
        pair.transfer.memory.map[sealed.lease.offset + layout.page_bytes - 1] ^= 0x10
        assert await pair.open(sealed, [1, 2]) == {Verdict.OK: 1, Verdict.MISMATCH: 1}
    assert not any(cache[1].any() for cache in pair.caches[Role.DECODE].caches.values())
    assert all(cache[2].any() for cache in pair.caches[Role.DECODE].caches.values())
