"""The checks that `kernels.dispatch` makes before a backend runs, and the forms in which arguments may come."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.digest import GOLDEN, base_seed, to_signed, to_unsigned
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding
from kernels.torch_mix import mix

BlockIds = Sequence[int] | Tensor
# A numpy array too; numpy itself is not needed here (nor on a GPU machine with only torch and triton).
Digests = Sequence[int] | Tensor | Any


def shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"


def check_caches(caches: Sequence[Tensor], layout: PageLayout) -> None:
    """Of one region."""
    if len(caches) != layout.num_layers:
        raise ValueError(f"{len(caches)} caches for {layout.num_layers} layers")
    kinds: tuple[torch.dtype, ...] = (torch.uint8, torch.float8_e4m3fn)
    if layout.dtype is PageDtype.BF16:
        kinds = (torch.bfloat16,)
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


class PageCaches(Sequence[Tensor]):
    """One cache tensor a layer, checked against its layout once and not in each call that gets it.

    `by_region`: the same, one a region. `addresses`, and `block_strides` in bytes, are int64 [layers] on the CPU.
    """

    def __init__(self, caches: Sequence[Tensor], layout: PageLayout) -> None:
        self.layout = layout
        self._caches = tuple(caches)
        self.by_region = (self,) if not layout.further_regions else tuple(_split(caches, layout))
        if not layout.further_regions:
            check_caches(caches, layout)
        self.addresses = torch.tensor([to_signed(cache.data_ptr()) for cache in caches], dtype=torch.int64)
        self.block_strides = torch.tensor([cache.stride(0) * cache.element_size() for cache in caches])

    def __getitem__(self, layer: Any) -> Any:
        return self._caches[layer]

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def device(self) -> torch.device:
        return self._caches[0].device


def _split(caches: Sequence[Tensor], layout: PageLayout) -> Iterator[PageCaches]:
    num_layers = sum(region.num_layers for region in layout.regions)
    if len(caches) != num_layers:
        raise ValueError(f"{len(caches)} caches for {num_layers} layers of {len(layout.regions)} regions")
    if len(blocks := {cache.shape[0] for cache in caches}) != 1:
        raise ValueError(f"caches of one page have different numbers of blocks: {sorted(blocks)}")
    begin = 0
    for region in layout.regions:
        yield PageCaches(caches[begin : begin + region.num_layers], region)
        begin += region.num_layers


def as_caches(caches: Sequence[Tensor], layout: PageLayout) -> PageCaches:
    if isinstance(caches, PageCaches) and (caches.layout is layout or caches.layout == layout):
        return caches
    return PageCaches(tuple(caches), layout)


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
    if isinstance(block_ids, Sequence):
        return _from_host(block_ids, cache.shape[0])
    ids = block_ids
    if ids.dim() != 1 or (len(ids) and ids.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"block_ids must be a list of numbers or int32/int64 [m], is {shown(ids)}")
    ids = ids.to(torch.int64)
    if ids.device.type == "cpu" and len(ids):
        _check_range(int(ids.min()), int(ids.max()), cache.shape[0])
    return ids


def _from_host(block_ids: Sequence[int], blocks: int) -> Tensor:
    if not block_ids:
        return torch.empty(0, dtype=torch.int64)
    _check_range(min(block_ids), max(block_ids), blocks)
    return torch.frombuffer(array("q", block_ids), dtype=torch.int64)


def _check_range(low: int, high: int, blocks: int) -> None:
    if low < 0 or high >= blocks:
        raise ValueError(f"block_ids go from {low} to {high}, the cache has blocks 0..{blocks - 1}")


def as_digests(digests: Digests, n: int, device: torch.device) -> Tensor:
    if isinstance(digests, Sequence):
        out = _from_numbers(digests)
    else:
        out = torch.as_tensor(digests)
        out = out.view(torch.int64) if out.dtype is torch.uint64 else out
    if out.dtype is not torch.int64 or out.shape != (n,):
        raise ValueError(f"digests must be {n} 64-bit numbers, is {shown(out)}")
    return out.to(device)


def _from_numbers(digests: Sequence[int]) -> Tensor:
    try:
        numbers = array("Q", digests)
    except OverflowError:  # some are signed
        numbers = array("Q", [to_unsigned(value) for value in digests])
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


class PageSeeds(NamedTuple):
    """The seeds of `num_pages` pages from ordinal `first` on (`kernels.digest`, step 1); `base` is unsigned."""

    base: int
    first: int
    num_pages: int

    def tensor(self) -> Tensor:
        """int64 [num_pages], on the CPU."""
        ordinals = torch.arange(self.first, self.first + self.num_pages, dtype=torch.int64)
        return mix((ordinals ^ to_signed(self.base)) + to_signed(GOLDEN))


def page_seeds(wire: PageLayout, binding: SealBinding, first_ordinal: int, n: int) -> PageSeeds:
    if not 0 <= first_ordinal < 1 << 32:
        raise ValueError(f"first_ordinal is {first_ordinal}, must be 0 <= first_ordinal < 2^32")
    return PageSeeds(base_seed(wire, binding), first_ordinal, n)
