"""Builds tiny random Hugging Face checkpoints, one a model family, with a given tokenizer.

    python -m ops.tiny_models.build OUT --tokenizer .models/smollm2-135m-instruct [FAMILY ...]

Real MLA and mixture-of-experts models are hundreds of GB; these have the same modules, names and cache rows (MLA: 512
latent + 64 rope values) at a few MB, so that what depends on form and not on size can be tried anywhere. Their text
is noise. Matrices are drawn with a spread that keeps greedy decoding from collapsing into one token.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# family -> (config class, model class, fields, fields that transformers does not write but vLLM reads)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
        {},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_EXPERTS,
            "num_experts": 8,
            "decoder_sparse_step": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        {},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **_ROUTED,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": True,
        },
        {"num_nextn_predict_layers": 0},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**_ROUTED, **_LATENT},
        {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_ROUTED, **_LATENT, "routed_scaling_factor": 2.5},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    ),
    "glm-moe-dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **_ROUTED,
            **_LATENT,
            "num_hidden_layers": 4,
            "index_topk": 256,
            "index_head_dim": 128,
            "index_n_heads": 8,
            "indexer_types": ["full", "full", "shared", "full"],
        },
        {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "index_topk_freq": 2,
            "index_skip_topk_offset": 2,
        },
    ),
}


def build(
    family: str, folder: Path, tokenizer: Path, seed: int = 0, max_shard_size: str = "5GB", **fields: Any
) -> Path:
    """Writes the checkpoint of `family` to `folder` and returns it. `fields` override the config's.

    The tokenizer's files are copied; the vocabulary is the tokenizer's. Weights are BF16 and follow from `seed` alone.
    Raises ValueError for an unknown family or a tokenizer folder without a config.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(FAMILIES)}")
    files = [file for file in sorted(tokenizer.glob("*")) if file.name.startswith(("tokenizer", "chat_template"))]
    if not files:
        raise ValueError(f"tokenizer {tokenizer} holds no tokenizer files; give the folder of a checkpoint")
    import torch
    import transformers
    from transformers import PreTrainedTokenizerFast

    config_class, model_class, own, unwritten = FAMILIES[family]
    vocab = len(PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json")))
    config = getattr(transformers, config_class)(vocab_size=vocab, **{**_COMMON, **own, **fields}, dtype="bfloat16")
    for name, value in unwritten.items():
        setattr(config, name, value)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05, generator=generator)
    for module in model.modules():
        # Published checkpoints keep the router's correction in float32; `.to` above has cast it.
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for file in files:
        shutil.copy(file, folder / file.name)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.tiny_models.build", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write FAMILY/ folders into")
    parser.add_argument("family", nargs="*", help=f"default: all of {', '.join(FAMILIES)}")
    parser.add_argument("--tokenizer", type=Path, default=Path(".models/smollm2-135m-instruct"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for family in args.family or FAMILIES:
        try:
            folder = build(family, args.out / family, args.tokenizer, args.seed)
        except ValueError as error:
            print(f"tiny_models: {error}", file=sys.stderr)
            return 2
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{family:14} {size / 2**20:7.1f} MiB  {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
