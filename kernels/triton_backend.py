"""The GPU backend: chooses configurations and launches `kernels.triton_pages` and `kernels.triton_int4`.

With TRITON_INTERPRET=1 in the environment the same code runs on CPU tensors in Triton's interpreter.

Bytes touched, for W wire bytes and S source bytes: seal reads S and writes W once; open reads W, and again out of the
L2 cache (pages go in groups that fit it), and writes W. `fp8_ds_mla` rows straddle digest blocks, so their seal reads
its output once more.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import triton_int4 as weights
from kernels import triton_pages as pages
from kernels.arguments import PageSeeds
from kernels.digest import BLOCK_BYTES, NH_KEYS
from kernels.int4 import PackedInt4, pack_rows_of_nibbles
from kernels.layout import DS_MLA_ROW_BYTES, LayoutError, PageDtype, PageLayout, PageOrder, Rounding

BLOCKS_PER_PROGRAM = 4
SCATTER_VALUES = 4096
TAG_COLUMNS = 2048
PACK_VALUES = 4096
UNPACK_WORDS = 512
OPEN_GROUP_BYTES = 24 << 20
"""Half of the L2 cache of an H100 or H200: what `open_pages` verifies before it scatters it."""

_Places = tuple[Tensor, tuple[int, int, int]]
"""Addresses int64 [layers], strides (block, head, token) in values."""

INTERPRETED = not isinstance(pages.seal, triton.runtime.JITFunction)


def seal_pages(
    caches: Sequence[Tensor],
    src: PageLayout,
    wire: PageLayout,
    block_ids: Tensor,
    out: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    device, n = caches[0].device, out.shape[0]
    _check_orders(src, wire)
    ids, salts, keys = block_ids.to(device), seeds.tensor().to(device), _keys(device)
    addresses, strides = _places(caches)
    sums = torch.zeros(n, dtype=torch.int64, device=device)
    src_tokens, wire_tokens = _tokens(src), _tokens(wire)
    span = _span(wire_tokens, src_tokens)
    fits = (len(ids), caches[0].shape[0])
    if src.dtype is PageDtype.BF16 and wire.order is PageOrder.FP8_DS_MLA:
        tokens = n * wire.page_tokens
        pages.seal_ds_mla[(tokens, wire.num_layers)](
            addresses, ids, out, strides[0], strides[2], *fits, out.stride(0),
            src.page_tokens, wire.page_tokens, _native(device), enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
        _add_digests(out, wire, sums, salts, keys)
    else:
        how, exact, k_scales, v_scales = _codec(src.dtype, wire, device)
        kind = _type(src)
        pages.seal[_grid(wire, n)](
            addresses, ids, out, sums, k_scales, v_scales, salts, keys, *strides, *fits, out.stride(0),
            wire.num_layers, src_tokens, wire_tokens, _row(wire), wire.order.is_latent, wire.layer_page_bytes,
            kind, how, exact, _native(device), _scale_heads(wire), BLOCKS_PER_PROGRAM,
            enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    pages.finish_seal[(n,)](sums, salts, ids, *fits, src_tokens, wire_tokens, span, num_warps=1)
    return sums


def open_pages(
    wire_pages: Tensor,
    wire: PageLayout,
    digests: Tensor,
    caches: Sequence[Tensor],
    dst: PageLayout,
    block_ids: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    device, n = caches[0].device, wire_pages.shape[0]
    _check_orders(dst, wire)
    wire_pages = wire_pages.to(device, non_blocking=True)  # host staging: read over the bus once, not twice
    ids, salts, keys, wanted = block_ids.to(device), seeds.tensor().to(device), _keys(device), digests.to(device)
    places = _places(caches)
    sums = torch.zeros(n, dtype=torch.int64, device=device)
    good = torch.empty(n, dtype=torch.int8, device=device)
    dst_tokens, wire_tokens = _tokens(dst), _tokens(wire)
    # Groups begin where a wire page and a cache block begin together, so that a group has ids of its own.
    each = max(1, OPEN_GROUP_BYTES // wire.page_bytes)
    if wire_tokens != dst_tokens:
        each = n
    for start in range(0, n, each):
        part = slice(start, min(start + each, n))
        here = wire_pages[part]
        near = ids[part] if wire_tokens == dst_tokens else ids
        _add_digests(here, wire, sums[part], salts[part], keys)
        pages.judge[(here.shape[0],)](
            sums[part], salts[part], wanted[part], good[part], near, len(near), caches[0].shape[0],
            dst_tokens, wire_tokens, _span(wire_tokens, dst_tokens), num_warps=1,
        )  # fmt: skip
        _scatter(here, wire, good[part], places, dst, near)
    return good.to(torch.bool)


def write_pages(
    wire_pages: Tensor, wire: PageLayout, good: Tensor, caches: Sequence[Tensor], dst: PageLayout, block_ids: Tensor
) -> None:
    _check_orders(dst, wire)
    _scatter(wire_pages, wire, good.to(torch.int8), _places(caches), dst, block_ids)


def _scatter(wire_pages: Tensor, wire: PageLayout, good: Tensor, places: _Places, dst: PageLayout, ids: Tensor) -> None:
    addresses, strides = places
    kind = _type(wire)
    runs = -(-wire.layer_page_bytes * 8 // kind.primitive_bitwidth // SCATTER_VALUES)
    pages.scatter[(wire_pages.shape[0] * wire.num_layers * runs,)](
        wire_pages, good, addresses, ids, wire_pages.stride(0), *strides, len(ids),
        wire.num_layers, _tokens(dst), _tokens(wire), _row(wire), wire.order.is_latent,
        wire.layer_page_bytes, kind, SCATTER_VALUES, num_warps=8,
    )  # fmt: skip


def page_digests(wire_pages: Tensor, wire: PageLayout, seeds: PageSeeds) -> Tensor:
    device = wire_pages.device
    sums = torch.zeros(wire_pages.shape[0], dtype=torch.int64, device=device)
    salts = seeds.tensor().to(device)
    _add_digests(wire_pages, wire, sums, salts, _keys(device))
    pages.finish_digest[(wire_pages.shape[0],)](sums, salts, num_warps=1)
    return sums


def check_tags(
    page_tags: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    page_tokens: int,
    expected: Tensor,
    slots: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    answer: Tensor,
) -> None:
    rows, width = table.shape
    pages.check_tags[(rows,)](
        page_tags, table, seq_lens, expected, slots, query_start, slot_mapping, answer[0], answer[1], page_tokens,
        page_tags.shape[0], min(width, expected.shape[1]), width, table.stride(0), expected.stride(0),
        expected.shape[0], TAG_COLUMNS, num_warps=8,
    )  # fmt: skip


def pack_int4(
    weight: Tensor, group_size: int, symmetric: bool, grid: tuple[float, ...], block_scale: Tensor | None
) -> PackedInt4:
    rows, columns = weight.shape
    device = weight.device
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=device)
    scale = torch.empty(rows, columns // group_size, dtype=torch.bfloat16, device=device)
    zeros = torch.empty(scale.shape if not symmetric else (1,), dtype=torch.int8, device=device)
    fp8 = block_scale is not None
    by_block = scale if block_scale is None else block_scale.contiguous()
    groups = scale.numel()
    tile = PACK_VALUES // group_size
    if groups:
        weights.pack[(triton.cdiv(groups, tile),)](
            weight.view(torch.uint8 if fp8 else torch.uint16), by_block, _ratios(grid, device), packed,
            scale.view(torch.uint16), zeros, weight.stride(0), by_block.stride(0), groups, scale.shape[1],
            group_size, symmetric, fp8, len(grid), tile, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return PackedInt4(packed, scale, None if symmetric else pack_rows_of_nibbles(zeros.to(torch.int32)))


def unpack_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> Tensor:
    rows, words = packed.shape
    out = torch.empty(rows, words * 8, dtype=torch.bfloat16, device=packed.device)
    packed, scale = packed.contiguous(), scale.contiguous()
    zero = packed if zero_point is None else zero_point.contiguous()
    if packed.numel():
        weights.unpack[(triton.cdiv(packed.numel(), UNPACK_WORDS),)](
            packed, scale.view(torch.uint16), zero, out.view(torch.uint16), packed.numel(), words,
            group_size, zero_point is None, UNPACK_WORDS, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return out


def _add_digests(wire_pages: Tensor, wire: PageLayout, sums: Tensor, seeds: Tensor, keys: Tensor) -> None:
    pages.digest[_grid(wire, wire_pages.shape[0])](
        wire_pages,
        sums,
        seeds,
        keys,
        wire_pages.stride(0),
        wire.num_layers,
        wire.layer_page_bytes,
        BLOCKS_PER_PROGRAM,
        num_warps=4,
    )


def _grid(wire: PageLayout, n: int) -> tuple[int]:
    """One dimension: the others end at 65,535, less than the pages of a million tokens."""
    groups = -(-wire.layer_page_bytes // (BLOCK_BYTES * BLOCKS_PER_PROGRAM))
    return (n * wire.num_layers * groups,)


def _span(wire_tokens: int, cache_tokens: int) -> int:
    """A power of two that is at least the number of cache blocks a wire page can touch."""
    return int(triton.next_power_of_2(-(-wire_tokens // cache_tokens) + 1))


def _row(wire: PageLayout) -> int:
    """Values of one token (and head) in a row."""
    if wire.order is PageOrder.FP8_DS_MLA:
        return DS_MLA_ROW_BYTES
    if wire.order is PageOrder.BYTES:
        return wire.layer_page_bytes
    return wire.head_dim if wire.order.is_latent else 2 * wire.head_dim


def _tokens(layout: PageLayout) -> int:
    """Rows of a page: a page of bytes is one long row, which is moved in whole words."""
    return 1 if layout.order is PageOrder.BYTES else layout.page_tokens


def _type(layout: PageLayout) -> tl.dtype:
    return tl.uint8 if layout.dtype.num_bytes == 1 else tl.uint16


def _scale_heads(wire: PageLayout) -> int:
    """Heads that have scales of their own in each layer."""
    return wire.num_kv_heads if wire.scales_by_head else 1


def _check_orders(*layouts: PageLayout) -> None:
    for layout in layouts:
        if layout.order in (PageOrder.CPU_VEC, PageOrder.CPU_AMX):
            raise LayoutError(
                f"order {layout.order} is a page of the CPU attention backend; no GPU kernel reads or writes it"
            )


def _places(caches: Sequence[Tensor]) -> _Places:
    """All layers must agree on strides."""
    strides = {cache.stride() for cache in caches}
    if len(strides) != 1:
        raise ValueError(f"caches have different strides: {sorted(strides)}")
    if any(cache.data_ptr() % 16 for cache in caches):
        raise ValueError("caches must begin at multiples of 16 bytes")
    stride = strides.pop()
    head = stride[1] if len(stride) == 4 else 0
    return _addresses(tuple(cache.data_ptr() for cache in caches), caches[0].device), (stride[0], head, stride[-2])


@lru_cache(maxsize=64)
def _addresses(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> Tensor:
    return torch.tensor(NH_KEYS, dtype=torch.int64).to(torch.int32).to(device)


@lru_cache(maxsize=8)
def _native(device: torch.device) -> bool:
    """Has the hardware an e4m3 conversion (sm_89 and later)? The interpreter's is not used."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache(maxsize=64)
def _codec(src_dtype: PageDtype, wire: PageLayout, device: torch.device) -> tuple[int, bool, Tensor, Tensor]:
    """(HOW, EXACT, K scales, V scales float32 [layers x heads with scales], inverted where the kernel multiplies)."""
    each = [(layer, head) for layer in range(wire.num_layers) for head in range(_scale_heads(wire))]
    scales = torch.tensor([[wire.k_scale(*i) for i in each], [wire.v_scale(*i) for i in each]], dtype=torch.float32)
    exact = bool((torch.frexp(scales).mantissa == 0.5).all())
    how = pages.NEAREST.value if wire.rounding is Rounding.NEAREST_EVEN else pages.TRUNCATE.value
    if src_dtype is wire.dtype:
        how = pages.COPY.value
    if exact or how == pages.TRUNCATE.value:
        scales = torch.ones_like(scales) / scales
    k_scales, v_scales = scales.to(device)
    return how, exact, k_scales, v_scales.contiguous()


@lru_cache(maxsize=16)
def _ratios(grid: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(grid, dtype=torch.float32, device=device)
