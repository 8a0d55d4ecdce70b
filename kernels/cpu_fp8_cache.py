"""FP8 pages for an attention kernel that reads BF16 only: tokens written as e4m3, pages widened before they are read.

vLLM's CPU attention has FP8 kernels for AVX-512 and AMX. Other x86 CPUs get the same bytes in the same order
(`cpu_vec`) from `write_tokens`, and the BF16 kernel reads what `widen_blocks` makes of the pages of one step.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.cpu_primitives import jit, pointer, truncate_one, widen

_BF16_OF_E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16).numpy()


@jit("void(uint64,uint64,int64[::1],int64[::1],uint64,int64,int64,int64,float32,float32)")
def _write(key, value, strides, slots, cache, heads, tokens, dim, k_inverse, v_inverse):  # type: ignore[no-untyped-def]
    """strides: of key and value, a token and a head each, in elements."""
    half = tokens * dim
    for row in range(slots.size):
        slot = slots[row]
        if slot < 0:
            continue
        block, at = slot // tokens, slot % tokens
        for head in range(heads):
            target = numba.carray(pointer(cache + np.uint64((block * heads + head) * 2 * half)), (2 * half,), np.uint8)
            start = np.uint64(2 * (row * strides[0] + head * strides[1]))
            k = numba.carray(pointer(key + start), (dim,), np.uint16)
            start = np.uint64(2 * (row * strides[2] + head * strides[3]))
            v = numba.carray(pointer(value + start), (dim,), np.uint16)
            for i in range(dim):
                target[i * tokens + at] = truncate_one(widen(k[i]) * k_inverse)
                target[half + at * dim + i] = truncate_one(widen(v[i]) * v_inverse)


@jit("int64(uint64,int64,int64,int32[:,::1],int32[::1],int64,int16[::1],uint64,int32[:,::1])")
def _widen(cache, blocks, size, table, lengths, tokens, values, out, out_table):  # type: ignore[no-untyped-def]
    made = 0
    for row in range(lengths.size):
        for i in range((lengths[row] + tokens - 1) // tokens):
            block = np.int64(table[row, i])
            if not 0 <= block < blocks:
                return -1
            source = numba.carray(pointer(cache + np.uint64(block * size)), (size,), np.uint8)
            target = numba.carray(pointer(out + np.uint64(2 * made * size)), (size,), np.int16)
            for j in range(size):
                target[j] = values[source[j]]
            out_table[row, i] = made
            made += 1
    return made


def write_tokens(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, k_scale: float, v_scale: float) -> None:
    """Tokens into their slots, truncated as vLLM's CPU writer does (`Rounding.TRUNCATE`).

    key, value: bfloat16 [T, H, D], D contiguous; cache: uint8 [blocks, H, page_tokens, 2 * D], contiguous, in the order
    `cpu_vec`; slots: int64 [T or fewer], block * page_tokens + place, negative: not kept. k_scale, v_scale: what a
    stored value is multiplied with to give the real one. Raises `ValueError` for other dtypes and strides.
    """
    heads, dim = key.shape[1:]
    if key.dtype != torch.bfloat16 or value.dtype != torch.bfloat16:
        raise ValueError(f"FP8 pages on this CPU need a bfloat16 model, not {key.dtype}; set dtype: bfloat16")
    if key.stride(2) != 1 or value.stride(2) != 1 or not cache.is_contiguous():
        raise ValueError(
            f"strides {key.stride()}, {value.stride()}, {cache.stride()}: rows and cache must be contiguous"
        )
    if slots.numel() and int(slots.max()) >= cache.shape[0] * cache.shape[2]:
        raise ValueError(f"slot {int(slots.max())} is outside of a cache of {cache.shape[0]} blocks")
    strides = np.array([*key.stride()[:2], *value.stride()[:2]])
    inverse = [np.float32(1) / np.float32(scale) for scale in (k_scale, v_scale)]
    places = slots.to(torch.int64).contiguous().numpy()[: key.shape[0]]
    _write(
        np.uint64(key.data_ptr()), np.uint64(value.data_ptr()), strides, places, np.uint64(cache.data_ptr()), heads,
        cache.shape[2], dim, *inverse
    )  # fmt: skip


_scratch = torch.empty(0, dtype=torch.bfloat16)


def widen_blocks(cache: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The pages that a step reads as BF16, and a block table over them.

    cache: uint8 [blocks, H, page_tokens, 2 * D], contiguous; table: int32 [R, columns]; lengths: int32 [R], tokens.
    Returns bfloat16 [n, H, page_tokens, 2 * D], stored values without scale (valid until the next call in this
    process), and int32 [R, columns]. Raises `ValueError` for a table that names a block outside of the cache.
    """
    global _scratch
    tokens, size = cache.shape[2], cache[0].numel()
    n = int(((lengths + tokens - 1) // tokens).sum())
    if _scratch.numel() < n * size:
        _scratch = torch.empty(n * size, dtype=torch.bfloat16)
    pages, new_table = _scratch[: n * size].view(n, *cache.shape[1:]), torch.zeros_like(table)
    made = _widen(
        np.uint64(cache.data_ptr()), cache.shape[0], size, table.contiguous().numpy(), lengths.contiguous().numpy(),
        tokens, _BF16_OF_E4M3, np.uint64(pages.data_ptr()), new_table.numpy()
    )  # fmt: skip
    if made != n:
        raise ValueError(f"the block table names a block outside of a cache of {cache.shape[0]} blocks")
    return pages, new_table
