"""What of an engine's cache is refused at registration, by name, and in what order its layers are moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine import layouts
from kernels.layout import LayoutError

BLOCKS, HEADS, TOKENS, DIM = 4, 2, 32, 32


def cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=dtype)


def layer(scale: torch.Tensor | None = None, backend: str = "FLASH_ATTN") -> Any:
    scale = torch.tensor(0.5) if scale is None else scale
    return SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        _k_scale=scale,
        _v_scale=torch.tensor(0.25),
        _k_scale_float=float(scale.max()),
        _v_scale_float=0.25,
    )


def test_layers_are_moved_in_the_order_of_their_numbers_and_aliases_once() -> None:
    caches = {f"model.layers.{number}.self_attn.attn": cache() for number in (10, 2, 0, 1)}
    shared = dict(caches) | {"model.layers.11.self_attn.attn": caches["model.layers.2.self_attn.attn"]}
    assert [name.split(".")[2] for name in layouts.in_order(shared)] == ["0", "1", "2", "10"]


def test_scales_by_head_are_refused() -> None:
    caches = {"model.layers.0.attn": cache(torch.uint8)}
    layouts.describe(caches, {"model.layers.0.attn": layer()}, "fp8_e4m3")
    by_head = layer(torch.tensor([0.5, 0.25]))
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.attn has 2 KV scales, one a head"):
        layouts.describe(caches, {"model.layers.0.attn": by_head}, "fp8_e4m3")


def test_a_block_that_the_backend_splits_is_refused_with_the_size_to_set() -> None:
    layout = layouts.describe({"l.0": cache()}, {"l.0": layer()}, "auto")
    layouts.refuse_unlike(layout, TOKENS, "bfloat16")
    with pytest.raises(LayoutError, match=r"block_tokens 128 is no block size .* set block_tokens: 32"):
        layouts.refuse_unlike(layout, 128, "bfloat16")


def test_a_cache_in_another_format_than_the_pool_says_is_refused() -> None:
    layout = layouts.describe({"l.0": cache(torch.uint8)}, {"l.0": layer()}, "fp8_e4m3")
    layouts.refuse_unlike(layout, TOKENS, "fp8_e4m3")
    with pytest.raises(LayoutError, match="the KV cache is fp8_e4m3 and the pool's kv_dtype bfloat16"):
        layouts.refuse_unlike(layout, TOKENS, "bfloat16")
