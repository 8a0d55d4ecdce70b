"""The operators, defined in plain torch: what every faster kernel must equal, byte for byte.

Page by page and layer by layer, no cleverness; runs on any device. Arguments are checked by `kernels.dispatch`.
Shapes: n wire pages; caches are one tensor a layer, shaped as `PageLayout.cache_shape` says; digests and seeds are
int64 holding unsigned 64-bit numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.arguments import PageSeeds
from kernels.digest import BLOCK_WORDS, GOLDEN, NH_KEYS, blocks_per_layer, to_signed
from kernels.layout import (
    DS_MLA_LATENT,
    DS_MLA_ROW_BYTES,
    DS_MLA_TILE,
    E4M3_MAX,
    PageDtype,
    PageLayout,
    PageOrder,
    Rounding,
)
from kernels.torch_mix import mix

_F32_448 = 0x43E00000
_F32_2_M6 = 0x3C800000
_F32_2_P14 = 0x46800000
_F32_INF = 0x7F800000
_F32_TINY = 2.0**-126


def encode_e4m3(values: Tensor, scale: float | Tensor, rounding: Rounding) -> Tensor:
    """Floating values (any shape) -> e4m3 bytes (uint8), by the rule of `kernels.layout.Rounding`.

    `scale` is a float32 number, or a float32 tensor that broadcasts to `values`. Integer arithmetic on the float32
    bits, because casts to float8 differ between libraries in saturation and NaN.
    """
    x = values.to(torch.float32)
    # A tensor on the same device: torch turns a division by a Python number into a multiplication on CUDA.
    s = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(
        scale.shape if isinstance(scale, Tensor) else (1,)
    )
    if rounding is Rounding.NEAREST_EVEN:
        y = x / s
        bits = y.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        clamped = magnitude.clamp(max=_F32_448)
        normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - 960
        # Adding 2^14, whose last bit is worth 2^-9, rounds an e4m3 subnormal to nearest even.
        subnormal = (clamped.view(torch.float32) + 2.0**14).view(torch.int32) - _F32_2_P14
        code = torch.where(clamped < _F32_2_M6, subnormal, normal) | ((bits >> 24) & 0x80)
        return torch.where(magnitude > _F32_INF, 0x7F, code).to(torch.uint8)
    y = x * (torch.ones_like(s) / s)
    bits = y.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    clamped = magnitude.clamp(max=_F32_448)
    normal = (clamped >> 20) - 960
    # Adding 2^-6, whose last bit is worth 2^-29, is the writer's rounding to a float32 subnormal; then the cut.
    subnormal = ((clamped.view(torch.float32) + 2.0**-6).view(torch.int32) - _F32_2_M6) >> 20
    code = torch.where(clamped < _F32_2_M6, subnormal, normal) | ((bits >> 24) & 0x80)
    code = torch.where(magnitude == 0, 0, code)
    return torch.where(magnitude > _F32_INF, 0x7E, code).to(torch.uint8)


def encode_ds_mla(rows: Tensor) -> Tensor:
    """BF16 latent rows [..., 576] -> `fp8_ds_mla` rows, uint8 [..., 656].

    As vLLM's `concat_and_cache_ds_mla`: a tile of 128 values has the scale max(max|x| / 448, 2^-126), NaN left out of
    the maximum; its bytes are x / scale, nearest even. The last 64 values stay BF16.
    """
    latent = rows[..., :DS_MLA_LATENT].to(torch.float32).reshape(*rows.shape[:-1], -1, DS_MLA_TILE)
    largest = latent.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
    scale = (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(_F32_TINY)
    codes = encode_e4m3(latent, scale, Rounding.NEAREST_EVEN).flatten(-2)
    rope = rows[..., DS_MLA_LATENT:].contiguous().view(torch.uint8)
    return torch.cat((codes, scale.squeeze(-1).contiguous().view(torch.uint8), rope), dim=-1)


@lru_cache(maxsize=64)
def element_offsets(layout: PageLayout) -> Tensor:
    """Where each logical element of one layer's page lies: int64 [page_tokens, H, 2, D], in elements from its start.

    This is the definition of the K|V orders (the axis of length 2 is K, V).
    """
    n, h, d = layout.page_tokens, layout.num_kv_heads, layout.head_dim
    index = torch.arange(n * h * 2 * d)
    if layout.order is PageOrder.KV_PACKED:
        return index.view(h, n, 2, d).permute(1, 0, 2, 3)
    half = index.view(h, 2, n * d)
    if layout.order is PageOrder.CPU_VEC:
        k = half[:, 0].view(h, d, n).permute(2, 0, 1)
        v = half[:, 1].view(h, n, d).permute(1, 0, 2)
    elif layout.order is PageOrder.CPU_AMX:
        k = half[:, 0].view(h, n // 16, d // 2, 16, 2).permute(1, 3, 0, 2, 4).reshape(n, h, d)
        v = half[:, 1].view(h, d // 16, n // 2, 16, 2).permute(2, 4, 0, 1, 3).reshape(n, h, d)
    else:
        raise AssertionError(f"order {layout.order} has no K|V elements")
    return torch.stack((k, v), dim=2)


def seal_pages(
    caches: Sequence[Tensor],
    src: PageLayout,
    wire: PageLayout,
    block_ids: Tensor,
    out: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    """Gather, convert, lay out, digest. Returns int64 [n]. Tokens past the last source block become zero bytes."""
    size = wire.layer_page_bytes
    ids = block_ids.tolist()
    for page in range(out.shape[0]):
        runs = list(_runs(page, wire.page_tokens, src.page_tokens, len(ids)))
        for layer, cache in enumerate(caches):
            target = out[page, layer * size : (layer + 1) * size]
            target.zero_()
            for here, count, index, there in runs:
                rows = _read_rows(cache[ids[index]], src, there, count)
                _write_rows(target, wire, here, _convert(rows, src, wire, layer))
    return page_digests(out, wire, seeds)


def open_pages(
    wire_pages: Tensor,
    wire: PageLayout,
    digests: Tensor,
    caches: Sequence[Tensor],
    dst: PageLayout,
    block_ids: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    """Write the pages whose digest is right, and only those. Returns bool [n]."""
    good = page_digests(wire_pages, wire, seeds) == digests
    write_pages(wire_pages, wire, good, caches, dst, block_ids)
    return good


def write_pages(
    wire_pages: Tensor, wire: PageLayout, good: Tensor, caches: Sequence[Tensor], dst: PageLayout, block_ids: Tensor
) -> None:
    """Write the pages that `good` (bool [n]) names."""
    size = wire.layer_page_bytes
    ids = block_ids.tolist()
    for page in good.nonzero().flatten().tolist():
        for here, count, index, there in _runs(page, wire.page_tokens, dst.page_tokens, len(ids)):
            for layer, cache in enumerate(caches):
                source = wire_pages[page, layer * size : (layer + 1) * size]
                rows = _read_rows(source, wire, here, count)
                _write_rows(cache[ids[index]], dst, there, rows)


def page_digests(wire_pages: Tensor, wire: PageLayout, seeds: PageSeeds) -> Tensor:
    """int64 [n], as `kernels.digest` defines them. wire_pages: uint8 [n, page_bytes]."""
    n = wire_pages.shape[0]
    blocks = blocks_per_layer(wire)
    keys = torch.tensor(NH_KEYS, dtype=torch.int64, device=wire_pages.device)
    position = torch.arange(1, wire.num_layers * blocks + 1, dtype=torch.int64, device=wire_pages.device)
    out = torch.empty(n, dtype=torch.int64, device=wire_pages.device)
    salts = seeds.tensor().to(wire_pages.device)
    for page in range(n):
        words = wire_pages[page].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        pairs = words.view(wire.num_layers, -1, 2)
        sums = []
        for shift in (0, 2):
            total = torch.zeros(wire.num_layers, blocks, dtype=torch.int64, device=words.device)
            for block in range(blocks):
                part = pairs[:, block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
                key = keys[shift : shift + 2 * part.shape[1]].view(-1, 2)
                total[:, block] = ((part + key) & 0xFFFFFFFF).prod(-1).sum(-1)
            sums.append(total.flatten())
        seed = salts[page]
        inner = mix(sums[0] + seed + position * to_signed(GOLDEN))
        out[page] = mix(seed ^ mix(sums[1] ^ inner).sum())
    return out


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
    columns = min(table.shape[1], expected.shape[1])
    column = torch.arange(columns, device=table.device)
    num_pages = (seq_lens.to(torch.int64) + (page_tokens - 1)) // page_tokens
    used = column < num_pages[:, None]
    pages = table[:, :columns]
    inside = (pages >= 0) & (pages < page_tags.shape[0])
    known = (slots >= 0) & (slots < expected.shape[0])
    wanted = expected[torch.where(known, slots, 0).to(torch.int64), :columns]
    found = page_tags[torch.where(inside, pages, 0).to(torch.int64)]
    wrong = used & (~known[:, None] | ~inside | (found != wanted))
    bad = wrong.any(dim=1)
    first = torch.where(wrong, column, columns - 1).amin(dim=1)
    page = pages.gather(1, first[:, None])[:, 0]
    answer[0], answer[1] = torch.where(bad, first, -1), torch.where(bad, page, -1)
    table.masked_fill_(bad[:, None], 0)
    for row in bad.nonzero().flatten().tolist():
        slot_mapping[int(query_start[row]) : int(query_start[row + 1])] = -1


def _runs(page: int, wire_tokens: int, cache_tokens: int, num_blocks: int) -> Iterator[tuple[int, int, int, int]]:
    """The token runs of a wire page: (token in the wire page, count, index into block_ids, token in that block)."""
    token, end = page * wire_tokens, min((page + 1) * wire_tokens, num_blocks * cache_tokens)
    while token < end:
        index, there = divmod(token, cache_tokens)
        count = min(cache_tokens - there, end - token)
        yield token - page * wire_tokens, count, index, there
        token += count


def _flat(page: Tensor, layout: PageLayout) -> Tensor:
    """A contiguous page as its elements' bit patterns: int16 for BF16, uint8 else. Shares memory."""
    return page.reshape(-1).view(torch.int16 if layout.dtype is PageDtype.BF16 else torch.uint8)


