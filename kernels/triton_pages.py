# mypy: ignore-errors
"""Triton kernels of the page operators. `kernels.triton_backend` launches them.

All arithmetic that decides a bit is integer arithmetic, or single IEEE float32 operations (launched with
`enable_fp_fusion=False`), so the same bits come from a GPU and from Triton's interpreter. The one exception is
`NATIVE`: e4m3 conversion by the hardware's cvt.rn.satfinite, whose definition is `nearest_even` (NaN is 0x7F). What the
interpreter does wrongly is avoided everywhere: its casts to e4m3 (some ties and subnormals), its BF16 -> float32
(subnormals become zero; bits are shifted instead), scalar masks (they do not broadcast; a limit is compared instead).

Shapes: a program works on NB digest blocks of one layer of one wire page, as words [NB, 128] of 8 bytes.
"""

import triton
import triton.language as tl

from kernels.digest import BLOCK_WORDS, GOLDEN, MIX_A, MIX_B

COPY = tl.constexpr(0)
NEAREST = tl.constexpr(1)
TRUNCATE = tl.constexpr(2)
WORDS = tl.constexpr(BLOCK_WORDS)
_GOLDEN = tl.constexpr(GOLDEN)
_MIX_A = tl.constexpr(MIX_A)
_MIX_B = tl.constexpr(MIX_B)

# Triton compiles a kernel again for a number that is 1 or a multiple of 16. These change from call to call, and nothing
# is gained by it.
_COUNTS = ("num_ids", "num_blocks")
_TAG_NUMBERS = (
    "page_tokens", "limit", "columns", "table_columns", "table_stride", "expected_stride", "num_slots"
)  # fmt: skip


@triton.jit
def mix(x):
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * _MIX_A
    x = (x ^ (x >> 27)) * _MIX_B
    return x ^ (x >> 31)


@triton.jit
def e4m3_nearest(y):
    """float32 -> e4m3 code as uint32, `nearest_even`."""
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - 960
    # Adding 2^14, whose last bit is worth 2^-9, rounds an e4m3 subnormal to nearest even.
    subnormal = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def e4m3_truncate(y):
    """float32 (already scaled) -> e4m3 code as uint32, `truncate`."""
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)
    normal = (clamped >> 20) - 960
    subnormal = ((clamped.to(tl.float32, bitcast=True) + 0.015625).to(tl.uint32, bitcast=True) - 0x3C800000) >> 20
    code = tl.where(clamped < 0x3C800000, subnormal, normal)
    return tl.where((magnitude - 1) < 0x7F800000, code | ((bits >> 24) & 0x80), code)


