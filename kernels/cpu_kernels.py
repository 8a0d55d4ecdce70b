"""The compiled loops of the CPU backend. Addresses are plain numbers; `kernels.cpu_numba` checks and prepares them."""

from __future__ import annotations

import numba
import numpy as np

from kernels import cpu_lines
from kernels.cpu_lines import COPY, NEAREST, NEAREST_PRODUCT, NEAREST_SHIFT, TRUNCATE, TRUNCATE_SHIFT
from kernels.cpu_primitives import (
    PREFETCH_BYTES,
    block_hash,
    inline,
    jit,
    layer_digest,
    mix,
    nearest_one,
    pointer,
    seed_of,
    truncate_one,
    widen,
)
from kernels.digest import BLOCK_BYTES

__all__ = ["COPY", "NEAREST", "NEAREST_PRODUCT", "NEAREST_SHIFT", "TRUNCATE", "TRUNCATE_SHIFT"]


@inline
def _seal_lines(kind, source, target, keys, lines, ahead, top, floor, scale):  # type: ignore[no-untyped-def]
    """Parts of S1 and S2 of `lines` lines that are written to `target`.

    Numbers only, here and below: a slice of an array is counted with locked instructions, which wait for every
    streamed store.
    """
    if kind == COPY:
        return cpu_lines.copy_lines(source, target, keys, lines, ahead, top, floor, scale)
    if kind == TRUNCATE_SHIFT:
        return cpu_lines.truncate_shift_lines(source, target, keys, lines, ahead, top, floor, scale)
    if kind == NEAREST_SHIFT:
        return cpu_lines.nearest_shift_lines(source, target, keys, lines, ahead, top, floor, scale)
    if kind == TRUNCATE:
        return cpu_lines.truncate_lines(source, target, keys, lines, ahead, top, floor, scale)
    if kind == NEAREST_PRODUCT:
        return cpu_lines.nearest_product_lines(source, target, keys, lines, ahead, top, floor, scale)
    return cpu_lines.nearest_lines(source, target, keys, lines, ahead, top, floor, scale)


@inline
def _seal_blocks(kind, stream, source, target, keys, lines, ahead, at, seed, top, floor, scale):  # type: ignore[no-untyped-def]
    """The sum of the hashes of the blocks that are written to `target`; `at`: position of the first."""
    if kind == COPY:
        if stream:
            return cpu_lines.stream_copy(source, target, keys, lines, ahead, at, seed, top, floor, scale)
        return cpu_lines.copy_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)
    if kind == TRUNCATE_SHIFT:
        if stream:
            return cpu_lines.stream_truncate_shift(source, target, keys, lines, ahead, at, seed, top, floor, scale)
        return cpu_lines.truncate_shift_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)
    if kind == NEAREST_SHIFT:
        if stream:
            return cpu_lines.stream_nearest_shift(source, target, keys, lines, ahead, at, seed, top, floor, scale)
        return cpu_lines.nearest_shift_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)
    if kind == TRUNCATE:
        return cpu_lines.truncate_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)
    if kind == NEAREST_PRODUCT:
        return cpu_lines.nearest_product_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)
    return cpu_lines.nearest_blocks(source, target, keys, lines, ahead, at, seed, top, floor, scale)


