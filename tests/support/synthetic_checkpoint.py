"""Random checkpoints in DeepSeek V3's form (MLA, routed and shared experts, one MTP layer), BF16 or block-scaled FP8,
of any size. The weights mean nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ops.compress.codec import as_bytes
from ops.compress.source import INDEX_NAME
from ops.compress.tensorfile import OutTensor, TensorFileWriter
from ops.compress.workfolder import as_json, write_durably

BLOCK = 128
POOL_WEIGHTS = 1 << 22
# Never FP8 in such checkpoints.
PRECISE = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "eh_proj", "shared_head")


@dataclass(frozen=True)
class Geometry:
    """The dimensions that matter. Defaults: the smallest that every engine's kernels take, about 13 M parameters."""

    hidden: int = 512
    intermediate: int = 1024
    moe_intermediate: int = 256
    layers: int = 3
    dense_layers: int = 1
    experts: int = 8
    heads: int = 8
    q_lora: int = 256
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    vocab: int = 1024
    mtp_layers: int = 1

    def config(self, fp8: bool) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
            "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.moe_intermediate, "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": self.mtp_layers, "first_k_dense_replace": self.dense_layers,
            "n_routed_experts": self.experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "q_lora_rank": self.q_lora, "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope, "qk_rope_head_dim": self.rope, "v_head_dim": self.value,
            "vocab_size": self.vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        }  # fmt: skip
        if fp8:
            config["quantization_config"] = {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            }  # fmt: skip
        return config


def tensor_shapes(geometry: Geometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, layer by layer."""
    g = geometry
    yield "model.embed_tokens.weight", (g.vocab, g.hidden)
    for layer in range(g.layers + g.mtp_layers):
        base = f"model.layers.{layer}"
        if layer >= g.layers:
            yield f"{base}.embed_tokens.weight", (g.vocab, g.hidden)
            yield f"{base}.enorm.weight", (g.hidden,)
            yield f"{base}.hnorm.weight", (g.hidden,)
            yield f"{base}.eh_proj.weight", (g.hidden, 2 * g.hidden)
            yield f"{base}.shared_head.norm.weight", (g.hidden,)
            yield f"{base}.shared_head.head.weight", (g.vocab, g.hidden)
        yield f"{base}.input_layernorm.weight", (g.hidden,)
        yield f"{base}.post_attention_layernorm.weight", (g.hidden,)
        attention = f"{base}.self_attn"
        yield f"{attention}.q_a_proj.weight", (g.q_lora, g.hidden)
        yield f"{attention}.q_a_layernorm.weight", (g.q_lora,)
        yield f"{attention}.q_b_proj.weight", (g.heads * (g.nope + g.rope), g.q_lora)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (g.kv_lora + g.rope, g.hidden)
        yield f"{attention}.kv_a_layernorm.weight", (g.kv_lora,)
        yield f"{attention}.kv_b_proj.weight", (g.heads * (g.nope + g.value), g.kv_lora)
        yield f"{attention}.o_proj.weight", (g.hidden, g.heads * g.value)
        if layer < g.dense_layers:
            yield from _mlp(f"{base}.mlp", g.hidden, g.intermediate)
            continue
        yield f"{base}.mlp.gate.weight", (g.experts, g.hidden)
        yield f"{base}.mlp.gate.e_score_correction_bias", (g.experts,)
        yield from _mlp(f"{base}.mlp.shared_experts", g.hidden, g.moe_intermediate)
        for expert in range(g.experts):
            yield from _mlp(f"{base}.mlp.experts.{expert}", g.hidden, g.moe_intermediate)
    yield "model.norm.weight", (g.hidden,)
    yield "lm_head.weight", (g.vocab, g.hidden)


def _mlp(base: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{base}.gate_proj.weight", (inner, hidden)
    yield f"{base}.up_proj.weight", (inner, hidden)
    yield f"{base}.down_proj.weight", (hidden, inner)


class _Weights:
    """Normal values from a pool that is drawn once: gigabytes at the speed of a copy, repeatable from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL_WEIGHTS, generator=self._generator) * 0.04

    def take(self, count: int) -> torch.Tensor:
        start = int(torch.randint(POOL_WEIGHTS, (1,), generator=self._generator))
        spread = 0.5 + float(torch.rand(1, generator=self._generator))
        index = (start + torch.arange(count)) % POOL_WEIGHTS if count < POOL_WEIGHTS else None
        if index is not None:
            return self._pool[index] * spread
        return self._pool.repeat(-(-count // POOL_WEIGHTS))[:count] * spread


def _values(name: str, shape: tuple[int, ...], weights: _Weights) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape)
    return weights.take(math.prod(shape)).view(shape)


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 codes of `weight` [rows, columns] float32, and the float32 scale of each 128 x 128 block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight / wide).to(torch.float8_e4m3fn), scale


def make_checkpoint(path: Path, geometry: Geometry, fp8: bool, seed: int = 0, shard_bytes: int = 1 << 30) -> int:
    """Writes the folder (which must not exist) and returns the bytes of its tensors."""
    path.mkdir(parents=True)
    plans: list[list[tuple[str, tuple[int, ...], list[OutTensor]]]] = [[]]
    filled = total = 0
    for name, shape in tensor_shapes(geometry):
        outputs = _outputs(name, shape, fp8)
        nbytes = sum(output.nbytes for output in outputs)
        if plans[-1] and filled + nbytes > shard_bytes:
            plans.append([])
            filled = 0
        plans[-1].append((name, shape, outputs))
        filled += nbytes
        total += nbytes
    weights, weight_map = _Weights(seed), {}
    for number, plan in enumerate(plans):
        file_name = f"model-{number + 1:05d}-of-{len(plans):05d}.safetensors"
        with (path / file_name).open("w+b", buffering=0) as file:
            writer = TensorFileWriter(file, [output for _, _, outputs in plan for output in outputs])
            for name, shape, outputs in plan:
                for output, tensor in zip(outputs, _tensors(name, shape, outputs, weights), strict=True):
                    writer.append(output.name, as_bytes(tensor))
                    weight_map[output.name] = file_name
            writer.finish()
    write_durably(path / INDEX_NAME, as_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    write_durably(path / "config.json", json.dumps(geometry.config(fp8), indent=1).encode())
    return total


def _outputs(name: str, shape: tuple[int, ...], fp8: bool) -> list[OutTensor]:
    if name.endswith("e_score_correction_bias"):
        return [OutTensor(name, "F32", shape)]
    if fp8 and len(shape) == 2 and not any(part in name for part in PRECISE):
        blocks = tuple(-(-size // BLOCK) for size in shape)
        return [OutTensor(name, "F8_E4M3", shape), OutTensor(f"{name}_scale_inv", "F32", blocks)]
    return [OutTensor(name, "BF16", shape)]


def _tensors(
    name: str, shape: tuple[int, ...], outputs: list[OutTensor], weights: _Weights
) -> tuple[torch.Tensor, ...]:
    values = _values(name, shape, weights)
    if len(outputs) == 2:
        return quantise_blocks(values)
    return (values if outputs[0].dtype == "F32" else values.bfloat16(),)