@triton.jit
def encode(x, scale, HOW: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """BF16 bits -> e4m3 code as uint32.

    EXACT: every scale is a power of two, `scale` holds 1 / scale, and the product is the quotient. TRUNCATE always
    multiplies with 1 / scale. Else `scale` is the scale.
    """
    x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if HOW == TRUNCATE:
        return e4m3_truncate(x * scale)
    y = x * scale if EXACT else tl.div_rn(x, scale)
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
    return e4m3_nearest(y)


@triton.jit
def blocks_digest(low, high, live, first_block, layer, seed, keys, BLOCKS: tl.constexpr, NB: tl.constexpr):
    """The sum of the hashes of NB blocks. low, high: uint32 [NB, 128], halves of the words; live: words that exist."""
    word = tl.arange(0, WORDS)
    k0 = tl.load(keys + 2 * word).to(tl.uint32, bitcast=True)[None, :]
    k1 = tl.load(keys + 2 * word + 1).to(tl.uint32, bitcast=True)[None, :]
    k2 = tl.load(keys + 2 * word + 2).to(tl.uint32, bitcast=True)[None, :]
    k3 = tl.load(keys + 2 * word + 3).to(tl.uint32, bitcast=True)[None, :]
    p1 = (low + k0).to(tl.uint64) * (high + k1).to(tl.uint64)
    p2 = (low + k2).to(tl.uint64) * (high + k3).to(tl.uint64)
    s1 = tl.sum(tl.where(live, p1, 0), axis=1)
    s2 = tl.sum(tl.where(live, p2, 0), axis=1)
    block = first_block + tl.arange(0, NB)
    position = (layer * BLOCKS + block + 1).to(tl.uint64) * _GOLDEN
    hashed = mix(s2 ^ mix(s1 + seed + position))
    return tl.sum(tl.where(block < BLOCKS, hashed, 0), axis=0)


@triton.jit
def assemble(parts, PER: tl.constexpr):
    """uint32 [NB, 128, PER] of 8 / PER bytes each -> the two uint32 halves of the words, [NB, 128]."""
    k = tl.arange(0, PER)[None, None, :]
    half: tl.constexpr = PER // 2
    shift = (k % half) * (32 // half)
    low = tl.sum(tl.where(k < half, parts << shift, 0), axis=2)
    high = tl.sum(tl.where(k < half, 0, parts << shift), axis=2)
    return low.to(tl.uint32), high.to(tl.uint32)


@triton.jit(do_not_specialize=_COUNTS)
def seal(
    caches, ids, out, sums, k_scales, v_scales, seeds, keys,
    stride_block, stride_head, stride_token, num_ids, num_blocks, out_stride, num_layers,
    SRC_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, ROW: tl.constexpr, LATENT: tl.constexpr,
    LAYER_BYTES: tl.constexpr, SRC_TYPE: tl.constexpr, HOW: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr,
    HEADS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Grid (pages x layers x groups of NB blocks). caches: int64 [layers] addresses; strides in elements; sums: int64
    [pages], zero; keys: int32; ROW: values of one head and token (K then V), or of a latent row; HEADS: those with
    scales of their own in a layer."""
    PER: tl.constexpr = 4 if (HOW == COPY and SRC_TYPE.primitive_bitwidth == 16) else 8
    BLOCKS: tl.constexpr = (LAYER_BYTES + WORDS * 8 - 1) // (WORDS * 8)
    GROUPS: tl.constexpr = (BLOCKS + NB - 1) // NB
    page = (tl.program_id(0) // (num_layers * GROUPS)).to(tl.int64)
    layer = tl.program_id(0) // GROUPS % num_layers
    first = (tl.program_id(0) % GROUPS) * NB
    word = (first + tl.arange(0, NB))[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    live = word < LAYER_BYTES // 8
    value = word[:, :, None] * PER + tl.arange(0, PER)[None, None, :]
    row = value // ROW
    column = value % ROW
    token = row if LATENT else row % WIRE_TOKENS
    head = 0 if LATENT else row // WIRE_TOKENS
    base = tl.load(caches + layer).to(tl.pointer_type(SRC_TYPE))
    base = tl.multiple_of(base, 16)
    if SRC_TOKENS == WIRE_TOKENS:
        block = tl.load(ids + page).to(tl.int64)
        ok = (word < tl.where((block >= 0) & (block < num_blocks), LAYER_BYTES // 8, 0))[:, :, None]
        at = token
    else:
        token = page * WIRE_TOKENS + token
        at = token % SRC_TOKENS
        ok = live[:, :, None] & (token // SRC_TOKENS < num_ids)
        block = tl.load(ids + token // SRC_TOKENS, mask=ok, other=-1).to(tl.int64)
        ok = ok & (block >= 0) & (block < num_blocks)
    place = block * stride_block + head * stride_head + at * stride_token + column
    x = tl.load(base + place, mask=ok, other=0)
    if HOW == COPY:
        parts = x.to(tl.uint32)
    else:
        if HEADS > 1:
            mine = layer * HEADS + tl.minimum(head, HEADS - 1)
        else:
            mine = layer
        scale = tl.load(k_scales + mine)
        if not LATENT:
            scale = tl.where(column < ROW // 2, scale, tl.load(v_scales + mine))
        parts = encode(x, scale, HOW, EXACT, NATIVE)
        parts = tl.where(ok, parts, 0)
    low, high = assemble(parts, PER)
    words = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    target = out + page * out_stride + layer.to(tl.int64) * LAYER_BYTES
    target = tl.multiple_of(target, 16).to(tl.pointer_type(tl.uint64), bitcast=True)
    tl.store(target + word, words, mask=live)
    seed = tl.load(seeds + page).to(tl.uint64, bitcast=True)
    total = blocks_digest(low, high, live, first, layer, seed, keys, BLOCKS, NB)
    tl.atomic_add(sums + page, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def digest(pages, sums, seeds, keys, stride, num_layers, LAYER_BYTES: tl.constexpr, NB: tl.constexpr):
    """Grid as `seal`: add the block hashes of wire pages to sums."""
    BLOCKS: tl.constexpr = (LAYER_BYTES + WORDS * 8 - 1) // (WORDS * 8)
    GROUPS: tl.constexpr = (BLOCKS + NB - 1) // NB
    page = (tl.program_id(0) // (num_layers * GROUPS)).to(tl.int64)
    layer = tl.program_id(0) // GROUPS % num_layers
    first = (tl.program_id(0) % GROUPS) * NB
    word = (first + tl.arange(0, NB))[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    live = word < LAYER_BYTES // 8
    source = pages + page * stride + layer.to(tl.int64) * LAYER_BYTES
    source = tl.multiple_of(source, 16).to(tl.pointer_type(tl.uint64), bitcast=True)
    words = tl.load(source + word, mask=live, other=0)
    low = (words & 0xFFFFFFFF).to(tl.uint32)
    high = (words >> 32).to(tl.uint32)
    seed = tl.load(seeds + page).to(tl.uint64, bitcast=True)
    total = blocks_digest(low, high, live, first, layer, seed, keys, BLOCKS, NB)
    tl.atomic_add(sums + page, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def ids_fit(ids, page, num_ids, num_blocks, CACHE_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, SPAN: tl.constexpr):
    """Are all block ids that this wire page touches inside the cache? SPAN: a power of two >= how many those can be."""
    index = page * WIRE_TOKENS // CACHE_TOKENS + tl.arange(0, SPAN)
    last = ((page + 1) * WIRE_TOKENS - 1) // CACHE_TOKENS
    used = (index <= last) & (index < num_ids)
    block = tl.load(ids + index, mask=used, other=0)
    return tl.sum(tl.where((block < 0) | (block >= num_blocks), 1, 0), axis=0) == 0


@triton.jit(do_not_specialize=_COUNTS)
def finish_seal(
    sums, seeds, ids, num_ids, num_blocks, CACHE_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, SPAN: tl.constexpr
):
    """Grid (pages). Sums become digests, in place. A page with a block id outside the cache gets the complement of its
    digest: it cannot be opened."""
    page = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + page).to(tl.uint64, bitcast=True)
    value = mix(seed ^ tl.load(sums + page).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    fits = ids_fit(ids, page, num_ids, num_blocks, CACHE_TOKENS, WIRE_TOKENS, SPAN)
    tl.store(sums + page, tl.where(fits, value, value ^ -1))


@triton.jit
def finish_digest(sums, seeds):
    """Grid (pages). Sums become digests, in place."""
    page = tl.program_id(0)
    seed = tl.load(seeds + page).to(tl.uint64, bitcast=True)
    value = mix(seed ^ tl.load(sums + page).to(tl.uint64, bitcast=True))
    tl.store(sums + page, value.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=_COUNTS)
def judge(
    sums, seeds, digests, good, ids, num_ids, num_blocks,
    CACHE_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (pages). good[page] = the digest is the sealed one and every block id is inside the cache."""
    page = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + page).to(tl.uint64, bitcast=True)
    value = mix(seed ^ tl.load(sums + page).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    fits = ids_fit(ids, page, num_ids, num_blocks, CACHE_TOKENS, WIRE_TOKENS, SPAN)
    tl.store(good + page, ((value == tl.load(digests + page)) & fits).to(tl.int8))


@triton.jit(do_not_specialize=_COUNTS[:1])
def scatter(
    pages, good, caches, ids, stride, stride_block, stride_head, stride_token, num_ids, num_layers,
    CACHE_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, ROW: tl.constexpr, LATENT: tl.constexpr,
    LAYER_BYTES: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (pages x layers x runs of BLOCK values): write the pages with good != 0 into their blocks. TYPE: uint8 or
    uint16, the size of a value; BLOCK values a program; strides of the cache in values."""
    VALUES: tl.constexpr = LAYER_BYTES // (TYPE.primitive_bitwidth // 8)
    RUNS: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    page = (tl.program_id(0) // (num_layers * RUNS)).to(tl.int64)
    layer = tl.program_id(0) // RUNS % num_layers
    value = (tl.program_id(0) % RUNS) * BLOCK + tl.arange(0, BLOCK)
    ok = value < tl.where(tl.load(good + page) != 0, VALUES, 0)
    source = pages + page * stride + layer.to(tl.int64) * LAYER_BYTES
    source = tl.multiple_of(source, 16).to(tl.pointer_type(TYPE), bitcast=True)
    x = tl.load(source + value, mask=ok, other=0)
    row = value // ROW
    column = value % ROW
    token = row if LATENT else row % WIRE_TOKENS
    head = 0 if LATENT else row // WIRE_TOKENS
    if CACHE_TOKENS == WIRE_TOKENS:
        block = tl.load(ids + page).to(tl.int64)
        at = token
    else:
        token = page * WIRE_TOKENS + token
        at = token % CACHE_TOKENS
        ok = ok & (token // CACHE_TOKENS < num_ids)
        block = tl.load(ids + token // CACHE_TOKENS, mask=ok, other=0).to(tl.int64)
    base = tl.multiple_of(tl.load(caches + layer).to(tl.pointer_type(TYPE)), 16)
    tl.store(base + block * stride_block + head * stride_head + at * stride_token + column, x, mask=ok)


@triton.jit(do_not_specialize=_COUNTS)
def seal_ds_mla(
    caches, ids, out, stride_block, stride_token, num_ids, num_blocks, out_stride,
    SRC_TOKENS: tl.constexpr, WIRE_TOKENS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Grid (wire tokens, layers): one BF16 latent row of 576 -> one `fp8_ds_mla` row of 656 bytes (digest apart)."""
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    index = token // SRC_TOKENS
    inside = index < num_ids
    block = tl.load(ids + index, mask=inside, other=-1).to(tl.int64)
    # Scalar conditions act through a limit: the interpreter cannot broadcast a scalar mask.
    limit = tl.where(inside & (block >= 0) & (block < num_blocks), 576, 0)
    base = tl.multiple_of(tl.load(caches + layer).to(tl.pointer_type(tl.uint16)), 16)
    source = base + block * stride_block + (token % SRC_TOKENS) * stride_token
    target = out + (token // WIRE_TOKENS) * out_stride
    target += (layer.to(tl.int64) * WIRE_TOKENS + token % WIRE_TOKENS) * 656
    target = tl.multiple_of(target, 16)
    tile = tl.arange(0, 4)
    value = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(source + value, mask=value < limit, other=0).to(tl.uint32) << 16
    bits = x & 0x7FFFFFFF
    # The largest size as an integer, NaN left out: equal on every device.
    largest = tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full((4,), 448.0, tl.float32))
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    y = tl.div_rn(x.to(tl.float32, bitcast=True), tl.broadcast_to(scale[:, None], (4, 128)))
    if NATIVE:
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = e4m3_nearest(y).to(tl.uint8)
    tl.store(target + value, code)
    scales = (target + 512).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales + tile, tl.where(tile < limit, scale, 0.0))
    rope = tl.arange(0, 64)
    last = tl.load(source + 512 + rope, mask=512 + rope < limit, other=0)
    tl.store((target + 528).to(tl.pointer_type(tl.uint16), bitcast=True) + rope, last)


@triton.jit(do_not_specialize=_TAG_NUMBERS)
def check_tags(
    tags, table, seq_lens, expected, slots, query_start, slot_mapping, firsts, founds, page_tokens, limit, columns,
    table_columns, table_stride, expected_stride, num_slots, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). One program a row: no atomics, no second launch, no synchronisation."""
    row = tl.program_id(0).to(tl.int64)
    n = (tl.load(seq_lens + row).to(tl.int64) + page_tokens - 1) // page_tokens
    n = tl.minimum(n, columns)
    slot = tl.load(slots + row).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    claim = expected + tl.where(known, slot, 0) * expected_stride
    mine = table + row * table_stride
    lane = tl.arange(0, BLOCK)
    worst = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for start in range(0, n, BLOCK):
        column = start + lane
        ok = column < n
        page = tl.load(mine + column, mask=ok, other=0).to(tl.int64)
        inside = (page >= 0) & (page < limit)
        found = tl.load(tags + page, mask=ok & inside, other=0)
        wanted = tl.load(claim + column, mask=ok, other=0)
        wrong = ok & ((found != wanted) | (inside == 0) | (known == 0))
        worst = tl.minimum(worst, tl.where(wrong, column.to(tl.int32), 0x7FFFFFFF))
    least = tl.min(worst, axis=0)
    is_bad = least != 0x7FFFFFFF
    # Scalar conditions act through a limit: the interpreter cannot broadcast a scalar mask.
    at = tl.where(is_bad, least, 0)
    there = tl.load(mine + at)
    tl.store(firsts + row, tl.where(is_bad, least, -1))
    tl.store(founds + row, tl.where(is_bad, there, -1))
    for start in range(0, tl.where(is_bad, table_columns, 0), BLOCK):
        column = start + lane
        tl.store(mine + column, tl.zeros((BLOCK,), tl.int32), mask=column < table_columns)
    begin = tl.load(query_start + row).to(tl.int64)
    end = tl.where(is_bad, tl.load(query_start + row + 1).to(tl.int64), begin)
    for start in range(begin, end, BLOCK):
        token = start + lane
        tl.store(slot_mapping + token, tl.full((BLOCK,), -1, tl.int64), mask=token < end)
