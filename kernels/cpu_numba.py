"""The CPU backend of the page operators: one pass, GIL released, no copy of a page besides the result.

Two forms of seal and open. *Straight*: both sides have the same order, page size and heads, so a layer's page is
converted (or copied) and digested front to back, line by line. *Mapped*: anything else, element by element through
tables of offsets that come from the reference's definition of the orders.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_kernels, reference
from kernels.arguments import PageCaches, PageSeeds
from kernels.cpu_kernels import (
    NEAREST,
    NEAREST_PRODUCT,
    NEAREST_SHIFT,
    TRUNCATE,
    TRUNCATE_SHIFT,
    digest_pages,
    open_mapped,
    open_straight,
    seal_mapped,
    seal_straight,
)
from kernels.cpu_lines import FLOOR, TOP
from kernels.cpu_primitives import expanded_keys
from kernels.layout import DS_MLA_ROW_BYTES, PageDtype, PageLayout, PageOrder, Rounding

STREAM_MIN_BYTES = 1 << 20
"""Calls that write at least this much write past the cache; less is better kept there for its next reader. As
much is worth the wake-up of another thread."""

_KEYS = expanded_keys()


class _Codec(NamedTuple):
    """How a layer's K and V values become bytes: kind int64 [L, 2], one of `cpu_lines`; scale float32 [L, 2], what is
    multiplied with (NEAREST: divided by); shift uint16 [L, 2, 2], TOP and FLOOR for the scale."""

    kind: np.ndarray
    scale: np.ndarray
    shift: np.ndarray


def seal_pages(
    caches: Sequence[Tensor],
    src: PageLayout,
    wire: PageLayout,
    block_ids: Tensor,
    out: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    if src.dtype is PageDtype.BF16 and (wire.order is PageOrder.FP8_DS_MLA or wire.scales_by_head):
        # Scales by row or by head: the reference's vector code is as good as a loop, and no CPU engine has them.
        return reference.seal_pages(caches, src, wire, block_ids, out, seeds)
    codec = _codec(src.dtype, wire)
    ids = block_ids.numpy()
    addresses, strides = _places(caches, src)
    digests = torch.empty(out.shape[0], dtype=torch.int64)
    to, at, size = out.data_ptr(), out.stride(0), wire.layer_page_bytes
    marks, base = _unsigned(digests), np.uint64(seeds.base)
    run = _run(wire, codec)
    if run and _straight(caches[0], src, wire):

        def part(first: int, last: int) -> None:
            seal_straight(
                addresses, strides, ids[first:last], np.uint64(to + first * at), at, size, run, _stream(out), base,
                seeds.first + first, _KEYS, *codec, marks[first:last]
            )  # fmt: skip

        _in_threads(part, out)
    else:
        src_at = _offsets(src, _page_strides(caches[0], src))
        wire_at = _offsets(wire, None)
        turn = wire_at.shape[1] if wire.order.is_latent else wire.head_dim
        seal_mapped(
            addresses, strides, ids, src.dtype.num_bytes, src_at, np.uint64(to), at, size, wire_at, turn, base,
            seeds.first, _KEYS, codec.kind, codec.scale, int(src_at.max()) + 1, marks
        )  # fmt: skip
    return digests


def open_pages(
    wire_pages: Tensor,
    wire: PageLayout,
    digests: Tensor,
    caches: Sequence[Tensor],
    dst: PageLayout,
    block_ids: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    ids = block_ids.numpy()
    addresses, strides = _places(caches, dst)
    good = torch.zeros(wire_pages.shape[0], dtype=torch.bool)
    source, stride, size = wire_pages.data_ptr(), wire_pages.stride(0), wire.layer_page_bytes
    marks, base, verdicts = _unsigned(digests.contiguous()), np.uint64(seeds.base), good.numpy()
    if _straight(caches[0], dst, wire):

        def part(first: int, last: int) -> None:
            open_straight(
                np.uint64(source + first * stride), stride, size, _stream(wire_pages), marks[first:last], base,
                seeds.first + first, _KEYS, addresses, strides, ids[first:last], verdicts[first:last]
            )  # fmt: skip

        _in_threads(part, wire_pages)
    else:
        dst_at = _offsets(dst, _page_strides(caches[0], dst))
        wire_at = _offsets(wire, None)
        open_mapped(
            np.uint64(source), stride, size, wire_at, wire.dtype.num_bytes, marks, base, seeds.first, _KEYS,
            addresses, strides, ids, dst_at, int(dst_at.max()) + 1, verdicts
        )  # fmt: skip
    return good


def write_pages(
    wire_pages: Tensor, wire: PageLayout, good: Tensor, caches: Sequence[Tensor], dst: PageLayout, block_ids: Tensor
) -> None:
    if wire != dst:
        reference.write_pages(wire_pages, wire, good, caches, dst, block_ids)
        return
    size, ids, pages = wire.layer_page_bytes, block_ids[good], wire_pages[good]
    for layer, cache in enumerate(caches):
        part = pages[:, layer * size : (layer + 1) * size].contiguous()
        cache[ids] = part.view(cache.dtype).view(len(ids), *cache.shape[1:])


_threads = 1
_helpers: ThreadPoolExecutor | None = None


def set_threads(count: int) -> None:
    """How many threads a call may use, the caller's own among them; 1 at first."""
    global _threads, _helpers
    if not 1 <= count <= (os.cpu_count() or 1):
        raise ValueError(f"threads is {count}, must be from 1 to {os.cpu_count()}, the CPUs of this machine")
    if count == _threads:
        return
    if _helpers is not None:
        _helpers.shutdown(wait=False)
    _threads, _helpers = count, ThreadPoolExecutor(count - 1, "pageferry-kernel") if count > 1 else None


