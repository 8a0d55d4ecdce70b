"""Converted pages against the bytes that vLLM's own CUDA cache writers write for the same keys and values.

The writers lie in vLLM's extension `_C_stable_libtorch`, which torch can load without vLLM's Python. A dry run has a
writer in plain torch in their place, by their formula and not by `kernels.reference`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import dispatch
from kernels.layout import DS_MLA_LATENT, DS_MLA_ROPE, DS_MLA_TILE, PageDtype, PageLayout, PageOrder, SealBinding
from ops.gpu_check.plan import Options, Row

HEADS, DIM, TOKENS = 2, 64, 16
SCALES = (1.0, 0.05, 0.5, 3.0, 230.0, 2.0**-20)
BINDING = SealBinding(5, 1)
EXTENSION = "_C_stable_libtorch.abi3.so"


class Writer(Protocol):
    """As `torch.ops._C_cache_ops`; `kind`: auto, fp8 or fp8_ds_mla."""

    def reshape_and_cache_flash(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, kind: str, ks: Tensor, vs: Tensor
    ) -> None: ...

    def concat_and_cache_mla(
        self, latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Tensor
    ) -> None: ...


class Formula:
    """vLLM's writers as torch operations: `cvt.rn.satfinite(float32(x) / scale)`, NaN 0x7F."""

    def reshape_and_cache_flash(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, kind: str, ks: Tensor, vs: Tensor
    ) -> None:
        tokens = keys.shape[1]
        for made, cache, scale in ((k, keys, ks), (v, values, vs)):
            cache[slots // tokens, slots % tokens] = made if kind == "auto" else _e4m3(made.float() / scale)

    def concat_and_cache_mla(
        self, latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Tensor
    ) -> None:
        rows = cache.view(-1, cache.shape[-1])
        if kind == "fp8_ds_mla":
            tiles = latent.float().view(len(latent), -1, DS_MLA_TILE)
            largest = tiles.abs().amax(-1, keepdim=True)
            scales = (largest / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
            codes = _e4m3(tiles / scales).view(len(latent), -1)
            rows[slots] = torch.cat([codes, scales.view(len(latent), -1).view(torch.uint8), rope.view(torch.uint8)], 1)
            return
        both = torch.cat([latent, rope], 1)
        rows[slots] = both if kind == "auto" else _e4m3(both.float() / scale)


def _e4m3(values: Tensor) -> Tensor:
    codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


def cuda_writers(path: Path | None) -> Any:
    """vLLM's own, of the file or of the vLLM that is installed. Raises FileNotFoundError where there are none."""
    if path is None:
        found = importlib.util.find_spec("vllm")
        folders = list(found.submodule_search_locations or ()) if found else []
        path = next((file for folder in folders if (file := Path(folder) / EXTENSION).is_file()), None)
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{path or EXTENSION} is not there: install vLLM's CUDA build, or name it by --writers")
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    return torch.ops._C_cache_ops


def every_bf16(device: str) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)


def paged(blocks: int, token_major: bool, dtype: torch.dtype, device: str) -> Tensor:
    """(blocks, heads, tokens, 2 x dim), stored token-major (the GPU default) or head-major."""
    if token_major:
        shape = (blocks, TOKENS, HEADS, 2 * DIM)
        return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)
    return torch.zeros((blocks, HEADS, TOKENS, 2 * DIM), dtype=dtype, device=device)


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as vLLM's FlashAttention backend gives them to the writer: (blocks, tokens, heads, dim)."""
    by_token = cache.transpose(1, 2)
    return by_token[..., :DIM], by_token[..., DIM:]


def moved(caches: list[Tensor], src: PageLayout, wire: PageLayout, target: list[Tensor], n: int) -> bool:
    """Seals pages 0..n-1 and opens them into the same places of `target`; whether all verified."""
    out = torch.empty(n, wire.page_bytes, dtype=torch.uint8, device=caches[0].device)
    digests = dispatch.seal_pages(caches, src, wire, list(range(n)), out, BINDING, 0)
    return bool(dispatch.open_pages(out, wire, digests, target, wire, list(range(n)), BINDING, 0).all())


def differing(got: Tensor, expected: Tensor) -> Row:
    wrong = int((got.view(torch.uint8) != expected.view(torch.uint8)).sum())
    return {"ok": wrong == 0, "bytes": got.numel(), "differ": wrong}


