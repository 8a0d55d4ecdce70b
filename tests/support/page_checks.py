"""Sealing and opening of any pair of layouts, by any backend, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import page_oracle as oracle
import torch

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding

BACKENDS = ["reference", "numba"]
KV_ORDERS = [PageOrder.CPU_VEC, PageOrder.CPU_AMX, PageOrder.KV_PACKED]
BINDING = SealBinding(0x1234_5678_9ABC_DEF0, 2)
E4M3 = PageDtype.E4M3


def random_caches(layout: PageLayout, blocks: int, seed: int = 0) -> list[torch.Tensor]:
    """Any bit pattern: NaN, infinities and subnormals come along."""
    if layout.further_regions:
        regions = enumerate(layout.regions)
        return [each for i, region in regions for each in random_caches(region, blocks, seed + 100 * i)]
    rng = np.random.default_rng(seed)
    shape = layout.cache_shape(blocks)
    if layout.dtype is PageDtype.BF16:
        bits = [rng.integers(0, 65536, shape).astype(np.uint16).view(np.int16) for _ in range(layout.num_layers)]
        return [torch.from_numpy(each).view(torch.bfloat16) for each in bits]
    return [torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8)) for _ in range(layout.num_layers)]


def as_bits(cache: torch.Tensor) -> Any:
    cache = cache.contiguous()
    return (
        cache.view(torch.int16).numpy().view(np.uint16)
        if cache.dtype is torch.bfloat16
        else cache.view(torch.uint8).numpy()
    )


def check_round_trip(
    backend: str,
    src: PageLayout,
    wire: PageLayout,
    dst: PageLayout,
    src_ids: list[int],
    n: int,
    dst_ids: list[int],
    blocks: int = 9,
) -> None:
    caches = random_caches(src, blocks)
    kept = [cache.clone() for cache in caches]
    out = torch.full((n, wire.page_bytes), 0xAA, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        digests = dispatch.seal_pages(caches, src, wire, src_ids, out, BINDING, 11)
    expected = oracle.seal([as_bits(cache) for cache in caches], src, wire, src_ids, n)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert dispatch.digests_to_ints(digests) == [
        oracle.digest(expected[i].tobytes(), wire, BINDING.ticket_hash, BINDING.attempt, 11 + i) for i in range(n)
    ]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(caches, kept, strict=True))

    targets = random_caches(dst, blocks, seed=1)
    wanted = [as_bits(target).copy() for target in targets]
    if n > 1:
        out[1, wire.page_bytes - 1] ^= 0x10
    good = np.arange(n) != 1
    oracle.open_into(wanted, dst, wire, out.numpy(), dst_ids, good)
    with dispatch.use_backend(backend):
        verdict = dispatch.open_pages(out, wire, digests, targets, dst, dst_ids, BINDING, 11)
    assert verdict.tolist() == good.tolist()
    for target, want in zip(targets, wanted, strict=True):
        np.testing.assert_array_equal(as_bits(target), want)
