"""Which `PageLayout` an engine's KV cache has. Explicit cases; what is not known is refused, never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kernels.layout import LayoutError, PageDtype, PageLayout, PageOrder, Rounding, name_hash

_DTYPES = {
    torch.bfloat16: PageDtype.BF16,
    torch.uint8: PageDtype.E4M3,
    torch.float8_e4m3fn: PageDtype.E4M3,
}
_CPU_ISA = {"vec": PageOrder.CPU_VEC, "amx": PageOrder.CPU_AMX}
_PACKED_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# One latent row a token, rows of a block one after another.
_LATENT_BACKENDS = (
    "AMX_MLA",
    "CPU_MLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM90",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "TOKENSPEED_MLA",
    "TRITON_MLA",
)
# Keys of sparse attention's indexer, in a cache of their own beside the latent rows.
_INDEX_BACKENDS = ("DEEPSEEK_V32_INDEXER",)


def in_order(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """In the order of the wire form: attention, then index keys, each by layer number, whatever order an engine has
    them in. A layer that shares another's cache is left out, since its pages would be moved twice."""
    seen: set[int] = set()
    ordered = {}
    for name in sorted(kv_caches, key=lambda name: (_keeps_index_keys(layers[name]), _layer_number(name))):
        cache = kv_caches[name]
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            ordered[name] = cache
    return ordered


def _keeps_index_keys(layer: Any) -> bool:
    return _backend(layer) in _INDEX_BACKENDS


def _backend(layer: Any) -> str:
    name: str = layer.get_attn_backend().get_name()
    return name


def _layer_number(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def refuse_unlike(layout: PageLayout, block_size: int, kv_dtype: str) -> None:
    """Raises `LayoutError` where the cache that vLLM made is not what the pool's settings say.

    `block_size`: tokens of the scheduler's blocks; `kv_dtype`: `pools.*.kv_dtype`.
    """
    if layout.page_tokens != block_size:
        raise LayoutError(
            f"block_tokens {block_size} is no block size of this engine's attention backend, which splits it into "
            f"blocks of {layout.page_tokens}; pages move whole: set block_tokens: {layout.page_tokens} in both pools"
        )
    made = "bfloat16" if layout.dtype is PageDtype.BF16 else "fp8_e4m3"
    if made != kv_dtype:
        raise LayoutError(
            f"the KV cache is {made} and the pool's kv_dtype {kv_dtype}: the checkpoint names a KV cache format of its "
            f"own; set kv_dtype: {made}, or use a checkpoint without one"
        )


def describe(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], cache_dtype: str) -> PageLayout:
    """The layout of an engine's cache.

    `kv_caches`: layer name -> cache tensor, of `in_order`; `layers`: the layers by the same names; `cache_dtype`:
    `cache_config.cache_dtype`. Raises `LayoutError` for a cache it does not know.
    """
    attention = {name: cache for name, cache in kv_caches.items() if not _keeps_index_keys(layers[name])}
    index = {name: cache for name, cache in kv_caches.items() if name not in attention}
    if not attention:
        raise LayoutError(
            "this engine has no attention KV cache; only models with attention pages can be served in two pools"
        )
    layout = _attention(attention, layers, cache_dtype)
    return replace(layout, further_regions=(_index_keys(index),)) if index else layout