def _in_threads(part: Callable[[int, int], None], pages: Tensor) -> None:
    """`part(first, last)` over all pages, a run of pages a thread."""
    n = pages.shape[0]
    count = max(1, min(_threads, n, pages.numel() // STREAM_MIN_BYTES))
    helpers = _helpers
    if count == 1 or helpers is None:
        part(0, n)
        return
    edges = [n * i // count for i in range(count + 1)]
    waiting = [helpers.submit(part, first, last) for first, last in pairwise(edges[1:])]
    part(0, edges[1])
    for each in waiting:
        each.result()


def _stream(pages: Tensor) -> bool:
    return pages.numel() >= STREAM_MIN_BYTES


def page_digests(wire_pages: Tensor, wire: PageLayout, seeds: PageSeeds) -> Tensor:
    digests = torch.empty(wire_pages.shape[0], dtype=torch.int64)
    digest_pages(
        np.uint64(wire_pages.data_ptr()),
        wire_pages.stride(0),
        wire.num_layers,
        wire.layer_page_bytes,
        np.uint64(seeds.base),
        seeds.first,
        _KEYS,
        _unsigned(digests),
    )
    return digests


def prepare_check(
    page_tags: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    page_tokens: int,
    expected: Tensor,
    slots: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    answer: Tensor,
) -> Callable[[int], int]:
    """Everything but the number of rows is one array, because a step finds code and data of the last one out of the
    cache: what counts is how much of either a call touches."""
    firsts, founds = answer
    kept = (page_tags, table, seq_lens, expected, slots, query_start, slot_mapping, firsts, founds)
    tags, pages, lengths, wanted, places, starts, mapping, one, two = (tensor.data_ptr() for tensor in kept)
    numbers = [tags, len(page_tags), pages, table.shape[1], lengths, wanted, expected.shape[1], len(expected), places]
    packed = np.array([*numbers, starts, mapping, one, two, page_tokens], dtype=np.int64)
    return _PreparedCheck(packed, kept)


class _PreparedCheck:
    def __init__(self, packed: np.ndarray, kept: tuple[Tensor, ...]) -> None:
        self._packed, self._kept = packed, kept  # the tensors live as long as their addresses are used

    def __call__(self, rows: int) -> int:
        return int(cpu_kernels.check_tags(self._packed, rows))


def check_tags(page_tags: Tensor, table: Tensor, *others: Any) -> None:
    prepare_check(page_tags, table, *others)(len(table))


def _unsigned(values: Tensor) -> np.ndarray:
    """An int64 tensor as uint64, sharing memory."""
    return values.numpy().view(np.uint64)


def _places(caches: Sequence[Tensor], layout: PageLayout) -> tuple[np.ndarray, np.ndarray]:
    """Addresses, and bytes from block to block."""
    known = caches if isinstance(caches, PageCaches) else PageCaches(caches, layout)
    return _unsigned(known.addresses), known.block_strides.numpy()


def _straight(cache: Tensor, layout: PageLayout, wire: PageLayout) -> bool:
    same = (layout.order, layout.page_tokens, layout.num_kv_heads) == (wire.order, wire.page_tokens, wire.num_kv_heads)
    return same and cache[:1].is_contiguous()


def _run(wire: PageLayout, codec: _Codec) -> int:
    """After how many values of a layer's page K and V take turns, if whole lines can be passed over; 0: they cannot."""
    size = wire.layer_page_bytes
    alike = (codec.kind[:, 0] == codec.kind[:, 1]).all() and (codec.scale[:, 0] == codec.scale[:, 1]).all()
    if alike or wire.order.is_latent:
        run = size
    else:
        run = wire.head_dim if wire.order is PageOrder.KV_PACKED else wire.page_tokens * wire.head_dim
    return run if size % 64 == 0 and run % 64 == 0 else 0


@lru_cache(maxsize=64)
def _codec(src_dtype: PageDtype, wire: PageLayout) -> _Codec:
    layers = wire.num_layers
    kind = np.zeros((layers, 2), dtype=np.int64)
    scale = np.ones((layers, 2), dtype=np.float32)
    shift = np.full((layers, 2, 2), (TOP, FLOOR), dtype=np.uint16)
    if src_dtype is wire.dtype:
        return _Codec(kind, scale, shift)
    for layer in range(layers):
        for kv, value in enumerate((wire.k_scale(layer), wire.v_scale(layer))):
            way = _way(value, wire.rounding)
            kind[layer, kv] = way
            scale[layer, kv] = value if way == NEAREST else np.float32(1.0) / np.float32(value)
            if way in (TRUNCATE_SHIFT, NEAREST_SHIFT):
                power = 1 - math.frexp(value)[1]
                shift[layer, kv] = TOP - 128 * power, FLOOR - 128 * power
    return _Codec(kind, scale, shift)


@lru_cache(maxsize=1024)
def _way(scale: float, rounding: Rounding) -> int:
    nearest = rounding is Rounding.NEAREST_EVEN
    mantissa, exponent = math.frexp(scale)
    # Below 2^-16 a BF16 subnormal could underflow to zero and lose its sign; above 2^64 a constant would be negative.
    if mantissa == 0.5 and -16 <= 1 - exponent <= 64:
        return NEAREST_SHIFT if nearest else TRUNCATE_SHIFT
    if not nearest:
        return TRUNCATE
    # A product is three times as fast as a quotient, and nearly always the same e4m3 value: tried with all that exist.
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    quotient = reference.encode_e4m3(values, scale, rounding)
    inverse = float(np.float32(1.0) / np.float32(scale))
    product = reference.encode_e4m3(values * inverse, 1.0, rounding)
    return NEAREST_PRODUCT if torch.equal(quotient, product) else NEAREST


def _page_strides(cache: Tensor, layout: PageLayout) -> tuple[int, ...] | None:
    return tuple(cache.stride()[1:]) if layout.order is PageOrder.KV_PACKED else None


@lru_cache(maxsize=64)
def _offsets(layout: PageLayout, strides: tuple[int, ...] | None) -> np.ndarray:
    """int64 [page_tokens, R]: where a token's values lie in a layer's page, in values (bytes for ds_mla rows)."""
    n, d = layout.page_tokens, layout.head_dim
    if layout.order.is_latent:
        row = DS_MLA_ROW_BYTES if layout.order is PageOrder.FP8_DS_MLA else d
        return np.arange(n * row, dtype=np.int64).reshape(n, row)
    if strides is not None:
        heads = np.arange(layout.num_kv_heads) * strides[0]
        tokens = np.arange(n) * strides[1]
        return np.ascontiguousarray(
            (tokens[:, None, None] + heads[None, :, None] + np.arange(2 * d)[None, None, :]).reshape(n, -1)
        )
    table = reference.element_offsets(layout)
    return np.ascontiguousarray(table.reshape(n, -1).numpy())
