"""What of an engine's cache is refused at registration, by name, and in what order its layers are moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine import layouts
from kernels.layout import LayoutError, check_convertible

BLOCKS, HEADS, TOKENS, DIM = 4, 2, 32, 32


def cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=dtype)


def layer(scale: torch.Tensor | None = None, backend: str = "FLASH_ATTN") -> Any:
    scale = torch.tensor(0.5) if scale is None else scale
    return SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        _k_scale=scale,
        _v_scale=torch.tensor(0.25),
        _k_scale_float=float(scale.max()),
        _v_scale_float=0.25,
        isa="vec",
    )


def test_layers_are_moved_in_the_order_of_their_numbers_and_aliases_once() -> None:
    caches = {f"model.layers.{number}.self_attn.attn": cache() for number in (10, 2, 0, 1)}
    shared = dict(caches) | {"model.layers.11.self_attn.attn": caches["model.layers.2.self_attn.attn"]}
    layers = {name: layer() for name in shared}
    assert [name.split(".")[2] for name in layouts.in_order(shared, layers)] == ["0", "1", "2", "10"]


def test_scales_by_head_are_of_each_layer_and_head() -> None:
    caches = {f"model.layers.{i}.attn": cache(torch.uint8) for i in range(2)}
    one, by_head = layer(), layer(torch.tensor([[0.5], [0.25]]))
    assert layouts.describe(caches, dict(zip(caches, (one, one))), "fp8_e4m3").k_scales == (0.5,)
    layout = layouts.describe(caches, dict(zip(caches, (one, by_head))), "fp8_e4m3")
    assert (layout.k_scales, layout.v_scales) == ((0.5, 0.5, 0.5, 0.25), (0.25,))
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.attn has 3 K scales for 2 heads"):
        layouts.describe(caches, dict(zip(caches, (one, layer(torch.ones(3))))), "fp8_e4m3")


def test_layers_of_other_names_are_another_layout() -> None:
    one = layouts.describe({"model.layers.0.attn": cache()}, {"model.layers.0.attn": layer()}, "auto")
    other = layouts.describe({"model.layers.1.attn": cache()}, {"model.layers.1.attn": layer()}, "auto")
    assert one.fingerprint != other.fingerprint
    with pytest.raises(LayoutError, match="layer_names"):
        check_convertible(one, other)


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