def _alike(kv_caches: Mapping[str, torch.Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    shapes = {tuple(cache.shape) for cache in kv_caches.values()}
    dtypes = {cache.dtype for cache in kv_caches.values()}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise LayoutError(
            f"layers with different caches (shapes {sorted(shapes)}, dtypes {sorted(map(str, dtypes))}) are not "
            "supported: hybrid models (sliding window, Mamba) have no page codec yet"
        )
    return shapes.pop(), dtypes.pop()


def _index_keys(kv_caches: Mapping[str, torch.Tensor]) -> PageLayout:
    """Keys of sparse attention's indexer: quantised alike in both pools, so their bytes are moved as they are."""
    shape, dtype = _alike(kv_caches)
    if dtype is not torch.uint8:
        raise LayoutError(f"index keys of dtype {dtype} have no codec; they are moved as bytes (uint8)")
    return PageLayout(
        num_layers=len(kv_caches),
        page_tokens=shape[-2],
        num_kv_heads=1,
        head_dim=shape[-1],
        dtype=PageDtype.UINT8,
        order=PageOrder.BYTES,
        layer_names=name_hash(kv_caches),
    )


def _attention(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], cache_dtype: str) -> PageLayout:
    shape, dtype = _alike(kv_caches)
    first = layers[next(iter(kv_caches))]
    backend = _backend(first)
    if dtype not in _DTYPES:
        raise LayoutError(
            f"KV cache dtype {dtype} (cache_dtype {cache_dtype!r}) has no codec; use bfloat16 or fp8_e4m3"
        )
    page_dtype = _DTYPES[dtype]
    if page_dtype is PageDtype.E4M3 and cache_dtype not in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        raise LayoutError(f"kv_cache_dtype {cache_dtype!r} has no codec; use fp8_e4m3")
    order = _order(backend, shape, cache_dtype, first)
    fp8, latent = page_dtype is PageDtype.E4M3, order.is_latent
    if latent and len(shape) == 4:
        shape = (shape[0], *shape[2:])
    heads = 1 if latent else shape[1]
    scaled = fp8 and order is not PageOrder.FP8_DS_MLA
    return PageLayout(
        num_layers=len(kv_caches),
        page_tokens=shape[1] if latent else shape[2],
        num_kv_heads=heads,
        head_dim=(576 if order is PageOrder.FP8_DS_MLA else shape[2]) if latent else shape[3] // 2,
        dtype=page_dtype,
        order=order,
        # The CPU writer truncates, the GPU writers round to nearest even.
        rounding=Rounding.TRUNCATE if fp8 and backend == "CPU_ATTN" else Rounding.NEAREST_EVEN,
        k_scales=_scales(kv_caches, layers, "k", heads) if scaled else (1.0,),
        v_scales=_scales(kv_caches, layers, "v", heads) if scaled and not latent else (1.0,),
        layer_names=name_hash(kv_caches),
    )


def _scales(names: Iterable[str], layers: Mapping[str, Any], which: str, heads: int) -> tuple[float, ...]:
    """One a layer, or one a layer and head where a layer has so many."""
    by_layer = []
    for name in names:
        scale = getattr(layers[name], f"_{which}_scale")
        if scale.numel() == 1:
            by_layer.append([float(getattr(layers[name], f"_{which}_scale_float"))])
        elif scale.numel() == heads:
            by_layer.append([float(each) for each in scale.flatten().tolist()])
        else:
            raise LayoutError(f"{name} has {scale.numel()} {which.upper()} scales for {heads} heads; one or one a head")
    if all(len(scales) == 1 for scales in by_layer):
        return tuple(scales[0] for scales in by_layer)
    return tuple(each for scales in by_layer for each in (scales * heads if len(scales) == 1 else scales))


def pages_of(cache: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """A layer's cache in the shape that `layout` gives it; a view of the same memory."""
    return cache.squeeze(1) if layout.order.is_latent and cache.dim() == 4 else cache


def _order(backend: str, shape: tuple[int, ...], cache_dtype: str, layer: Any) -> PageOrder:
    if backend == "CPU_ATTN" and len(shape) == 4:
        isa = getattr(layer, "isa", None)
        if isa in _CPU_ISA:
            return _CPU_ISA[isa]
        raise LayoutError(f"CPU attention with isa {isa!r} has no codec; known: {', '.join(_CPU_ISA)}")
    if backend in _LATENT_BACKENDS and (len(shape) == 3 or (len(shape) == 4 and shape[1] == 1)):
        return PageOrder.FP8_DS_MLA if cache_dtype == "fp8_ds_mla" else PageOrder.MLA
    if backend in _PACKED_BACKENDS and len(shape) == 4:
        return PageOrder.KV_PACKED
    raise LayoutError(f"attention backend {backend} with cache shape {shape} has no codec")