@inline
def _seal_turns(source, target, keys, layer_bytes, run, at, seed, kinds, tops, floors, scales):  # type: ignore[no-untyped-def]
    """As `_seal_blocks` for a layer whose K and V are converted differently and take turns every `run` values."""
    total = np.uint64(0)
    done = 0
    for block in range((layer_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES):
        end = min(layer_bytes, (block + 1) * BLOCK_BYTES)
        s1, s2 = np.uint64(0), np.uint64(0)
        while done < end:
            kv = (done // run) & 1
            piece = min(end, (done // run + 1) * run) - done
            place = source + np.uint64(2 * done)
            one, two = _seal_lines(
                kinds[kv], place, target + np.uint64(done), keys + np.uint64(done - block * BLOCK_BYTES),
                np.uint64(piece // 64), place + np.uint64(PREFETCH_BYTES), tops[kv], floors[kv], scales[kv]
            )  # fmt: skip
            s1 += one
            s2 += two
            done += piece
        total += block_hash(s1, s2, at + np.uint64(block), seed)
    return total


@jit(
    "void(uint64[::1],int64[::1],int64[::1],uint64,int64,int64,int64,boolean,uint64,int64,uint64[:,::1],"
    "int64[:,::1],float32[:,::1],uint16[:,:,::1],uint64[::1])"
)
def seal_straight(  # type: ignore[no-untyped-def]
    caches, strides, ids, out, out_stride, layer_bytes, run, stream, base, first, keys, kind, scale, shift, digests
):
    """Wire page p is block ids[p], sealed as ordinal first + p. K and V take turns every `run` values; `run` and
    `layer_bytes` are multiples of 64."""
    blocks = (layer_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES
    key = np.uint64(keys.ctypes.data)
    for page in range(ids.size):
        seed = seed_of(base, first + page)
        total = np.uint64(0)
        for layer in range(caches.size):
            source = caches[layer] + np.uint64(ids[page] * strides[layer])
            target = out + np.uint64(page * out_stride + layer * layer_bytes)
            at = np.uint64(layer * blocks + 1)
            kinds = kind[layer, 0], kind[layer, 1]
            tops = np.uint64(shift[layer, 0, 0]), np.uint64(shift[layer, 1, 0])
            floors = np.uint64(shift[layer, 0, 1]), np.uint64(shift[layer, 1, 1])
            scales = scale[layer, 0], scale[layer, 1]
            if run < layer_bytes:
                total += _seal_turns(source, target, key, layer_bytes, run, at, seed, kinds, tops, floors, scales)
                continue
            # Next is the next layer of this page, or the first layer of the next one: brought in during the last lines.
            after = page * caches.size + layer + 1
            following = source
            if after < ids.size * caches.size:
                follower = after % caches.size
                following = caches[follower] + np.uint64(ids[after // caches.size] * strides[follower])
            size = 1 if kinds[0] == COPY else 2
            past = stream and (target & np.uint64(63)) == np.uint64(0)
            rear = min(blocks, PREFETCH_BYTES // size // BLOCK_BYTES)
            head = np.uint64((blocks - rear) * BLOCK_BYTES)
            total += _seal_blocks(
                kinds[0], past, source, target, key, head // np.uint64(64), source + np.uint64(PREFETCH_BYTES), at,
                seed, tops[0], floors[0], scales[0]
            )  # fmt: skip
            total += _seal_blocks(
                kinds[0], past, source + head * np.uint64(size), target + head, key,
                (np.uint64(layer_bytes) - head) // np.uint64(64), following, at + np.uint64(blocks - rear), seed,
                tops[0], floors[0], scales[0]
            )  # fmt: skip
        digests[page] = mix(seed ^ total)
    cpu_lines.fence()


@inline
def _page_digest(address, num_layers, layer_bytes, keys, seed):  # type: ignore[no-untyped-def]
    blocks = (layer_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES
    total = np.uint64(0)
    for layer in range(num_layers):
        place = address + np.uint64(layer * layer_bytes)
        total += layer_digest(place, layer_bytes, keys, layer * blocks + 1, seed)
    return mix(seed ^ total)


@jit("void(uint64,int64,int64,int64,uint64,int64,uint64[:,::1],uint64[::1])")
def digest_pages(pages, stride, num_layers, layer_bytes, base, first, keys, digests):  # type: ignore[no-untyped-def]
    for page in range(digests.size):
        address = pages + np.uint64(page * stride)
        digests[page] = _page_digest(address, num_layers, layer_bytes, keys, seed_of(base, first + page))


@inline
def _copy(source, target, num_bytes, stream):  # type: ignore[no-untyped-def]
    """num_bytes is a multiple of 8; both addresses are multiples of 16."""
    lines = np.uint64(num_bytes // 64)
    if stream and (target & np.uint64(63)) == np.uint64(0):
        cpu_lines.stream_plain(source, target, lines, source + np.uint64(PREFETCH_BYTES))
    else:
        cpu_lines.plain_copy(source, target, lines, source + np.uint64(PREFETCH_BYTES))
    src = numba.carray(pointer(source), (num_bytes // 8,), np.uint64)
    dst = numba.carray(pointer(target), (num_bytes // 8,), np.uint64)
    for i in range(num_bytes // 64 * 8, num_bytes // 8):
        dst[i] = src[i]


@jit(
    "void(uint64,int64,int64,boolean,uint64[::1],uint64,int64,uint64[:,::1],uint64[::1],int64[::1],int64[::1],"
    "boolean[::1])"
)
def open_straight(  # type: ignore[no-untyped-def]
    pages, stride, layer_bytes, stream, digests, base, first, keys, caches, strides, ids, good
):
    for page in range(ids.size):
        address = pages + np.uint64(page * stride)
        good[page] = _page_digest(address, caches.size, layer_bytes, keys, seed_of(base, first + page)) == digests[page]
        if good[page]:
            for layer in range(caches.size):
                target = caches[layer] + np.uint64(ids[page] * strides[layer])
                source = address + np.uint64(layer * layer_bytes)
                _copy(source, target, layer_bytes, stream)
    cpu_lines.fence()


@jit(
    "void(uint64[::1],int64[::1],int64[::1],int64,int64[:,::1],uint64,int64,int64,int64[:,::1],int64,"
    "uint64,int64,uint64[:,::1],int64[:,::1],float32[:,::1],int64,uint64[::1])"
)
def seal_mapped(  # type: ignore[no-untyped-def]
    caches, strides, ids, src_bytes, src_at, out, out_stride, layer_bytes, wire_at, run, base, first, keys, kind, scale,
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
                    elif way == NEAREST:
                        bytes_out[place] = nearest_one(widen(words_in[src_at[there, i]]) / scale[layer, kv])
                    elif way in (NEAREST_SHIFT, NEAREST_PRODUCT):
                        bytes_out[place] = nearest_one(widen(words_in[src_at[there, i]]) * scale[layer, kv])
                    else:
                        bytes_out[place] = truncate_one(widen(words_in[src_at[there, i]]) * scale[layer, kv])
        address = out + np.uint64(page * out_stride)
        digests[page] = _page_digest(address, caches.size, layer_bytes, keys, seed_of(base, first + page))


@jit(
    "void(uint64,int64,int64,int64[:,::1],int64,uint64[::1],uint64,int64,uint64[:,::1],uint64[::1],int64[::1],"
    "int64[::1],int64[:,::1],int64,boolean[::1])"
)
def open_mapped(  # type: ignore[no-untyped-def]
    pages, stride, layer_bytes, wire_at, size, digests, base, first, keys, caches, strides, ids, dst_at, dst_block, good
):
    dst_tokens, wire_tokens, row = dst_at.shape[0], wire_at.shape[0], dst_at.shape[1]
    for page in range(good.size):
        address = pages + np.uint64(page * stride)
        good[page] = _page_digest(address, caches.size, layer_bytes, keys, seed_of(base, first + page)) == digests[page]
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


@jit("int64(int64[::1],int64)")
def check_tags(places, rows):  # type: ignore[no-untyped-def]
    """How many of the first `rows` rows are wrong. `places`: see `cpu_numba.prepare_check`."""
    tags = numba.carray(pointer(np.uint64(places[0])), (places[1],), np.int64)
    columns, width = places[3], places[6]
    limit, used, count = np.uint64(places[1]), min(columns, width), 0
    lengths = numba.carray(pointer(np.uint64(places[4])), (rows,), np.int32)
    slots = numba.carray(pointer(np.uint64(places[8])), (rows,), np.int32)
    starts = numba.carray(pointer(np.uint64(places[9])), (rows + 1,), np.int32)
    firsts = numba.carray(pointer(np.uint64(places[11])), (rows,), np.int32)
    founds = numba.carray(pointer(np.uint64(places[12])), (rows,), np.int32)
    for row in range(rows):
        n = min(used, (np.int64(lengths[row]) + places[13] - 1) // places[13])
        slot = np.int64(slots[row])
        known = 0 <= slot < places[7]
        wrong = np.int64(0 if known or n <= 0 else 1)
        pages = numba.carray(pointer(np.uint64(places[2] + 4 * row * columns)), (columns,), np.int32)
        claim = np.uint64(places[5] + 8 * width * (slot if known else 0))
        wanted = numba.carray(pointer(claim), (width,), np.int64)
        for i in range(n):  # no early end: this loop is vector code
            page = np.uint64(np.int64(pages[i]))
            inside = page < limit
            wrong |= (tags[page if inside else np.uint64(0)] ^ wanted[i]) | (0 if inside else 1)
        firsts[row] = founds[row] = -1
        if wrong == 0:
            continue
        count += 1
        for i in range(n):
            page = np.uint64(np.int64(pages[i]))
            if not known or page >= limit or tags[page] != wanted[i]:
                firsts[row], founds[row] = i, pages[i]
                break
        for i in range(columns):
            pages[i] = 0
        first, last = np.int64(starts[row]), np.int64(starts[row + 1])
        mapping = numba.carray(pointer(np.uint64(places[10])), (last,), np.int64)
        for i in range(first, last):
            mapping[i] = -1
    return count
