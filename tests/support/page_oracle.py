"""The page operators a second time, in numpy and Python numbers, from the documents and not from the reference.

Slow and literal: e4m3 by comparing with the table of its values, the CPU writer by its float32 steps, orders by
one offset formula each, the digest with Python's long integers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding

Array = Any
M64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def e4m3_values() -> Array:
    """The values of the codes 0x00..0x7E, ascending: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    out = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        out.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.array(out)


def widen(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(bits: Array, scale: float | Array, rounding: Rounding) -> Array:
    """BF16 bits (uint16) -> e4m3 codes (uint8)."""
    with np.errstate(all="ignore"):
        if rounding is Rounding.TRUNCATE:
            return _cpu_writer(widen(bits), np.float32(scale))
        return nearest(widen(bits) / np.asarray(scale, dtype=np.float32))


def nearest(y: Array) -> Array:
    table = e4m3_values()
    middles = (table[1:] + table[:-1]) / 2  # exact in float64
    size = np.abs(y.astype(np.float64))
    below = np.searchsorted(middles, size, side="left")
    tie = (below < len(middles)) & (size == middles[np.minimum(below, len(middles) - 1)])
    code = np.where(tie & (below % 2 == 1), below + 1, below)
    code = code | np.where(np.signbit(y), 0x80, 0)
    return np.where(np.isnan(y), 0x7F, code).astype(np.uint8)


def _cpu_writer(x: Array, scale: np.float32) -> Array:
    y = x * (np.float32(1) / scale)
    y = np.where(y < np.float32(448), y, np.float32(448))  # std::min(448, y): NaN gives 448
    y = np.where(np.float32(-448) < y, y, np.float32(-448))
    bits = (y * np.float32(2.0**-120)).astype(np.float32).view(np.uint32)
    sign, payload = (bits >> 24) & 0x80, np.minimum((bits >> 20) & 0x7F, 0x7E)
    return np.where(y == 0, 0, sign | payload).astype(np.uint8)


def ds_mla_row(bits: Array) -> bytes:
    """One BF16 latent row (576 bits patterns) -> 656 bytes."""
    codes, scales = b"", b""
    with np.errstate(all="ignore"):
        for tile in range(4):
            part = bits[tile * 128 : (tile + 1) * 128]
            sizes = np.abs(widen(part))
            largest = np.float32(0)
            for size in sizes:
                if size > largest:
                    largest = size
            scale = np.maximum(largest / np.float32(448), np.float32(2.0**-126))
            codes += encode(part, scale, Rounding.NEAREST_EVEN).tobytes()
            scales += np.float32(scale).tobytes()
    rope: bytes = bits[512:].astype("<u2").tobytes()
    return codes + scales + rope


def offset(layout: PageLayout, n: Any, h: Any, kv: Any, d: Any) -> Any:
    """Place of an element in one layer's page, in elements."""
    tokens, dim = layout.page_tokens, layout.head_dim
    if layout.order is PageOrder.KV_PACKED:
        return ((h * tokens + n) * 2 + kv) * dim + d
    head = h * 2 * tokens * dim
    if layout.order is PageOrder.CPU_VEC:
        k, v = d * tokens + n, tokens * dim + n * dim + d
    else:
        k = (n // 16) * (16 * dim) + (d // 2) * 32 + (n % 16) * 2 + d % 2
        v = tokens * dim + (d // 16) * (16 * tokens) + (n // 2) * 32 + (d % 16) * 2 + n % 2
    return head + np.where(kv == 0, k, v)


def _grid(layout: PageLayout, heads: int) -> tuple[Array, ...]:
    return tuple(np.meshgrid(*map(np.arange, (heads, 2, layout.head_dim)), indexing="ij"))


def read_token(cache: Array, layout: PageLayout, block: int, token: int, heads: int) -> Array:
    """[heads, 2, D] bit patterns (or the latent row) of one token of a logical cache array (bits, `cache_shape`)."""
    if layout.order.is_latent:
        return cache[block, token]
    h, kv, d = _grid(layout, heads)
    if layout.order is PageOrder.KV_PACKED:
        return cache[block, h, token, kv * layout.head_dim + d]
    return cache[block].reshape(-1)[offset(layout, token, h, kv, d)]


def write_token(cache: Array, layout: PageLayout, block: int, token: int, rows: Array) -> None:
    if layout.order.is_latent:
        cache[block, token] = rows
        return
    h, kv, d = _grid(layout, rows.shape[0])
    if layout.order is PageOrder.KV_PACKED:
        cache[block, h, token, kv * layout.head_dim + d] = rows
    else:
        cache[block].reshape(-1)[offset(layout, token, h, kv, d)] = rows


def seal(caches: list[Array], src: PageLayout, wire: PageLayout, ids: list[int], n: int) -> Array:
    """uint8 [n, page_bytes]. caches: bit patterns, uint16 or uint8, the layers of all regions."""
    if wire.further_regions:
        edge = src.num_layers
        first = seal(caches[:edge], without(src), without(wire), ids, n)
        rest = zip(src.further_regions, wire.further_regions, strict=True)
        parts = [first]
        for one, other in rest:
            parts.append(seal(caches[edge : edge + one.num_layers], one, other, ids, n))
            edge += one.num_layers
        return np.concatenate(parts, axis=1)
    kind = np.uint16 if wire.dtype is PageDtype.BF16 else np.uint8
    pages = np.zeros((n, wire.num_layers, wire.layer_page_bytes), dtype=np.uint8)
    for page in range(n):
        for layer, cache in enumerate(caches):
            # A one-block cache in the wire's order, then its bytes.
            block = np.zeros(wire.cache_shape(1), dtype=kind)
            for token in range(wire.page_tokens):
                at = page * wire.page_tokens + token
                if at >= len(ids) * src.page_tokens:
                    break
                rows = read_token(cache, src, ids[at // src.page_tokens], at % src.page_tokens, wire.num_kv_heads)
                write_token(block, wire, 0, token, _convert(rows, src, wire, layer))
            pages[page, layer] = np.frombuffer(block.tobytes(), dtype=np.uint8)
    return pages.reshape(n, -1)


def _convert(rows: Array, src: PageLayout, wire: PageLayout, layer: int) -> Array:
    if src.dtype is wire.dtype:
        return rows
    if wire.order is PageOrder.FP8_DS_MLA:
        return np.frombuffer(ds_mla_row(rows), dtype=np.uint8)
    if wire.order.is_latent:
        return encode(rows, wire.k_scale(layer), wire.rounding)
    out = np.zeros(rows.shape, dtype=np.uint8)
    for head in range(rows.shape[0]):
        out[head, 0] = encode(rows[head, 0], scale_of(wire.k_scales, wire, layer, head), wire.rounding)
        out[head, 1] = encode(rows[head, 1], scale_of(wire.v_scales, wire, layer, head), wire.rounding)
    return out


def scale_of(scales: tuple[float, ...], layout: PageLayout, layer: int, head: int) -> float:
    """One for all, one a layer, or one a layer and head, layers first."""
    per_layer = max(1, len(scales) // layout.num_layers)
    return scales[0] if len(scales) == 1 else scales[layer * per_layer + (head if per_layer > 1 else 0)]


def without(layout: PageLayout) -> PageLayout:
    return replace(layout, further_regions=())


def open_into(
    caches: list[Array],
    dst: PageLayout,
    wire: PageLayout,
    pages: Array,
    ids: list[int],
    good: Array,
) -> None:
    if wire.further_regions:
        layer, byte = 0, 0
        for one, other in zip(
            (without(dst), *dst.further_regions), (without(wire), *wire.further_regions), strict=True
        ):
            size = other.num_layers * other.layer_page_bytes
            mine = caches[layer : layer + one.num_layers]
            open_into(mine, one, other, pages[:, byte : byte + size], ids, good)
            layer, byte = layer + one.num_layers, byte + size
        return
    kind = np.uint16 if wire.dtype is PageDtype.BF16 else np.uint8
    for page in np.flatnonzero(good):
        for layer, cache in enumerate(caches):
            size = wire.layer_page_bytes
            block = pages[page, layer * size : (layer + 1) * size].copy().view(kind).reshape(wire.cache_shape(1))
            for token in range(wire.page_tokens):
                at = page * wire.page_tokens + token
                if at >= len(ids) * dst.page_tokens:
                    break
                rows = read_token(block, wire, 0, token, wire.num_kv_heads)
                write_token(cache, dst, ids[at // dst.page_tokens], at % dst.page_tokens, rows)


def mix(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & M64
    return x ^ x >> 31


def digest(page: bytes, wire: PageLayout, ticket_hash: int, attempt: int, ordinal: int) -> int:
    seed = 0
    for value in (int(wire.fingerprint[:16], 16), ticket_hash, attempt, ordinal):
        seed = mix(((seed ^ value) + GOLDEN) & M64)
    regions = (without(wire), *wire.further_regions)
    total, at = 0, 0
    for region in regions:
        size = region.num_layers * region.layer_page_bytes
        part = region_digest(page[at : at + size], region, seed)
        if len(regions) == 1:
            return part
        total, at = mix(((total ^ part) + GOLDEN) & M64), at + size
    return total


def region_digest(page: bytes, wire: PageLayout, seed: int) -> int:
    keys = []
    for i in range(1, 130):
        word = mix((i * GOLDEN) & M64)
        keys += [word & 0xFFFFFFFF, word >> 32]
    total, position = 0, 0
    for layer in range(wire.num_layers):
        part = page[layer * wire.layer_page_bytes : (layer + 1) * wire.layer_page_bytes]
        for start in range(0, len(part), 1024):
            words = np.frombuffer(part[start : start + 1024], dtype="<u4").tolist()
            sums = []
            for shift in (0, 2):
                value = 0
                for j in range(0, len(words), 2):
                    low = (words[j] + keys[j + shift]) & 0xFFFFFFFF
                    value += low * ((words[j + 1] + keys[j + 1 + shift]) & 0xFFFFFFFF)
                sums.append(value & M64)
            position += 1
            total += mix(sums[1] ^ mix((sums[0] + seed + position * GOLDEN) & M64))
    return mix(seed ^ (total & M64))
