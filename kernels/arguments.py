"""The checks that `kernels.dispatch` makes before a backend runs, and the forms in which arguments may come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.digest import base_seed, page_seed, to_signed, to_unsigned
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding

BlockIds = Sequence[int] | Tensor
# A numpy array too; numpy itself is not needed here (nor on a GPU machine with only torch and triton).
Digests = Sequence[int] | Tensor | Any


def shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"


def check_caches(caches: Sequence[Tensor], layout: PageLayout) -> None:
    if len(caches) != layout.num_layers:
        raise ValueError(f"{len(caches)} caches for {layout.num_layers} layers")
    kinds: tuple[torch.dtype, ...] = (torch.bfloat16,)
    if layout.dtype is PageDtype.E4M3:
        kinds = (torch.uint8, torch.float8_e4m3fn)
    first = caches[0]
    if first.dtype not in kinds or tuple(first.shape) != layout.cache_shape(first.shape[0]):
        raise ValueError(
            f"cache of layer 0 is {shown(first)}, must be {' or '.join(map(str, kinds))}"
            f" {list(layout.cache_shape(first.shape[0]))}"
        )
    strides = first.stride()
    if strides[-1] != 1 or (layout.order is not PageOrder.KV_PACKED and not first[:1].is_contiguous()):
        raise ValueError(
            f"cache of layer 0 has strides {list(strides)}: a page must be contiguous (values in kv_packed)"
        )
    shape, dtype, device = first.shape, first.dtype, first.device
    for layer, cache in enumerate(caches):
        # Layers may lie differently far apart, their pages may not differ inside.
        same = cache.shape == shape and cache.dtype is dtype and cache.device == device
        if not same or cache.stride()[1:] != strides[1:]:
            raise ValueError(f"cache of layer {layer} is {shown(cache)} on {cache.device}, layer 0 {shown(first)}")


def check_wire(name: str, pages: Tensor, wire: PageLayout) -> None:
    if pages.dtype is not torch.uint8 or pages.dim() != 2 or pages.shape[1] != wire.page_bytes:
        raise ValueError(f"{name} must be uint8 [n, {wire.page_bytes}], is {shown(pages)}")
    if pages.stride(1) != 1 or (pages.shape[0] > 1 and pages.stride(0) % 16) or pages.data_ptr() % 16:
        raise ValueError(f"{name} must have contiguous rows that begin at multiples of 16 bytes, is {shown(pages)}")


def check_cover(blocks: int, tokens: int, others: int, other_tokens: int, name: str, other_name: str) -> None:
    """`others` pages must reach into the last of `blocks`, and not begin behind its end."""
    total = blocks * tokens
    if others > -(-total // other_tokens) or others * other_tokens <= total - tokens or (blocks and not others):
        raise ValueError(
            f"{blocks} {name} of {tokens} tokens do not go with {others} {other_name} of {other_tokens} tokens"
        )


def as_block_ids(block_ids: BlockIds, cache: Tensor) -> Tensor:
    """int64 [m]. Host ids are checked against the cache; ids on a device are checked by the kernel."""
    ids = torch.as_tensor(block_ids)
    if ids.dim() != 1 or (len(ids) and ids.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"block_ids must be a list of numbers or int32/int64 [m], is {shown(ids)}")
    ids = ids.to(torch.int64)
    if ids.device.type == "cpu" and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= cache.shape[0]:
            raise ValueError(f"block_ids go from {low} to {high}, the cache has blocks 0..{cache.shape[0] - 1}")
    return ids


def as_digests(digests: Digests, n: int, device: torch.device) -> Tensor:
    if isinstance(digests, Sequence):
        out = torch.tensor([to_signed(to_unsigned(value)) for value in digests], dtype=torch.int64)
    else:
        out = torch.as_tensor(digests)
        out = out.view(torch.int64) if out.dtype is torch.uint64 else out
    if out.dtype is not torch.int64 or out.shape != (n,):
        raise ValueError(f"digests must be {n} 64-bit numbers, is {shown(out)}")
    return out.to(device)


def page_seeds(wire: PageLayout, binding: SealBinding, first_ordinal: int, n: int) -> Tensor:
    if first_ordinal < 0:
        raise ValueError(f"first_ordinal is {first_ordinal}, must be >= 0")
    base = base_seed(wire, binding)
    return torch.tensor([to_signed(page_seed(base, first_ordinal + i)) for i in range(n)], dtype=torch.int64)
