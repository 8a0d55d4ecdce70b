"""1. The digest is what its definition says. 2. Every bit, place and binding field counts."""

from __future__ import annotations

import numpy as np
import page_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import digest as definition
from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding

BACKENDS = ["reference", "numba"]
# Layer pages of: less than a block, whole blocks, blocks and a tail.
LAYOUTS = [
    PageLayout(3, 16, 1, 16, PageDtype.E4M3, PageOrder.KV_PACKED),
    PageLayout(2, 32, 2, 16, PageDtype.BF16, PageOrder.CPU_VEC),
    PageLayout(2, 16, 3, 32, PageDtype.E4M3, PageOrder.CPU_AMX),
    PageLayout(2, 5, 1, 576, PageDtype.E4M3, PageOrder.FP8_DS_MLA),
]


def pages(layout: PageLayout, n: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, layout.page_bytes), dtype=np.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_equals_the_definition_in_python_numbers(backend: str, layout: PageLayout) -> None:
    data = pages(layout, 3)
    data[1] = 0
    data[2] = 255
    binding = SealBinding((1 << 64) - 3, 7)
    with dispatch.use_backend(backend):
        got = dispatch.digests_to_ints(dispatch.page_digests(data, layout, binding, 1000))
    expected = [
        oracle.digest(data[i].numpy().tobytes(), layout, binding.ticket_hash, binding.attempt, 1000 + i)
        for i in range(3)
    ]
    assert got == expected


def test_seed_steps_are_bijections() -> None:
    values = np.random.default_rng(3).integers(0, 1 << 63, 2000).tolist()
    assert len({definition.mix(value) for value in values}) == len(set(values))
    assert definition.to_unsigned(definition.to_signed((1 << 64) - 5)) == (1 << 64) - 5


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_every_bit_counts(layout: PageLayout) -> None:
    """One page for each flipped bit (a sample of 4,000 on large pages): no digest occurs twice."""
    base = pages(layout, 1)[0]
    rng = np.random.default_rng(5)
    bits = np.arange(layout.page_bytes * 8)
    if bits.size > 4000:
        bits = np.concatenate((bits[:64], bits[-64:], rng.choice(bits, 3872, replace=False)))
    flipped = base.repeat(len(bits), 1)
    flipped[torch.arange(len(bits)), torch.from_numpy(bits // 8)] ^= torch.from_numpy(1 << bits % 8).to(torch.uint8)
    ordinal_zero = [dispatch.page_digests(page[None], layout, SealBinding(1, 0), 0).item() for page in flipped]
    distinct = len({tuple(page.tolist()) for page in flipped})
    assert len(set(ordinal_zero)) == distinct


def test_binding_and_ordinal_count() -> None:
    layout = LAYOUTS[1]
    other_layout = PageLayout(2, 32, 2, 16, PageDtype.BF16, PageOrder.KV_PACKED)
    data = pages(layout, 1)
    seen = [
        dispatch.page_digests(data, layout, SealBinding(5, 1), 3).item(),
        dispatch.page_digests(data, layout, SealBinding(6, 1), 3).item(),
        dispatch.page_digests(data, layout, SealBinding(5, 2), 3).item(),
        dispatch.page_digests(data, layout, SealBinding(5, 1), 4).item(),
        dispatch.page_digests(data, other_layout, SealBinding(5, 1), 3).item(),
        # The same numbers in other fields.
        dispatch.page_digests(data, layout, SealBinding(1, 5), 3).item(),
        dispatch.page_digests(data, layout, SealBinding(3, 1), 5).item(),
    ]
    assert len(set(seen)) == len(seen)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_moved_bytes_are_another_page(data: st.DataObject, layout: PageLayout) -> None:
    """Swapping two different aligned runs (tokens, rows, blocks, layers) changes the digest."""
    size = data.draw(st.sampled_from([s for s in (4, 8, 16, 64, 656, 1024, layout.layer_page_bytes) if s]))
    slots = layout.page_bytes // size
    if slots < 2:
        return
    a = data.draw(st.integers(0, slots - 1))
    b = data.draw(st.integers(0, slots - 1).filter(lambda value: value != a))
    before = pages(layout, 1, seed=data.draw(st.integers(0, 100)))
    after = before.clone()
    after[0, a * size : (a + 1) * size] = before[0, b * size : (b + 1) * size]
    after[0, b * size : (b + 1) * size] = before[0, a * size : (a + 1) * size]
    if torch.equal(before, after):
        return
    binding = SealBinding(9, 0)
    assert dispatch.page_digests(before, layout, binding, 0) != dispatch.page_digests(after, layout, binding, 0)


def test_pages_that_are_sparse_differ_too() -> None:
    """Nearly empty pages are where weak sums collide: all pages with one byte set, all different."""
    layout = LAYOUTS[0]
    data = torch.zeros(layout.page_bytes, layout.page_bytes, dtype=torch.uint8)
    data.fill_diagonal_(1)
    digests = [dispatch.page_digests(row[None], layout, SealBinding(0, 0), 0).item() for row in data]
    assert len(set(digests)) == layout.page_bytes
