# mypy: ignore-errors
"""Triton kernels of INT4 packing. `kernels.int4` is the definition; every float32 operation here is one of its steps
(launched with `enable_fp_fusion=False`), the choice between ratios is made on whole numbers, so the bits are the same.
"""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 to nearest even


@triton.jit
def to_bf16_bits(x):
    """float32 -> BF16 bits (uint32), nearest even. Infinity stays; the NaN that arithmetic gives stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def e4m3_to_float(code):
    """e4m3 code (uint8) -> float32, exact; 0x7F and 0xFF are NaN."""
    wide = code.to(tl.uint32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def pack(
    weight, block_scale, ratios, packed, scale, zeros, weight_stride, scale_stride, num_groups, groups_per_row,
    G: tl.constexpr, SYMMETRIC: tl.constexpr, FP8: tl.constexpr, NUM_RATIOS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (groups / TILE). A program quantises TILE groups of G values; groups are counted row by row.

    weight: BF16 bits as uint16, or e4m3 codes as uint8; packed: int32 [N, K/8]; scale: uint16 [N, K/G] (BF16 bits);
    zeros: int8 [N, K/G], not written if SYMMETRIC.
    """
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    ok = group < num_groups
    row = group // groups_per_row
    column = (group % groups_per_row) * G
    word = tl.arange(0, G // 8)
    nibble = tl.arange(0, 8)
    within = word[None, :, None] * 8 + nibble[None, None, :]
    place = (row * weight_stride + column)[:, None, None] + within
    mask = ok[:, None, None] & (within < G)
    if FP8:
        w = e4m3_to_float(tl.load(weight + place, mask=mask, other=0))
        by_block = tl.load(block_scale + (row // 128) * scale_stride + column // 128, mask=ok, other=1.0)
        w = w * by_block[:, None, None]
    else:
        w = (tl.load(weight + place, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    magnitude = tl.max(tl.max(w.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)
    largest = magnitude.to(tl.float32, bitcast=True)
    low = tl.min(tl.min(w, axis=2), axis=1)
    high = tl.max(tl.max(w, axis=2), axis=1)
    low = tl.where(low < 0.0, low, 0.0)
    high = tl.where(high > 0.0, high, 0.0)

    best_cost = tl.full((TILE,), float("inf"), tl.float32)
    best_scale = tl.zeros((TILE,), tl.uint32)
    best_zero = tl.zeros((TILE,), tl.float32)
    best_q = tl.zeros((TILE, G // 8, 8), tl.float32)
    for i in tl.static_range(NUM_RATIOS):
        r = tl.load(ratios + i)
        if SYMMETRIC:
            s = tl.div_rn(largest * r, tl.full((TILE,), 7.5, tl.float32))
            lo = low
        else:
            lo = low * r
            s = tl.div_rn(high * r - lo, tl.full((TILE,), 15.0, tl.float32))
            # NaN is lost in min and max; it is not in `magnitude`.
            s = tl.where(magnitude > 0x7F7FFFFF, float("nan"), s)
        s_bits = to_bf16_bits(s)
        s_bits = tl.where(s_bits < 0x0D80, 0x3C00, s_bits)  # below 2^-100: 2^-7
        s = (s_bits << 16).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full((TILE,), 1.0, tl.float32), s)
        if SYMMETRIC:
            z = tl.zeros((TILE,), tl.float32)
        else:
            z = tl.minimum(tl.maximum(-8.0 - lo * inverse, -8.0), 7.0)
            z = (z + _ROUND) - _ROUND
        y = w * inverse[:, None, None]
        # Clamped first: the ends are whole numbers, so rounding afterwards gives the same, and _ROUND needs |y| < 2^22.
        near = tl.minimum(tl.maximum(y, -32.0), 32.0)
        q = tl.minimum(tl.maximum(((near + _ROUND) - _ROUND) + z[:, None, None], -8.0), 7.0)
        error = tl.minimum(tl.maximum(q - z[:, None, None] - y, -11.0), 11.0) * 256.0
        error = ((error + _ROUND) - _ROUND).to(tl.int32)
        total = tl.sum(tl.sum(error * error, axis=2), axis=1)
        cost = (s * s) * total.to(tl.float32)
        better = (cost < best_cost) if i > 0 else (total >= 0)
        best_cost = tl.where(better, cost, best_cost)
        best_scale = tl.where(better, s_bits, best_scale)
        best_zero = tl.where(better, z, best_zero)
        best_q = tl.where(better[:, None, None], q, best_q)

    codes = (best_q.to(tl.int32) + 8) << (4 * nibble)[None, None, :]
    words = tl.sum(codes, axis=2)
    target = (row * groups_per_row * (G // 8))[:, None] + (column // 8)[:, None] + word[None, :]
    tl.store(packed + target, words, mask=ok[:, None] & (word[None, :] < G // 8))
    tl.store(scale + group, best_scale.to(tl.uint16), mask=ok)
    if not SYMMETRIC:
        tl.store(zeros + group, best_zero.to(tl.int8), mask=ok)


@triton.jit
def unpack(
    packed, scale, zero_point, out, num_words, words_per_row,
    G: tl.constexpr, SYMMETRIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (words / BLOCK): int32 words of 8 nibbles -> 8 BF16 values each (as uint16 bits)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = index < num_words
    row = index // words_per_row
    group = (index % words_per_row) // (G // 8)
    groups = words_per_row // (G // 8)
    word = tl.load(packed + index, mask=ok, other=0)
    s = tl.load(scale + row * groups + group, mask=ok, other=0).to(tl.uint32) << 16
    z = tl.zeros((BLOCK,), tl.int32)
    if not SYMMETRIC:
        z = tl.load(zero_point + (row // 8) * groups + group, mask=ok, other=0)
        z = ((z >> (4 * (row % 8)).to(tl.int32)) & 15) - 8
    nibble = tl.arange(0, 8)
    q = ((word[:, None] >> (4 * nibble)[None, :]) & 15) - 8 - z[:, None]
    value = q.to(tl.float32) * s.to(tl.float32, bitcast=True)[:, None]
    tl.store(out + index[:, None] * 8 + nibble[None, :], to_bf16_bits(value).to(tl.uint16), mask=ok[:, None])
