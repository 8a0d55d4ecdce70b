"""FP8 pages for CPUs without AVX-512: bytes as the reference's truncating writer makes them, read back as they are."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu_fp8_cache import widen_blocks, write_tokens
from kernels.layout import Rounding
from kernels.reference import encode_e4m3

pytestmark = pytest.mark.compiles

BLOCKS, HEADS, TOKENS, DIM = 5, 3, 32, 64


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As a projection of Q, K and V together gives them: rows of a wider tensor."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 4 * HEADS * DIM, generator=generator) * 100
    rows[0, :8] = torch.tensor([0.0, -0.0, 500.0, -500.0, 2e-3, -2e-3, 1e-9, 3.0])
    rows = rows.to(torch.bfloat16)
    return rows[:, : HEADS * DIM].view(n, HEADS, DIM), rows[:, HEADS * DIM : 2 * HEADS * DIM].view(n, HEADS, DIM)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.5)])
def test_tokens_are_written_in_the_order_and_rounding_of_the_layout(scales: tuple[float, float]) -> None:
    cache = torch.full((BLOCKS, HEADS, TOKENS, 2 * DIM), 0xAA, dtype=torch.uint8)
    key, value = tokens(70)
    slots = torch.cat([torch.arange(33, 102), torch.tensor([-1])])
    write_tokens(key, value, cache, slots, *scales)
    pages = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)
    k = pages[:, :, 0].view(BLOCKS, HEADS, DIM, TOKENS).permute(0, 3, 1, 2).reshape(-1, HEADS, DIM)
    v = pages[:, :, 1].view(BLOCKS, HEADS, TOKENS, DIM).permute(0, 2, 1, 3).reshape(-1, HEADS, DIM)
    for got, real, scale in ((k, key, scales[0]), (v, value, scales[1])):
        expected = encode_e4m3(real.float(), scale, Rounding.TRUNCATE).view(torch.uint8)
        assert torch.equal(got[slots[:-1]], expected[:-1])
        untouched = torch.ones(len(got), dtype=torch.bool)
        untouched[slots[:-1]] = False
        assert (got[untouched] == 0xAA).all()


def test_pages_are_widened_exactly_and_the_table_follows() -> None:
    cache = torch.randint(0, 256, (BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=torch.uint8)
    table = torch.tensor([[4, 0, 3], [2, 4, 0]], dtype=torch.int32)
    pages, where = widen_blocks(cache, table, torch.tensor([65, 33], dtype=torch.int32))
    assert pages.shape == (5, HEADS, TOKENS, 2 * DIM)
    assert where.tolist() == [[0, 1, 2], [3, 4, 0]]
    for made, block in enumerate([4, 0, 3, 2, 4]):
        expected = cache[block].view(torch.float8_e4m3fn).to(torch.bfloat16)
        assert torch.equal(pages[made].view(torch.int16), expected.view(torch.int16))


def test_a_block_or_slot_outside_of_the_cache_is_refused() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)
    with pytest.raises(ValueError, match="names a block outside of a cache of 5 blocks"):
        widen_blocks(cache, torch.tensor([[5]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="slot 160 is outside of a cache of 5 blocks"):
        write_tokens(*tokens(1), cache, torch.tensor([160]), 1.0, 1.0)
    with pytest.raises(ValueError, match="set dtype: bfloat16"):
        write_tokens(tokens(1)[0].float(), tokens(1)[1], cache, torch.tensor([0]), 1.0, 1.0)
