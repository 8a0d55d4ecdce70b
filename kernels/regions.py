"""What a backend offers, and the page operators over pages of several regions. Called by `kernels.dispatch` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels import int4
from kernels.arguments import PageCaches, PageSeeds
from kernels.digest import GOLDEN, to_signed
from kernels.layout import PageLayout
from kernels.torch_mix import mix


class PageBackend(Protocol):
    """What a backend module offers, for pages of one region. Arguments are checked; `seeds`: of the wire pages."""

    def seal_pages(
        self,
        caches: Sequence[Tensor],
        src: PageLayout,
        wire: PageLayout,
        block_ids: Tensor,
        out: Tensor,
        seeds: PageSeeds,
    ) -> Tensor: ...

    def open_pages(
        self,
        wire_pages: Tensor,
        wire: PageLayout,
        digests: Tensor,
        caches: Sequence[Tensor],
        dst: PageLayout,
        block_ids: Tensor,
        seeds: PageSeeds,
    ) -> Tensor: ...

    def write_pages(
        self,
        wire_pages: Tensor,
        wire: PageLayout,
        good: Tensor,
        caches: Sequence[Tensor],
        dst: PageLayout,
        block_ids: Tensor,
    ) -> None: ...

    def page_digests(self, wire_pages: Tensor, wire: PageLayout, seeds: PageSeeds) -> Tensor: ...

    def check_tags(
        self,
        page_tags: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        page_tokens: int,
        expected: Tensor,
        slots: Tensor,
        query_start: Tensor,
        slot_mapping: Tensor,
        answer: Tensor,
    ) -> None: ...


class WeightBackend(Protocol):
    def pack_int4(
        self, weight: Tensor, group_size: int, symmetric: bool, grid: tuple[float, ...], block_scale: Tensor | None
    ) -> int4.PackedInt4: ...

    def unpack_int4(self, packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> Tensor: ...


def parts_of(pages: Tensor, wire: PageLayout) -> list[Tensor]:
    """Each region's part of wire pages; views of the same memory."""
    parts, begin = [], 0
    for region in wire.regions:
        parts.append(pages[:, begin : begin + region.page_bytes])
        begin += region.page_bytes
    return parts


def page_digest_of(regions: Sequence[Tensor]) -> Tensor:
    """The digest of pages of several regions from those of their regions (`kernels.digest`, step 4)."""
    digest = torch.zeros_like(regions[0])
    for region in regions:
        digest = mix((digest ^ region) + to_signed(GOLDEN))
    return digest


def seal_pages(
    backend: PageBackend,
    caches: PageCaches,
    src: PageLayout,
    wire: PageLayout,
    ids: Tensor,
    out: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    if not wire.further_regions:
        return backend.seal_pages(caches, src, wire, ids, out, seeds)
    regions = zip(caches.by_region, src.regions, wire.regions, parts_of(out, wire), strict=True)
    return page_digest_of([backend.seal_pages(c, s, w, ids, part, seeds) for c, s, w, part in regions])


def open_pages(
    backend: PageBackend,
    wire_pages: Tensor,
    wire: PageLayout,
    wanted: Tensor,
    caches: PageCaches,
    dst: PageLayout,
    ids: Tensor,
    seeds: PageSeeds,
) -> Tensor:
    if not wire.further_regions:
        return backend.open_pages(wire_pages, wire, wanted, caches, dst, ids, seeds)
    wire_pages, ids = wire_pages.to(caches.device, non_blocking=True), ids.to(caches.device)
    # No region is written before all of them are known to be right.
    good = page_digests(backend, wire_pages, wire, seeds) == wanted.to(caches.device)
    good &= (ids >= 0) & (ids < caches[0].shape[0])
    write_pages(backend, wire_pages, wire, good, caches, dst, ids)
    return good


def write_pages(
    backend: PageBackend,
    wire_pages: Tensor,
    wire: PageLayout,
    good: Tensor,
    caches: PageCaches,
    dst: PageLayout,
    ids: Tensor,
) -> None:
    for region, w, d, part in zip(caches.by_region, wire.regions, dst.regions, parts_of(wire_pages, wire), strict=True):
        backend.write_pages(part, w, good, region, d, ids)


def page_digests(backend: PageBackend, wire_pages: Tensor, wire: PageLayout, seeds: PageSeeds) -> Tensor:
    if not wire.further_regions:
        return backend.page_digests(wire_pages, wire, seeds)
    parts = zip(parts_of(wire_pages, wire), wire.regions, strict=True)
    return page_digest_of([backend.page_digests(part, region, seeds) for part, region in parts])
