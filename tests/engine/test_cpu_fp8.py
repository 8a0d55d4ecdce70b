"""vLLM's CPU attention over FP8 pages by our operators: on this machine's own kernels, and on any x86 machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.engine.cpu_fp8 import Fp8Operators, is_needed, multiply_widened

HEADS, KV_HEADS, DIM, TOKENS, BLOCKS = 6, 3, 64, 32, 9
SCALES: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0, "kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(scope="module")
def operators() -> Any:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return _custom_ops


def step(operators: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two requests of 70 and 41 tokens, all their tokens written and the last 5 and 1 of them asked for."""
    generator = torch.Generator().manual_seed(1)
    lengths, asked = [70, 41], [5, 1]
    key, value = torch.randn(2, sum(lengths), KV_HEADS, DIM, generator=generator).to(torch.bfloat16)
    query = torch.randn(sum(asked), HEADS, DIM, generator=generator).to(torch.bfloat16)
    table = torch.tensor([[7, 2, 4], [0, 5, 0]], dtype=torch.int32)
    slots = torch.cat(
        [(table[r, torch.arange(n) // TOKENS] * TOKENS + torch.arange(n) % TOKENS) for r, n in enumerate(lengths)]
    )
    cache = torch.zeros(BLOCKS, KV_HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)
    k, v = cache.view(BLOCKS, KV_HEADS, 2 * TOKENS, DIM).chunk(2, dim=2)
    operators.cpu_attn_reshape_and_cache(key, value, k, v, slots.long(), "vec", **SCALES)
    starts = torch.tensor([0, 5, 6], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    metadata = operators.cpu_attn_get_scheduler_metadata(
        num_reqs=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seq_lens=seq_lens, dtype=torch.bfloat16,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
        kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    output = torch.empty_like(query)
    operators.cpu_attention_with_kv_cache(
        query=query, key_cache=k, value_cache=v, output=output, query_start_loc=starts, seq_lens=seq_lens,
        scale=DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0,
        scheduler_metadata=metadata, s_aux=None, **SCALES,
    )  # fmt: skip
    return cache, output


def expected(cache: torch.Tensor) -> torch.Tensor:
    """Attention in float32 over the bytes of the cache."""
    generator = torch.Generator().manual_seed(1)
    torch.randn(2, 111, KV_HEADS, DIM, generator=generator)
    query = torch.randn(6, HEADS, DIM, generator=generator).to(torch.bfloat16).float()
    values = cache.view(torch.float8_e4m3fn).float().view(BLOCKS, KV_HEADS, 2, TOKENS * DIM)
    k = values[:, :, 0].view(BLOCKS, KV_HEADS, DIM, TOKENS).transpose(2, 3) * SCALES["k_scale"]
    v = values[:, :, 1].view(BLOCKS, KV_HEADS, TOKENS, DIM) * SCALES["v_scale"]
    rows = []
    for blocks, length, first, count in (([7, 2, 4], 70, 0, 5), ([0, 5], 41, 5, 1)):
        kr, vr = (torch.cat([part[b] for b in blocks], dim=1)[:, :length].repeat_interleave(2, 0) for part in (k, v))
        scores = query[first : first + count].transpose(0, 1) @ kr.transpose(1, 2) * DIM**-0.5
        hidden = torch.arange(length) > length - count + torch.arange(count)[:, None]
        rows.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ vr).transpose(0, 1))
    return torch.cat(rows)


def test_attention_over_our_pages_is_what_their_bytes_say(operators: Any) -> None:
    cache, output = step(Fp8Operators(operators))
    assert (cache != 0).sum() > 40_000
    torch.testing.assert_close(output.float(), expected(cache), rtol=0.02, atol=0.02)


@pytest.mark.skipif(is_needed(), reason="vLLM has no FP8 kernel for this CPU (no AVX-512)")
def test_pages_and_output_are_those_of_vllms_own_kernel(operators: Any) -> None:
    ours, theirs = step(Fp8Operators(operators)), step(operators)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].float(), theirs[1].float(), rtol=0.02, atol=0.02)


def test_other_caches_go_to_vllm(operators: Any) -> None:
    seen: list[str] = []

    class Recorder:
        def cpu_attention_with_kv_cache(self, **arguments: Any) -> None:
            seen.append(arguments["kv_cache_dtype"])
            assert (arguments["k_scale"], arguments["v_scale"], arguments["scale"]) == (3.0, 4.0, 2.0)

    none = torch.empty(0)
    Fp8Operators(Recorder()).cpu_attention_with_kv_cache(
        key_cache=none, value_cache=none, output=none, block_table=none, seq_lens=none, scale=2.0, k_scale=3.0,
        v_scale=4.0, kv_cache_dtype="fp8_e5m2",
    )  # fmt: skip
    assert seen == ["fp8_e5m2"]


@pytest.mark.parametrize("remove_weight", [False, True])
def test_a_widened_layer_rounds_once(remove_weight: bool) -> None:
    layer: Any = torch.nn.Linear(96, 64, dtype=torch.bfloat16)
    x, exact = torch.randn(5, 96, dtype=torch.bfloat16), torch.nn.Linear(96, 64, dtype=torch.float64)
    exact.weight.data, exact.bias.data = layer.weight.detach().double(), layer.bias.detach().double()
    multiply_widened(layer, remove_weight)
    assert layer.weight.numel() == (0 if remove_weight else 96 * 64)
    found = layer.cpu_linear(x, layer.weight, layer.bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact(x.double()), rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(not is_needed(), reason="this CPU multiplies BF16 by itself")
def test_linear_layers_of_this_process_are_widened() -> None:
    from vllm.model_executor.layers import utils

    import actors.engine.vllm_patches  # noqa: F401

    layer: Any = torch.nn.Linear(96, 64, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    assert layer.weight.numel() == 0 and layer.cpu_linear(torch.ones(1, 96).bfloat16(), layer.weight, None).shape == (
        1,
        64,
    )
