"""FP8 KV caches and BF16 layers on x86 CPUs without AVX-512 and AMX: vLLM 0.32 refuses the former, the latter are slow.

`Fp8Operators` stands in the place of `vllm._custom_ops` in vLLM's CPU attention backend: tokens are written as e4m3 by
our own kernel, and vLLM's BF16 attention reads the step's pages after they were widened. The cache holds half the bytes
and the same pages as with AVX-512; each step also converts every page that it reads, which costs time, not memory.

The kernels are imported at their first use: vLLM looks through the attributes of all loaded modules when a worker
starts (`vllm.triton_utils.dispatcher`), and fails at those of llvmlite.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def is_needed() -> bool:
    """Whether this machine is an x86 CPU on which vLLM has no kernel for FP8 pages."""
    from vllm.platforms import CpuArchEnum, current_platform

    x86 = current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.X86
    return x86 and not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported()


def multiply_widened(layer: Any, remove_weight: bool) -> None:
    """Gives a BF16 linear layer products in FP32, rounded to BF16 at the end, and twice its weights' memory.

    PyTorch multiplies BF16 matrices by a loop of dot products on such a CPU, at a seventh of FP32's speed.
    """
    wide = layer.weight.detach().float()
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(
        x.float(), wide, None if bias is None else bias.float()
    ).to(x.dtype)
    if remove_weight:
        layer.weight = torch.nn.Parameter(wide.new_empty(0, dtype=torch.bfloat16), requires_grad=False)


def runs_int4() -> bool:
    """Whether vLLM has a kernel for INT4 weights here: its CPU build for x86 has one from AVX-512 on."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def is_fp8(kv_cache_dtype: str | None) -> bool:
    return kv_cache_dtype in ("fp8", "fp8_e4m3")


class Fp8Operators:
    """What vLLM's CPU attention calls; anything but an FP8 cache goes to vLLM's own operators."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def cpu_attn_get_scheduler_metadata(self, *args: Any, kv_cache_dtype: str = "auto", **rest: Any) -> torch.Tensor:
        dtype = "auto" if is_fp8(kv_cache_dtype) else kv_cache_dtype
        metadata: torch.Tensor = self._operators.cpu_attn_get_scheduler_metadata(*args, kv_cache_dtype=dtype, **rest)
        return metadata

    def cpu_attn_reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        isa: str,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if is_fp8(kv_cache_dtype):
            _kernels().write_tokens(key, value, _whole(key_cache), slot_mapping, k_scale, v_scale)
        else:
            self._operators.cpu_attn_reshape_and_cache(
                key, value, key_cache, value_cache, slot_mapping, isa, k_scale, v_scale, kv_cache_dtype
            )

    def cpu_attention_with_kv_cache(
        self,
        *,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_dtype: str = "auto",
        **rest: Any,
    ) -> None:
        if not is_fp8(kv_cache_dtype):
            self._operators.cpu_attention_with_kv_cache(
                key_cache=key_cache,
                value_cache=value_cache,
                output=output,
                block_table=block_table,
                seq_lens=seq_lens,
                scale=scale,
                k_scale=k_scale,
                v_scale=v_scale,
                kv_cache_dtype=kv_cache_dtype,
                **rest,
            )
            return
        pages, block_table = _kernels().widen_blocks(_whole(key_cache), block_table, seq_lens)
        blocks, heads, tokens, _ = pages.shape
        key_cache, value_cache = pages.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        # Both scales are linear: K's in the dot products, V's in their sum.
        self._operators.cpu_attention_with_kv_cache(
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            block_table=block_table,
            seq_lens=seq_lens,
            scale=scale * k_scale,
            **rest,
        )
        if v_scale != 1.0:
            output.mul_(v_scale)


@functools.cache
def _kernels() -> Any:
    from llvmlite.binding import ffi

    from kernels import cpu_fp8_cache

    library = type(ffi.lib)
    find = library.__getattr__

    def find_but_dict(self: Any, name: str) -> Any:
        """Every name is a function there; vLLM asks for `__dict__` when the next engine of this process starts."""
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_but_dict
    return cpu_fp8_cache


def _whole(key_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's view of the K half, [blocks, H, page_tokens, D], back to the cache [blocks, H, page_tokens, 2 * D]."""
    blocks, heads, tokens, dim = key_cache.shape
    size = 2 * tokens * dim
    return key_cache.as_strided((blocks, heads, tokens, 2 * dim), (heads * size, size, 2 * dim, 1))
