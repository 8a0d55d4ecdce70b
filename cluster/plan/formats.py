"""Weight and KV formats as bytes.

Weights: `bf16`; `fp8`, e4m3 with one float32 scale a 128 x 128 block (DeepSeek and GLM 5 form); `fp8_channel`, e4m3
with one BF16 scale an output (compressed-tensors FP8 dynamic, GLM 4.5 form); `int4`, two values a byte with one BF16
scale a group of inputs (compressed-tensors `pack-quantized`). Only linear layers are quantised.
KV: `bf16`; `fp8`, one byte a value; `fp8_ds_mla`, 656 bytes a row: 512 e4m3 + 4 float32 scales + 64 BF16 rope values
(DeepSeek sparse attention). Index keys of sparse attention are e4m3 with one float32 scale a row in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.plan.architecture import Architecture, text_config
from cluster.plan.facts import PlanError, nearest
from cluster.plan.tensors import Kind, Tensor

WEIGHTS = ("bf16", "fp8", "fp8_channel", "int4")
KV = ("bf16", "fp8", "fp8_uniform", "fp8_ds_mla")
_WEIGHT_NAMES = {"bfloat16": "bf16", "fp8_e4m3": "fp8", "w4a16": "int4", "fp8_dynamic": "fp8_channel"}
_KV_NAMES = {"bfloat16": "bf16", "auto": "bf16", "fp8_e4m3": "fp8"}
INT4_MODULES = {
    "experts": frozenset({Kind.EXPERT}),
    "experts+mlp": frozenset({Kind.EXPERT, Kind.SHARED_EXPERT, Kind.DENSE_MLP}),
    "linear": frozenset({Kind.EXPERT, Kind.SHARED_EXPERT, Kind.DENSE_MLP, Kind.ATTENTION}),
}
FP8_BLOCK = 128


@dataclass(frozen=True)
class WeightFormat:
    """Which storage each tensor gets.

    `int4_modules` names what `int4` covers (a key of INT4_MODULES), `rest` what other linear layers are stored in.
    `ignore` are compressed-tensors patterns of modules kept in BF16 (plain names, or `re:` and an expression).
    """

    name: str
    group: int = 32
    int4_modules: str = "experts"
    rest: str = "bf16"
    ignore: tuple[str, ...] = ()

    def storage(self, tensor: Tensor) -> str:
        """`bf16`, `fp8`, `fp8_channel`, `int4` or `f32` for this tensor."""
        if tensor.float32:
            return "f32"
        if not tensor.linear or self.name == "bf16" or self._ignored(tensor):
            return "bf16"
        if self.name == "int4":
            return "int4" if tensor.kind in INT4_MODULES[self.int4_modules] else self.rest
        return self.name

    def tensor_bytes(self, tensor: Tensor, shape: tuple[int, ...] | None = None, copies: int | None = None) -> int:
        """Bytes of `copies` tensors of `shape` (default: the whole tensor), scales and metadata included."""
        shape = tensor.shape if shape is None else shape
        count = tensor.copies if copies is None else copies
        return count * _matrix_bytes(shape, self.storage(tensor), self.group)

    def _ignored(self, tensor: Tensor) -> bool:
        module = tensor.module.replace("{e}", "0")
        return any(
            re.match(pattern[3:], module)
            if pattern.startswith("re:")
            else module == pattern or module.startswith(pattern + ".")
            for pattern in self.ignore
        )

    def describe(self) -> str:
        if self.name == "int4":
            return f"int4 group {self.group} on {self.int4_modules}, other linear layers {self.rest}"
        blocks = f"fp8 in {FP8_BLOCK} x {FP8_BLOCK} blocks"
        return {"bf16": "bf16", "fp8": blocks, "fp8_channel": "fp8 with a scale an output"}[self.name]


def _matrix_bytes(shape: tuple[int, ...], storage: str, group: int) -> int:
    elements = 1
    for side in shape:
        elements *= side
    if storage == "f32":
        return 4 * elements
    if storage == "bf16":
        return 2 * elements
    out, into = shape
    if storage == "fp8":
        return elements + 4 * -(-out // FP8_BLOCK) * -(-into // FP8_BLOCK)
    if storage == "fp8_channel":
        return elements + 2 * out
    # int32 words of 8 values along the inputs, a BF16 scale a group, and compressed-tensors' weight_shape (2 x int64).
    return out * (4 * -(-into // 8) + 2 * -(-into // group)) + 16


def weight_format(
    name: str,
    arch: Architecture,
    config: Mapping[str, Any] | None = None,
    *,
    group: int | None = None,
    int4_modules: str | None = None,
    rest: str = "bf16",
    native: str | None = None,
) -> WeightFormat:
    """A format by name; `auto` is what the checkpoint is in (`quantization_config`, else `native`, else BF16)."""
    name = _WEIGHT_NAMES.get(name.lower(), name.lower())
    if name == "auto":
        declared = _declared(text_config(config or {}))
        if declared:
            return declared
        name = native or "bf16"
    if name not in WEIGHTS:
        raise PlanError(f"weights {name!r} is not a known format{nearest(name, (*WEIGHTS, 'auto'))}")
    modules = int4_modules or ("experts" if arch.moe else "linear")
    if modules not in INT4_MODULES:
        raise PlanError(f"int4_modules {modules!r} is unknown{nearest(modules, INT4_MODULES)}")
    if rest not in ("bf16", "fp8"):
        raise PlanError(f"int4 rest {rest!r} must be bf16 or fp8")
    # 32 is what Kimi and GLM INT4 checkpoints use; any multiple of 8 that divides the inputs loads.
    size = 32 if group is None else group
    if size < 8 or size % 8:
        raise PlanError(f"int4 group {size} must be a multiple of 8")
    return WeightFormat(name, size, modules, rest)


def _declared(config: Mapping[str, Any]) -> WeightFormat | None:
    """Reads a checkpoint's own `quantization_config`; None if it has none."""
    quant = config.get("quantization_config")
    if not isinstance(quant, Mapping):
        return None
    method = str(quant.get("quant_method", ""))
    ignore = tuple(str(p) for p in (quant.get("ignore") or quant.get("modules_to_not_convert") or ()))
    if method == "fp8":
        return WeightFormat("fp8", ignore=ignore)
    if method == "compressed-tensors":
        groups = list((quant.get("config_groups") or {}).values())
        weights = [g["weights"] for g in groups if isinstance(g, Mapping) and isinstance(g.get("weights"), Mapping)]
        if len(weights) == 1 and weights[0].get("num_bits") == 4 and weights[0].get("group_size"):
            return WeightFormat("int4", int(weights[0]["group_size"]), "linear", "bf16", ignore)
        if len(weights) == 1 and weights[0].get("num_bits") == 8 and weights[0].get("type") == "float":
            return WeightFormat("fp8" if weights[0].get("strategy") == "block" else "fp8_channel", ignore=ignore)
    raise PlanError(
        f"quantization_config {method!r} of this checkpoint is not one the planner reads (fp8 blocks, "
        "compressed-tensors INT4 groups or FP8); name the format with --weights bf16, fp8 or int4"
    )


