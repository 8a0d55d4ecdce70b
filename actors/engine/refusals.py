"""What cannot be served by pages, seen in the engine's configuration: refused before its weights are loaded.

Parallelism that spreads pages in ways that are not moved is refused earlier, by `cluster.engine_args`; what only the
registered cache tells is refused by `actors.engine.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.engine.config import ConfigError
from cluster.spec import PoolSpec


def refuse_unmovable(config: Any, pool: PoolSpec, name: str) -> None:
    """Raises `ConfigError` for a model or cache whose pages have no codec. `config`: a VllmConfig; `name`: the pool's.

    Names the field, its value and the way out.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    where = f"pools.{name}: {model.model}"
    for field in ("compress_ratios", "index_kpool"):
        if value := getattr(text, field, None):
            raise ConfigError(
                f"{where}: {field} {value}: compressed states beside the pages have no codec; serve this model with "
                "vLLM alone"
            )
    if model.is_attention_free or model.is_hybrid:
        raise ConfigError(
            f"{where}: layers without attention pages (Mamba, linear attention) have no codec; serve this model with "
            "vLLM alone"
        )
    scheme = _kv_cache_scheme(model.hf_config)
    by_head = scheme.get("strategy", "tensor") != "tensor"
    if pool.kv_dtype == "fp8_e4m3" and by_head and pool.tensor_parallel > 1:
        raise ConfigError(
            f"{where}: kv_cache_scheme.strategy {scheme['strategy']!r} gives one KV scale a head, and each of "
            f"tensor_parallel {pool.tensor_parallel} ranks others; pages of all ranks have one layout: set "
            "tensor_parallel: 1, or use a checkpoint with per-tensor KV scales, or none"
        )
    _refuse_int4(model, where)
    _refuse_own_dtype(model, pool, where)
    _refuse_split_blocks(config, pool, name)


def _quantization(hf_config: Any) -> Mapping[str, Any]:
    quantization = getattr(hf_config, "quantization_config", None) or {}
    return quantization if isinstance(quantization, Mapping) else quantization.to_dict()


def _kv_cache_scheme(hf_config: Any) -> Mapping[str, Any]:
    return _quantization(hf_config).get("kv_cache_scheme") or {}


def _refuse_int4(model: Any, where: str) -> None:
    from actors.engine.cpu_fp8 import runs_int4

    quantization = _quantization(model.hf_config)
    groups = [(group.get("weights") or {}) for group in (quantization.get("config_groups") or {}).values()]
    bits = {quantization.get("bits"), *(weights.get("num_bits") for weights in groups)}
    if 4 in bits and not runs_int4():
        raise ConfigError(
            f"{where}: INT4 weights on a CPU need AVX-512, which this machine has not; use the checkpoint in BF16 or "
            "FP8, or another machine"
        )


def _refuse_own_dtype(model: Any, pool: PoolSpec, where: str) -> None:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    if pool.kv_dtype != "bfloat16":
        return
    own = resolve_kv_cache_dtype_string("auto", model)
    if own not in ("auto", "bfloat16"):
        raise ConfigError(
            f"{where}: the checkpoint asks for a KV cache of its own, {own}, and the pool's kv_dtype is bfloat16; set "
            "kv_dtype: fp8_e4m3, or use a checkpoint without one"
        )


def _refuse_split_blocks(config: Any, pool: PoolSpec, name: str) -> None:
    """Of the backend that vLLM chooses for this configuration; one that it cannot choose is its own error, later."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.worker.utils import select_common_block_size

    model = config.model_config
    try:
        with set_current_vllm_config(config, check_compile=False):
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                use_sparse=bool(getattr(model.hf_text_config, "index_topk", None)),
            )
        kernel = select_common_block_size(pool.block_tokens, [backend])
    except (ValueError, NotImplementedError):
        return
    if kernel != pool.block_tokens:
        raise ConfigError(
            f"pools.{name}.block_tokens {pool.block_tokens} is no block size of {backend.get_name()}, which splits it "
            f"into blocks of {kernel}; pages move whole: set block_tokens: {kernel} in both pools"
        )
