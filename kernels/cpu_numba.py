"""The CPU backend of the page operators: one pass, GIL released, no copy of a page besides the result.

Two forms of seal and open. *Straight*: both sides have the same order, page size and heads, so a layer's page is
converted (or copied) front to back and digested while it is in the cache. *Mapped*: anything else, element by element
through tables of offsets that come from the reference's definition of the orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_kernels, reference
from kernels.cpu_kernels import (
    NEAREST,
    NEAREST_SHIFT,
    SHIFT,
    TRUNCATE,
    digest_pages,
    open_mapped,
    open_straight,
    seal_mapped,
    seal_straight,
)
from kernels.cpu_primitives import expanded_keys
from kernels.layout import DS_MLA_ROW_BYTES, PageDtype, PageLayout, PageOrder, Rounding

STREAM_MIN_BYTES = 16 << 20
"""Calls that write at least this much write past the cache; less is better found there by whoever reads it next."""

_KEYS = expanded_keys()


class _Codec(NamedTuple):
    """How a layer's K and V values become bytes. kind int64 [L, 2]; scale float32 [L, 2]; shift uint16 [L, 2, 4]."""

    kind: np.ndarray
    scale: np.ndarray
    shift: np.ndarray


def seal_pages(
    caches: Sequence[Tensor],
    src: PageLayout,
    wire: PageLayout,
    block_ids: Tensor,
    out: Tensor,
    seeds: Tensor,
) -> Tensor:
    if src.dtype is PageDtype.BF16 and wire.order is PageOrder.FP8_DS_MLA:
        # Rows with their own scales: the reference's vector code is as good as a loop, and no CPU engine has them.
        return reference.seal_pages(caches, src, wire, block_ids, out, seeds)
    codec = _codec(src.dtype, wire)
    ids = block_ids.numpy()
    addresses, strides = _places(caches)
    digests = torch.empty(out.shape[0], dtype=torch.int64)
    to, at = np.uint64(out.data_ptr()), out.stride(0)
    marks, salts = _unsigned(digests), _unsigned(seeds)
    stream = out.numel() >= STREAM_MIN_BYTES
    if _straight(caches[0], src, wire):
        segments, segment = _segments(wire)
        seal_straight(
            addresses, strides, ids, to, at, wire.layer_page_bytes, segments, segment, stream, salts, _KEYS, *codec,
            marks
        )  # fmt: skip
    else:
        src_at = _offsets(src, _page_strides(caches[0], src))
        wire_at = _offsets(wire, None)
        run = wire_at.shape[1] if wire.order.is_latent else wire.head_dim
        seal_mapped(
            addresses, strides, ids, src.dtype.num_bytes, src_at, to, at, wire.layer_page_bytes, wire_at, run, salts,
            _KEYS, codec.kind, codec.scale, int(src_at.max()) + 1, marks
        )  # fmt: skip
    return digests


def open_pages(
    wire_pages: Tensor,
    wire: PageLayout,
    digests: Tensor,
    caches: Sequence[Tensor],
    dst: PageLayout,
    block_ids: Tensor,
    seeds: Tensor,
) -> Tensor:
    ids = block_ids.numpy()
    addresses, strides = _places(caches)
    good = torch.zeros(wire_pages.shape[0], dtype=torch.bool)
    source, stride = np.uint64(wire_pages.data_ptr()), wire_pages.stride(0)
    marks, salts = _unsigned(digests.contiguous()), _unsigned(seeds)
    if _straight(caches[0], dst, wire):
        stream = wire_pages.numel() >= STREAM_MIN_BYTES
        open_straight(
            source, stride, wire.layer_page_bytes, stream, marks, salts, _KEYS, addresses, strides, ids, good.numpy()
        )
    else:
        dst_at = _offsets(dst, _page_strides(caches[0], dst))
        wire_at = _offsets(wire, None)
        open_mapped(
            source, stride, wire.layer_page_bytes, wire_at, wire.dtype.num_bytes, marks, salts, _KEYS,
            addresses, strides, ids, dst_at, int(dst_at.max()) + 1, good.numpy()
        )  # fmt: skip
    return good


def page_digests(wire_pages: Tensor, wire: PageLayout, seeds: Tensor) -> Tensor:
    digests = torch.empty(wire_pages.shape[0], dtype=torch.int64)
    digest_pages(
        np.uint64(wire_pages.data_ptr()),
        wire_pages.stride(0),
        wire.num_layers,
        wire.layer_page_bytes,
        _unsigned(seeds),
        _KEYS,
        _unsigned(digests),
    )
    return digests


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
    tensors = (page_tags, table, seq_lens, expected, slots, query_start, slot_mapping, answer)
    tags, pages, lengths, wanted, places, starts, mapping, out = (tensor.numpy() for tensor in tensors)
    cpu_kernels.check_tags(tags, pages, lengths, page_tokens, wanted, places, starts, mapping, out)


def _unsigned(values: Tensor) -> np.ndarray:
    """An int64 tensor as uint64, sharing memory."""
    return values.numpy().view(np.uint64)


def _places(caches: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses, and bytes from block to block."""
    addresses = np.array([cache.data_ptr() for cache in caches], dtype=np.uint64)
    return addresses, np.array([cache.stride(0) * cache.element_size() for cache in caches], dtype=np.int64)


def _straight(cache: Tensor, layout: PageLayout, wire: PageLayout) -> bool:
    same = (layout.order, layout.page_tokens, layout.num_kv_heads) == (wire.order, wire.page_tokens, wire.num_kv_heads)
    return same and cache[:1].is_contiguous()


def _segments(wire: PageLayout) -> tuple[int, int]:
    """(runs, values a run) of a layer's page, K and V in turn."""
    if wire.order.is_latent:
        return 1, wire.layer_page_bytes // wire.dtype.num_bytes
    if wire.order is PageOrder.KV_PACKED:
        return 2 * wire.num_kv_heads * wire.page_tokens, wire.head_dim
    return 2 * wire.num_kv_heads, wire.page_tokens * wire.head_dim


@lru_cache(maxsize=64)
def _codec(src_dtype: PageDtype, wire: PageLayout) -> _Codec:
    layers = wire.num_layers
    kind = np.zeros((layers, 2), dtype=np.int64)
    scale = np.ones((layers, 2), dtype=np.float32)
    shift = np.zeros((layers, 2, 4), dtype=np.uint16)
    if src_dtype is wire.dtype:
        return _Codec(kind, scale, shift)
    for layer in range(layers):
        for kv, value in enumerate((wire.k_scale(layer), wire.v_scale(layer))):
            nearest = wire.rounding is Rounding.NEAREST_EVEN
            kind[layer, kv] = NEAREST if nearest else TRUNCATE
            scale[layer, kv] = value if nearest else np.float32(1.0) / np.float32(value)
            mantissa, exponent = math.frexp(value)
            power = 1 - exponent
            # Below 2^-16 a BF16 subnormal could underflow to zero and lose its sign; above 2^64 `top` would.
            if mantissa == 0.5 and -16 <= power <= 64:
                kind[layer, kv] = NEAREST_SHIFT if nearest else SHIFT
                shift[layer, kv] = (
                    0x43E0 - 128 * power,
                    0x3C80 - 128 * power,
                    (960 - 8 * power) % 65536,
                    125 - power,
                )
    return _Codec(kind, scale, shift)


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