def kv_format(name: str, arch: Architecture) -> str:
    """The storage of cache rows: `bf16`, `fp8` or `fp8_ds_mla`.

    On sparse MLA vLLM takes `fp8` as `fp8_ds_mla`; `fp8_uniform` asks for one byte a value all the same.
    """
    name = _KV_NAMES.get(name.lower(), name.lower())
    if name not in KV:
        raise PlanError(f"kv {name!r} is not a known format{nearest(name, KV)}")
    if name == "fp8" and arch.dsa:
        return "fp8_ds_mla"
    if name == "fp8_uniform":
        return "fp8"
    if name == "fp8_ds_mla" and not (arch.mla and arch.dsa):
        raise PlanError(f"kv fp8_ds_mla is the row of sparse MLA; {arch.name} has {arch.attention}: use fp8")
    if name == "fp8_ds_mla" and arch.mla and arch.mla.kv_lora_rank % FP8_BLOCK:
        raise PlanError(f"kv fp8_ds_mla needs kv_lora_rank in steps of {FP8_BLOCK}, not {arch.mla.kv_lora_rank}")
    return name


def kv_row_bytes(arch: Architecture, kv: str, kv_heads: int | None = None) -> int:
    """Bytes one token takes in one layer's cache, of `kv_heads` heads (default: all of the model's)."""
    size = 2 if kv == "bf16" else 1
    if arch.mla is None:
        return 2 * (arch.kv_heads if kv_heads is None else kv_heads) * arch.head_dim * size
    if kv == "fp8_ds_mla":
        return arch.mla.kv_lora_rank + 4 * (arch.mla.kv_lora_rank // FP8_BLOCK) + 2 * arch.mla.qk_rope_head_dim
    return arch.mla.latent * size


def index_row_bytes(arch: Architecture) -> int:
    """Bytes one token's index key takes in one layer that owns an indexer: e4m3 values and float32 scales."""
    if arch.dsa is None:
        return 0
    return arch.dsa.head_dim + 4 * -(-arch.dsa.head_dim // FP8_BLOCK)
