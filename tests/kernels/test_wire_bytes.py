"""What crosses between replicas of different versions stays as it is.

1. Sealed bytes, digests and fingerprints of fixed pages are those of the first release, by every CPU backend.
2. Sealing and opening take no float32 copy of the pages.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding

BF16, E4M3 = PageDtype.BF16, PageDtype.E4M3
KV = PageLayout(2, 16, 2, 16, BF16, PageOrder.KV_PACKED)
LATENT = PageLayout(1, 4, 1, 576, BF16, PageOrder.MLA)


def cpu(order: PageOrder) -> tuple[PageLayout, PageLayout]:
    wire = PageLayout(2, 32, 1, 32, E4M3, order, Rounding.TRUNCATE, (1.0, 0.05), (0.3,))
    return PageLayout(2, 32, 1, 32, BF16, order), wire


PAIRS = {
    "as it is": (KV, KV),
    "nearest even": (KV, KV.with_dtype(E4M3, k_scales=(0.25, 3.0), v_scales=(0.7,))),
    "cpu_vec": cpu(PageOrder.CPU_VEC),
    "cpu_amx": cpu(PageOrder.CPU_AMX),
    "latent": (LATENT, PageLayout(1, 4, 1, 576, E4M3, PageOrder.MLA)),
    "latent with scales": (LATENT, PageLayout(1, 4, 1, 576, E4M3, PageOrder.FP8_DS_MLA)),
}
# SHA-256 (first 16 digits) of two pages' wire bytes, their digests and the layout's fingerprint.
PINNED = {
    "as it is": "029c90c3e8c8b47c",
    "nearest even": "d2f7337a10147570",
    "cpu_vec": "8a6f92d5854b6f7f",
    "cpu_amx": "b13d3d0ce05c3a54",
    "latent": "0256eb8481f5dfec",
    "latent with scales": "4acd1014c9c57b12",
}


def sealed(source: PageLayout, wire: PageLayout) -> str:
    noise = torch.Generator().manual_seed(7)
    caches = [
        torch.randint(0, 65536, source.cache_shape(3), generator=noise).to(torch.int16).view(torch.bfloat16)
        for _ in range(source.num_layers)
    ]
    out = torch.zeros(2, wire.page_bytes, dtype=torch.uint8)
    digests = dispatch.seal_pages(caches, source, wire, [2, 0], out, SealBinding((1 << 64) - 1, 3), 1000)
    said = [bytes(out.flatten().tolist()), dispatch.digests_to_ints(digests), wire.fingerprint]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_wire_bytes_stay(backend: str, name: str) -> None:
    with dispatch.use_backend(backend):
        assert sealed(*PAIRS[name]) == PINNED[name]


def memory_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{field}:")[1].split()[0]) / 1024


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_no_float32_copy_is_made(backend: str) -> None:
    source = PageLayout(30, 32, 3, 64, BF16, PageOrder.KV_PACKED)
    wire, pages, binding = source.with_dtype(E4M3), 8, SealBinding(1, 1)
    caches = [torch.randn(source.cache_shape(pages)).to(torch.bfloat16) for _ in range(30)]
    targets = [torch.ones(wire.cache_shape(pages), dtype=torch.uint8) for _ in range(30)]
    out, ids = torch.ones(pages, wire.page_bytes, dtype=torch.uint8), list(range(pages))
    with dispatch.use_backend(backend):
        for count in (1, pages):  # compiled, tables made; then counted
            Path("/proc/self/clear_refs").write_text("5")
            before = memory_mib("VmRSS")
            digests = dispatch.seal_pages(caches, source, wire, ids[:count], out[:count], binding, 0)
            dispatch.open_pages(out[:count], wire, digests, targets, wire, ids[:count], binding, 0)
            taken = memory_mib("VmHWM") - before
    assert taken < pages * source.page_bytes * 2 / 2**20
