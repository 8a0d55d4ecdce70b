"""The compiled loops of the CPU backend. Addresses are plain numbers; `kernels.cpu_numba` checks and prepares them."""

from __future__ import annotations

import numba
import numpy as np

from kernels.cpu_primitives import (
    copy_bytes,
    encode_nearest,
    encode_nearest_shift,
    encode_truncate,
    encode_truncate_shift,
    inline,
    jit,
    layer_digest,
    mix,
    nearest_one,
    pointer,
    truncate_one,
    widen,
)
from kernels.digest import BLOCK_BYTES

COPY, SHIFT, TRUNCATE, NEAREST, NEAREST_SHIFT = range(5)
"""How a value becomes bytes: as it is, or one of the encoders."""


@inline
def _convert(address, target, count, kind, scale, shift):  # type: ignore[no-untyped-def]
    src = numba.carray(pointer(address), (count,), np.uint16)
    dst = numba.carray(pointer(target), (count,), np.uint8)
    if kind == SHIFT:
        encode_truncate_shift(src, dst, shift[0], shift[1], shift[2], shift[3])
    elif kind == TRUNCATE:
        encode_truncate(src, dst, scale)
    elif kind == NEAREST_SHIFT:
        encode_nearest_shift(src, dst, shift[0], shift[1], shift[2], shift[3])
    else:
        encode_nearest(src, dst, scale)


