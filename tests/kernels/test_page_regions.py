"""Pages of several regions, and scales by head, of every backend against the numpy oracle.

No region of a page is written when another is wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from page_checks import BACKENDS, BINDING, E4M3, KV_ORDERS, check_round_trip, random_caches

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder

INDEX_KEYS = PageLayout(3, 16, 1, 132, PageDtype.UINT8, PageOrder.BYTES)
LATENT = PageLayout(2, 16, 1, 576, PageDtype.BF16, PageOrder.MLA)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["bf16", "e4m3", "ds_mla"])
def test_a_page_of_two_regions(backend: str, form: str) -> None:
    """Latent rows are converted, index keys copied."""
    src = replace(LATENT, further_regions=(INDEX_KEYS,))
    wire = {
        "bf16": src,
        "e4m3": src.with_dtype(E4M3, k_scales=(0.1, 1.0)),
        "ds_mla": replace(src, dtype=E4M3, order=PageOrder.FP8_DS_MLA),
    }[form]
    check_round_trip(backend, src, wire, wire, [5, 2, 3], 3, [0, 1, 8])
    if wire is not src:
        check_round_trip(backend, wire, wire, wire, [5, 2, 3], 3, [0, 1, 8])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_region_of_a_page_is_written_when_another_is_wrong(backend: str) -> None:
    """Damage in either region, and regions of equal shape that change places."""
    src = replace(INDEX_KEYS, further_regions=(INDEX_KEYS,))
    caches, out = random_caches(src, 4), torch.empty(2, src.page_bytes, dtype=torch.uint8)
    half = src.page_bytes // 2
    with dispatch.use_backend(backend):
        digests = dispatch.seal_pages(caches, src, src, [3, 1], out, BINDING, 0)
        for change in ("first", "last", "places"):
            pages, targets = out.clone(), random_caches(src, 4, seed=8)
            kept = [target.clone() for target in targets]
            if change == "places":
                pages[0] = torch.cat((out[0, half:], out[0, :half]))
            else:
                pages[0, 0 if change == "first" else -1] ^= 1
            verdict = dispatch.open_pages(pages, src, digests, targets, src, [0, 2], BINDING, 0)
            assert verdict.tolist() == [False, True]
            assert all(torch.equal(a[0], b[0]) for a, b in zip(targets, kept, strict=True))
            assert all(torch.equal(a[2], b[1]) for a, b in zip(targets, caches, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", KV_ORDERS)
def test_scales_by_head(backend: str, order: PageOrder) -> None:
    src = PageLayout(2, 16, 3, 32, PageDtype.BF16, order)
    wire = src.with_dtype(E4M3, k_scales=(0.05, 2.0, 1.0, 0.3, 0.7, 4.0), v_scales=(1.0, 0.3))
    assert wire.scales_by_head
    check_round_trip(backend, src, wire, wire, [4, 0, 8], 3, [7, 2, 5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_unverified_pages_are_written_as_they_are(backend: str) -> None:
    src = replace(LATENT, further_regions=(INDEX_KEYS,))
    caches, targets = random_caches(src, 4), random_caches(src, 4, seed=8)
    out = torch.empty(2, src.page_bytes, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        dispatch.seal_pages(caches, src, src, [3, 1], out, BINDING, 0)
        dispatch.write_pages(out, src, targets, src, [0, 2])
    for cache, target in zip(caches, targets, strict=True):
        assert torch.equal(target[[0, 2]].view(torch.uint8), cache[[3, 1]].view(torch.uint8))
