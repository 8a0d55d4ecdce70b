"""A real configuration of vLLM, made from nothing but a `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.spec import PoolSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def config_of(folder: Path, pool: PoolSpec, **fields: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        block_size=pool.block_tokens,
        kv_cache_dtype="auto" if pool.kv_dtype == "bfloat16" else "fp8_e4m3",
        enforce_eager=True,
    ).create_engine_config()
