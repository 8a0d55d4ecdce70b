"""For the same K and V, the pages decode holds after a hand-over are those its own cache writer would have written.

1. Every length round the page size, scales other than 1.0, in several chunks: byte for byte.
2. A page that was changed on the way is not written, and the others are.
3. A proof for another layout opens nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from actors.engine.cpu_fp8 import Fp8Operators, is_needed
from actors.messages import Role, Sealed, Verdict
from ops.worker_pair import EngineCache, WorkerPair

current_platform.import_kernels()
WRITER = Fp8Operators(ops) if is_needed() else ops

LAYERS, HEADS, HEAD_DIM, BLOCK, BLOCKS = 3, 3, 64, 32, 24
POISON = 0xAA


class Backend:
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def attention_layer() -> Any:
    """The attributes of a vLLM attention layer that say how its cache is written."""
    return SimpleNamespace(
        get_attn_backend=lambda: Backend,
        isa="vec",
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


def write(
    cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: str, ks: float, vs: float
) -> None:
    """The cache writer of this machine's decode engine: vLLM's own, and where it has none for FP8, ours."""
    key, value = cache.view(cache.shape[0], HEADS, BLOCK * 2, -1).chunk(2, dim=2)
    WRITER.cpu_attn_reshape_and_cache(k, v, key, value, slots, "vec", k_scale=ks, v_scale=vs, kv_cache_dtype=kv)


def bench_of(scales: tuple[float, float]) -> WorkerPair:
    shape = (BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM)
    names = [f"layer{i}" for i in range(LAYERS)]
    source = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in names}
    target = {name: torch.full(shape, POISON, dtype=torch.uint8) for name in names}
    layers = {name: attention_layer() for name in names}, {name: attention_layer() for name in names}
    return WorkerPair(EngineCache(source, layers[0], "auto"), EngineCache(target, layers[1], "fp8_e4m3", scales))


def held(bench: WorkerPair, role: Role) -> list[torch.Tensor]:
    return list(bench.caches[role].caches.values())


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.013), (3.0, 0.7)])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 63, 64, 65, 200])
async def test_pages_are_what_decode_would_have_written(num_tokens: int, scales: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_pages = -(-num_tokens // BLOCK)
    source_ids = torch.randperm(BLOCKS, generator=generator)[:num_pages].tolist()
    target_ids = torch.randperm(BLOCKS, generator=generator)[:num_pages].tolist()
    expected = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.uint8) for _ in range(LAYERS)]
    async with bench_of(scales) as bench:
        assert bench.decode.layout is not None and bench.decode.layout.k_scales == pytest.approx((scales[0],))
        for layer in range(LAYERS):
            k, v = (torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator) * 4 for _ in range(2))
            k[0, 0, :4] = torch.tensor([1e4, -1e4, 0.0, 2.0**-12])
            k, v = k.bfloat16(), v.bfloat16()
            positions = torch.arange(num_tokens)
            for cache, ids, kv in (
                (held(bench, Role.PREFILL)[layer], source_ids, "auto"),
                (expected[layer], target_ids, "fp8"),
            ):
                slots = torch.tensor(ids)[positions // BLOCK] * BLOCK + positions % BLOCK
                write(cache, k, v, slots, kv, *(scales if kv == "fp8" else (1.0, 1.0)))
        sealed = await bench.seal(7, num_tokens, source_ids, chunk_pages=2)
        assert await bench.open(sealed, target_ids) == {Verdict.OK: num_pages}
        for layer in range(LAYERS):
            assert torch.equal(held(bench, Role.DECODE)[layer][target_ids], expected[layer][target_ids])
            others = [i for i in range(BLOCKS) if i not in target_ids]
            assert (held(bench, Role.DECODE)[layer][others] == POISON).all(), "a page of another request was written"
        assert len(bench.transfer.machine.staging) == 0 and bench.transfer.machine.violations() == []


async def test_a_changed_page_is_not_written() -> None:
    ids = [3, 9, 11, 4]
    async with bench_of((0.5, 0.25)) as bench:
        for layer in range(LAYERS):
            held(bench, Role.PREFILL)[layer].normal_()
        sealed = await bench.seal(8, 4 * BLOCK, ids, chunk_pages=4)
        layout = bench.decode.layout
        assert layout is not None
        bench.transfer.memory.map[sealed.lease.offset + 2 * layout.page_bytes + 77] ^= 0x10
        assert await bench.open(sealed, ids) == {Verdict.OK: 3, Verdict.MISMATCH: 1}
        for layer in range(LAYERS):
            assert (held(bench, Role.DECODE)[layer][ids[2]] == POISON).all()
            assert not (held(bench, Role.DECODE)[layer][ids[1]] == POISON).all()


async def test_a_proof_of_another_layout_opens_nothing() -> None:
    ids = [1, 2]
    async with bench_of((0.5, 0.25)) as bench:
        for layer in range(LAYERS):
            held(bench, Role.PREFILL)[layer].normal_()
        sealed = await bench.seal(9, 2 * BLOCK, ids, chunk_pages=1)
        foreign = Sealed(
            lease=sealed.lease,
            seal=type(sealed.seal)(
                ticket_id=9,
                attempt=1,
                layout_fingerprint="0" * 32,
                num_tokens=sealed.seal.num_tokens,
                digests=sealed.seal.digests,
            ),
        )
        assert await bench.open(foreign, ids) == {Verdict.WRONG_LAYOUT: 2}
        assert all((held(bench, Role.DECODE)[layer] == POISON).all() for layer in range(LAYERS))