@jit(
    "void(uint64[::1],int64[::1],int64[::1],uint64,int64,int64,int64,int64,boolean,uint64[::1],uint64[:,::1],"
    "int64[:,::1],float32[:,::1],uint16[:,:,::1],uint64[::1])"
)
def seal_straight(  # type: ignore[no-untyped-def]
    caches,
    strides,
    ids,
    out,
    out_stride,
    layer_bytes,
    segments,
    segment,
    stream,
    seeds,
    keys,
    kind,
    scale,
    shift,
    digests,
):
    """Wire page p is block ids[p]. A layer is `segments` runs of `segment` values, K and V in turn."""
    blocks = (layer_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES
    # One layer's bytes are made here, in the cache, digested, and streamed out.
    room = np.empty(layer_bytes // 8 + 8, dtype=np.uint64)
    base = np.uint64(room.ctypes.data)
    base += (np.uint64(64) - (base & np.uint64(63))) & np.uint64(63)
    for page in range(ids.size):
        total = np.uint64(0)
        for layer in range(caches.size):
            address = caches[layer] + np.uint64(ids[page] * strides[layer])
            made = address
            if kind[layer, 0] != COPY:
                made = base
                alike = kind[layer, 0] == kind[layer, 1] and scale[layer, 0] == scale[layer, 1]
                runs, run = (1, segments * segment) if alike else (segments, segment)
                for i in range(runs):
                    at = np.uint64(i * run)
                    kv = i & 1
                    _convert(address + at + at, base + at, run, kind[layer, kv], scale[layer, kv], shift[layer, kv])
            total += layer_digest(made, layer_bytes, keys, layer * blocks + 1, seeds[page])
            # Next is the next layer of this page, or the first layer of the next one.
            after = page * caches.size + layer + 1
            if after < ids.size * caches.size:
                block, following = ids[after // caches.size], after % caches.size
                address = caches[following] + np.uint64(block * strides[following])
            step = 64 if kind[layer, 0] == COPY else 128
            target = out + np.uint64(page * out_stride + layer * layer_bytes)
            copy_bytes(made, target, layer_bytes, stream, address, step)
        digests[page] = mix(seeds[page] ^ total)


@inline
def _page_digest(address, num_layers, layer_bytes, keys, seed):  # type: ignore[no-untyped-def]
    blocks = (layer_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES
    total = np.uint64(0)
    for layer in range(num_layers):
        place = address + np.uint64(layer * layer_bytes)
        total += layer_digest(place, layer_bytes, keys, layer * blocks + 1, seed)
    return mix(seed ^ total)


@jit("void(uint64,int64,int64,int64,uint64[::1],uint64[:,::1],uint64[::1])")
def digest_pages(pages, stride, num_layers, layer_bytes, seeds, keys, digests):  # type: ignore[no-untyped-def]
    for page in range(digests.size):
        address = pages + np.uint64(page * stride)
        digests[page] = _page_digest(address, num_layers, layer_bytes, keys, seeds[page])


@jit(
    "void(uint64,int64,int64,boolean,uint64[::1],uint64[::1],uint64[:,::1],uint64[::1],int64[::1],int64[::1],"
    "boolean[::1])"
)
def open_straight(  # type: ignore[no-untyped-def]
    pages, stride, layer_bytes, stream, digests, seeds, keys, caches, strides, ids, good
):
    for page in range(ids.size):
        address = pages + np.uint64(page * stride)
        good[page] = _page_digest(address, caches.size, layer_bytes, keys, seeds[page]) == digests[page]
        if good[page]:
            for layer in range(caches.size):
                target = caches[layer] + np.uint64(ids[page] * strides[layer])
                source = address + np.uint64(layer * layer_bytes)
                copy_bytes(source, target, layer_bytes, stream, source, 0)


@jit(
    "void(uint64[::1],int64[::1],int64[::1],int64,int64[:,::1],uint64,int64,int64,int64[:,::1],int64,"
    "uint64[::1],uint64[:,::1],int64[:,::1],float32[:,::1],int64,uint64[::1])"
)
def seal_mapped(  # type: ignore[no-untyped-def]
    caches, strides, ids, src_bytes, src_at, out, out_stride, layer_bytes, wire_at, run, seeds, keys, kind, scale,
    src_block, digests
):  # fmt: skip
    """src_at, wire_at: int64 [page_tokens, R], where a token's R values are; `run` of them are K, then V, in turn."""
    src_tokens, wire_tokens, row = src_at.shape[0], wire_at.shape[0], src_at.shape[1]
    wire_bytes = 1 if src_bytes == 1 or kind[0, 0] != COPY else 2
    for page in range(digests.size):
        for layer in range(caches.size):
            target = out + np.uint64(page * out_stride + layer * layer_bytes)
            if (page + 1) * wire_tokens > ids.size * src_tokens:
                tail = numba.carray(pointer(target), (layer_bytes,), np.uint8)
                tail[:] = np.uint8(0)
            bytes_out = numba.carray(pointer(target), (layer_bytes // wire_bytes,), np.uint8)
            words_out = numba.carray(pointer(target), (layer_bytes // wire_bytes,), np.uint16)
            for token in range(wire_tokens):
                at = page * wire_tokens + token
                if at >= ids.size * src_tokens:
                    break
                address = caches[layer] + np.uint64(ids[at // src_tokens] * strides[layer])
                bytes_in = numba.carray(pointer(address), (src_block,), np.uint8)
                words_in = numba.carray(pointer(address), (src_block,), np.uint16)
                there = at % src_tokens
                for i in range(row):
                    kv = (i // run) & 1
                    way = kind[layer, kv]
                    place = wire_at[token, i]
                    if way == COPY:
                        if src_bytes == 1:
                            bytes_out[place] = bytes_in[src_at[there, i]]
                        else:
                            words_out[place] = words_in[src_at[there, i]]
                    elif way >= NEAREST:
                        bytes_out[place] = nearest_one(widen(words_in[src_at[there, i]]) / scale[layer, kv])
                    else:
                        bytes_out[place] = truncate_one(widen(words_in[src_at[there, i]]) * scale[layer, kv])
        address = out + np.uint64(page * out_stride)
        digests[page] = _page_digest(address, caches.size, layer_bytes, keys, seeds[page])


@jit(
    "void(uint64,int64,int64,int64[:,::1],int64,uint64[::1],uint64[::1],uint64[:,::1],uint64[::1],int64[::1],"
    "int64[::1],int64[:,::1],int64,boolean[::1])"
)
def open_mapped(  # type: ignore[no-untyped-def]
    pages, stride, layer_bytes, wire_at, size, digests, seeds, keys, caches, strides, ids, dst_at, dst_block, good
):
    dst_tokens, wire_tokens, row = dst_at.shape[0], wire_at.shape[0], dst_at.shape[1]
    for page in range(good.size):
        address = pages + np.uint64(page * stride)
        good[page] = _page_digest(address, caches.size, layer_bytes, keys, seeds[page]) == digests[page]
        if not good[page]:
            continue
        for layer in range(caches.size):
            source = address + np.uint64(layer * layer_bytes)
            bytes_in = numba.carray(pointer(source), (layer_bytes // size,), np.uint8)
            words_in = numba.carray(pointer(source), (layer_bytes // size,), np.uint16)
            for token in range(wire_tokens):
                at = page * wire_tokens + token
                if at >= ids.size * dst_tokens:
                    break
                target = caches[layer] + np.uint64(ids[at // dst_tokens] * strides[layer])
                bytes_out = numba.carray(pointer(target), (dst_block,), np.uint8)
                words_out = numba.carray(pointer(target), (dst_block,), np.uint16)
                there = at % dst_tokens
                for i in range(row):
                    if size == 1:
                        bytes_out[dst_at[there, i]] = bytes_in[wire_at[token, i]]
                    else:
                        words_out[dst_at[there, i]] = words_in[wire_at[token, i]]


@jit("void(int64[::1],int32[:,::1],int32[::1],int64,int64[:,::1],int32[::1],int32[::1],int64[::1],int32[:,::1])")
def check_tags(  # type: ignore[no-untyped-def]
    tags, table, seq_lens, page_tokens, expected, slots, query_start, slot_mapping, answer
):
    columns = min(table.shape[1], expected.shape[1])
    limit = np.uint64(tags.size)
    for row in range(seq_lens.size):
        n = min(columns, (np.int64(seq_lens[row]) + page_tokens - 1) // page_tokens)
        slot = np.int64(slots[row])
        known = 0 <= slot < expected.shape[0]
        wrong = np.int64(0 if known or n <= 0 else 1)
        pages, wanted = table[row], expected[slot if known else 0]
        for i in range(n):  # no early end: this loop is vector code
            page = np.uint64(np.int64(pages[i]))
            inside = page < limit
            wrong |= (tags[page if inside else np.uint64(0)] ^ wanted[i]) | (0 if inside else 1)
        answer[0, row] = answer[1, row] = -1
        if wrong == 0:
            continue
        for i in range(n):
            page = np.uint64(np.int64(pages[i]))
            if not known or page >= limit or tags[page] != wanted[i]:
                answer[0, row], answer[1, row] = i, pages[i]
                break
        table[row, :] = 0
        slot_mapping[query_start[row] : query_start[row + 1]] = -1