def packed_rows(writer: Writer, options: Options) -> Iterator[Row]:
    """All 65,536 BF16 values as keys, and in reverse as values."""
    device = options.device
    k = every_bf16(device).view(-1, HEADS, DIM)
    v = k.flip(0).contiguous()
    blocks = len(k) // TOKENS
    slots = torch.arange(len(k), device=device)
    one = torch.ones(1, device=device)
    src = PageLayout(1, TOKENS, HEADS, DIM, PageDtype.BF16, PageOrder.KV_PACKED)
    for token_major in (True, False):
        source = paged(blocks, token_major, torch.bfloat16, device)
        keys, values = halves(source)
        writer.reshape_and_cache_flash(k, v, keys, values, slots, "auto", one, one)
        for scale in SCALES[:2] if options.dry else SCALES:
            other = 2 * scale
            ours, theirs = (paged(blocks, token_major, torch.uint8, device) for _ in range(2))
            keys, values = halves(theirs)
            writer.reshape_and_cache_flash(k, v, keys, values, slots, "fp8", one * scale, one * other)
            wire = src.with_dtype(PageDtype.E4M3, k_scales=(scale,), v_scales=(other,))
            verified = moved([source], src, wire, [ours], blocks)
            found = differing(ours.contiguous(), theirs.contiguous())
            yield {
                "writer": "reshape_and_cache_flash",
                "storage": "token-major" if token_major else "head-major",
                "scale": scale,
                **found,
                "ok": found["ok"] and verified,
            }


def latent_rows(writer: Writer, options: Options) -> Iterator[Row]:
    """Latent rows over the whole range of BF16, index keys beside them: copied, whatever they are."""
    device, tokens = options.device, 64
    blocks = 2 if options.dry else 16
    generator = torch.Generator().manual_seed(3)
    n = blocks * tokens
    spread = torch.exp2(torch.randint(-30, 12, (n, 1), generator=generator).float())
    rows = (torch.randn(n, DS_MLA_LATENT + DS_MLA_ROPE, generator=generator) * spread).bfloat16()
    rows[0], rows[1, :DS_MLA_TILE] = 0, 1e30
    rows = rows.to(device)
    latent, rope = rows[:, :DS_MLA_LATENT].contiguous(), rows[:, DS_MLA_LATENT:].contiguous()
    slots, one = torch.arange(n, device=device), torch.ones(1, device=device)
    keys = torch.randint(0, 256, (blocks, tokens, 132), generator=generator, dtype=torch.int32).to(torch.uint8)
    index = PageLayout(1, tokens, 1, 132, PageDtype.UINT8, PageOrder.BYTES)
    src = PageLayout(1, tokens, 1, rows.shape[1], PageDtype.BF16, PageOrder.MLA, further_regions=(index,))
    source = [torch.zeros(src.cache_shape(blocks), dtype=torch.bfloat16, device=device), keys.to(device)]
    writer.concat_and_cache_mla(latent, rope, source[0], slots, "auto", one)
    for kind, scale in (("fp8", 1.0), ("fp8", 0.1), ("fp8_ds_mla", 1.0)):
        if kind == "fp8":
            wire = src.with_dtype(PageDtype.E4M3, k_scales=(scale,))
        else:
            wire = replace(src, dtype=PageDtype.E4M3, order=PageOrder.FP8_DS_MLA)
        ours, theirs = (torch.zeros(wire.cache_shape(blocks), dtype=torch.uint8, device=device) for _ in range(2))
        copied = torch.zeros_like(source[1])
        writer.concat_and_cache_mla(latent, rope, theirs, slots, kind, one * scale)
        verified = moved(source, src, wire, [ours, copied], blocks)
        found = differing(ours, theirs)
        same_keys = bool(torch.equal(copied, source[1]))
        yield {
            "writer": "concat_and_cache_mla", "kind": kind, "scale": scale, **found, "index_keys_equal": same_keys,
            "ok": found["ok"] and verified and same_keys,
        }  # fmt: skip


def run(options: Options) -> Iterator[Row]:
    writer: Writer = Formula() if options.dry else cuda_writers(options.writers)
    with dispatch.use_backend("reference" if options.dry else "triton"):
        yield from packed_rows(writer, options)
        yield from latent_rows(writer, options)