def _read_rows(page: Tensor, layout: PageLayout, token: int, count: int) -> Tensor:
    """Bit patterns of `count` tokens: [count, heads, 2, D], or [count, row] for the latent orders."""
    if layout.order.is_latent:
        return _flat(page, layout).view(layout.page_tokens, -1)[token : token + count]
    if page.dim() > 1 and layout.order is PageOrder.KV_PACKED:  # a cache page, which may have any strides
        rows = page[:, token : token + count].view(page.shape[0], count, 2, layout.head_dim).permute(1, 0, 2, 3)
        return rows.contiguous().view(torch.int16 if layout.dtype is PageDtype.BF16 else torch.uint8)
    offsets = element_offsets(layout)[token : token + count].to(page.device)
    return _flat(page, layout)[offsets]


def _write_rows(page: Tensor, layout: PageLayout, token: int, rows: Tensor) -> None:
    count = rows.shape[0]
    if layout.order.is_latent:
        _flat(page, layout).view(layout.page_tokens, -1)[token : token + count] = rows
        return
    if page.dim() > 1 and layout.order is PageOrder.KV_PACKED:
        target = page[:, token : token + count].view(rows.shape[1], count, 2, layout.head_dim).permute(1, 0, 2, 3)
        target.copy_(rows.view(page.dtype))
        return
    offsets = element_offsets(layout)[token : token + count].to(page.device)
    _flat(page, layout)[offsets] = rows


def _convert(rows: Tensor, src: PageLayout, wire: PageLayout, layer: int) -> Tensor:
    """Bit patterns of the source format -> bit patterns of the wire format, same logical shape."""
    if src.dtype is wire.dtype:
        return rows
    values = rows.view(torch.bfloat16)
    if wire.order is PageOrder.FP8_DS_MLA:
        out = encode_ds_mla(values)
        assert out.shape[-1] == DS_MLA_ROW_BYTES
        return out
    if wire.order.is_latent:
        return encode_e4m3(values, wire.k_scale(layer), wire.rounding)
    heads = range(wire.num_kv_heads)
    scales = [[wire.k_scale(layer, head), wire.v_scale(layer, head)] for head in heads]
    by_head = torch.tensor(scales, dtype=torch.float32, device=rows.device)
    return encode_e4m3(values, by_head[:, :, None], wire.rounding)
