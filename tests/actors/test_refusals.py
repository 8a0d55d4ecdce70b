"""What cannot be moved is refused from the configuration, before any weight is read.

Real configurations of vLLM, made from nothing but a `config.json`: a checkpoint without weights is refused all the
same, by field, value and way out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_config import config_of

from actors.engine import cpu_fp8
from actors.engine.config import ConfigError
from actors.engine.refusals import refuse_unmovable
from cluster.spec import PoolSpec

BY_HEAD = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True},
}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_a_model_with_attention_pages_is_accepted(tmp_path: Path, kv_dtype: Any) -> None:
    pool = PoolSpec(kv_dtype=kv_dtype)
    refuse_unmovable(config_of(tmp_path, pool), pool, "decode")


def test_compressed_states_are_refused(tmp_path: Path) -> None:
    """Index keys of sparse attention (`index_topk`) are pages; what is pooled over tokens is not."""
    pool = PoolSpec()
    refuse_unmovable(config_of(tmp_path, pool, index_topk=64), pool, "prefill")
    config = config_of(tmp_path, pool, index_topk=64, index_kpool=4)
    with pytest.raises(ConfigError, match=r"pools\.prefill: .*index_kpool 4: compressed states"):
        refuse_unmovable(config, pool, "prefill")


def test_scales_by_head_are_refused_where_ranks_have_others(tmp_path: Path) -> None:
    pool = PoolSpec(kv_dtype="fp8_e4m3")
    config = config_of(tmp_path, pool)
    config.model_config.hf_config.quantization_config = BY_HEAD
    refuse_unmovable(config, pool, "decode")
    ranks = PoolSpec(kv_dtype="fp8_e4m3", tensor_parallel=2, gpus_per_replica=2)
    with pytest.raises(ConfigError, match=r"kv_cache_scheme\.strategy 'attn_head' .*set tensor_parallel: 1"):
        refuse_unmovable(config, ranks, "decode")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_int4_weights_are_refused_on_a_cpu_without_a_kernel_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: dict[str, Any]
) -> None:
    pool = PoolSpec()
    config = config_of(tmp_path, pool)
    config.model_config.hf_config.quantization_config = quantization
    monkeypatch.setattr(cpu_fp8, "runs_int4", lambda: True)
    refuse_unmovable(config, pool, "decode")
    monkeypatch.setattr(cpu_fp8, "runs_int4", lambda: False)
    with pytest.raises(ConfigError, match=r"pools\.decode: .*INT4 weights on a CPU need AVX-512.*in BF16 or"):
        refuse_unmovable(config, pool, "decode")


def test_a_cache_format_that_the_checkpoint_brings_along_is_refused(tmp_path: Path) -> None:
    pool = PoolSpec()
    config = config_of(tmp_path, pool)
    config.model_config.hf_config.quantization_config = BY_HEAD | {
        "quant_method": "modelopt",
        "kv_cache_quant_algo": "FP8",
    }
    with pytest.raises(ConfigError, match=r"asks for a KV cache of its own, fp8.*set kv_dtype: fp8_e4m3"):
        refuse_unmovable(config, pool, "prefill")


def test_a_block_size_that_the_backend_splits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own choice of the kernel's block: FlashInfer's sizes in the place of this machine's backend's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    pool = PoolSpec(block_tokens=128)
    config = config_of(tmp_path, pool)
    refuse_unmovable(config, pool, "decode")
    sizes = staticmethod(lambda kv_cache_spec=None: [16, 32, 64])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)
    with pytest.raises(ConfigError, match=r"pools\.decode\.block_tokens 128 is no block size of .*blocks of 64"):
        refuse_unmovable(config, pool, "decode")
