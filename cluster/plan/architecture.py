"""A Hugging Face config read into the geometry that memory and time follow from.

Sources: the configuration and modelling files of transformers 5.19 and vLLM 0.32 for each class in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.plan.facts import PlanError, nearest

# architecture class -> (attention, mixture of experts)
FAMILIES: dict[str, tuple[str, bool]] = {
    "LlamaForCausalLM": ("gqa", False),
    "MistralForCausalLM": ("gqa", False),
    "Qwen2ForCausalLM": ("gqa", False),
    "Qwen3ForCausalLM": ("gqa", False),
    "Qwen3MoeForCausalLM": ("gqa", True),
    "Glm4MoeForCausalLM": ("gqa", True),
    "Glm4MoeLiteForCausalLM": ("mla", True),
    "DeepseekV3ForCausalLM": ("mla", True),
    "DeepseekV32ForCausalLM": ("mla", True),
    "GlmMoeDsaForCausalLM": ("mla", True),
}
# Multimodal wrappers whose language model is one of the above under `text_config`.
WRAPPERS = ("KimiK25ForConditionalGeneration",)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: a token's cache row is `kv_lora_rank + qk_rope_head_dim` values."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int

    @property
    def latent(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Moe:
    """Routed experts on `layers`; `router_bias` is DeepSeek's float32 e_score_correction_bias."""

    experts: int
    active: int
    shared: int
    intermediate: int
    layers: frozenset[int]
    router_bias: bool


@dataclass(frozen=True)
class Dsa:
    """DeepSeek sparse attention: an indexer picks `topk` tokens; `layers` own one, the others reuse its choice."""

    heads: int
    head_dim: int
    topk: int
    layers: frozenset[int]


@dataclass(frozen=True)
class Architecture:
    """Geometry of a decoder-only model. `layers` counts the backbone; `mtp_layers` come after it on disk."""

    name: str
    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    mla: Mla | None = None
    moe: Moe | None = None
    dsa: Dsa | None = None
    mtp_layers: int = 0
    mtp_copies_embedding: bool = False

    @property
    def attention(self) -> str:
        """`MLA+DSA`, `MLA` or `GQA`."""
        if self.mla is None:
            return "GQA"
        return "MLA+DSA" if self.dsa else "MLA"

    @property
    def family(self) -> str:
        return f"{self.attention} {'MoE' if self.moe else 'dense'}"


class _Fields:
    """Reads required and optional integers out of a config and names the field when one is wrong."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(f"{self._name}: config field {key} is {value!r}; it must be a whole number")
            return value
        if default is None:
            raise PlanError(f"{self._name}: config field {' or '.join(keys)} is missing")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._config.get(key)
        return default if value is None else bool(value)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config; multimodal wrappers nest it."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    merged = dict(inner)
    for key in ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings"):
        if key not in merged and key in config:
            merged[key] = config[key]
    if merged.get("model_type") in ("kimi_k2", "deepseek_v3") and not merged.get("architectures"):
        merged["architectures"] = ["DeepseekV3ForCausalLM"]
    return merged


def architecture(config: Mapping[str, Any], name: str = "model") -> Architecture:
    """The geometry of a Hugging Face config (a dict as read from config.json).

    Raises PlanError for an architecture the planner does not know, or a field that is missing or not a number.
    """
    text = text_config(config)
    classes = list(text.get("architectures") or config.get("architectures") or ())
    kind = next((c for c in classes if c in FAMILIES), None)
    if kind is None:
        shown = classes[0] if classes else str(text.get("model_type", "?"))
        raise PlanError(f"{name}: architecture {shown!r} is not one the planner knows{nearest(shown, FAMILIES)}")
    attention, is_moe = FAMILIES[kind]
    get = _Fields(text, name)
    layers, heads, hidden = (
        get.integer("num_hidden_layers"),
        get.integer("num_attention_heads"),
        get.integer("hidden_size"),
    )
    if not (layers and heads and hidden):
        raise PlanError(f"{name}: num_hidden_layers, num_attention_heads and hidden_size must be above 0")
    bias = get.flag("attention_bias")
    return Architecture(
        name=name,
        kind=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=get.integer("num_key_value_heads", default=heads),
        head_dim=get.integer("head_dim", default=hidden // heads),
        intermediate=get.integer("intermediate_size"),
        vocab=get.integer("vocab_size"),
        context=get.integer("max_position_embeddings", default=4096),
        # GLM and DeepSeek default to untied; Llama's and Qwen's configs always say.
        tied=get.flag("tie_word_embeddings"),
        qkv_bias=bias or kind == "Qwen2ForCausalLM",
        o_bias=bias and kind not in ("Glm4MoeForCausalLM", "Qwen2ForCausalLM"),
        mlp_bias=get.flag("mlp_bias") and not is_moe,
        qk_norm=kind in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM") or get.flag("use_qk_norm"),
        mla=_mla(get, text) if attention == "mla" else None,
        moe=_moe(get, text, kind, layers) if is_moe else None,
        dsa=_dsa(get, text, layers),
        mtp_layers=get.integer("num_nextn_predict_layers", default=0),
        mtp_copies_embedding=kind in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM"),
    )


def _mla(get: _Fields, text: Mapping[str, Any]) -> Mla:
    return Mla(
        q_lora_rank=get.integer("q_lora_rank", default=0) or None,
        kv_lora_rank=get.integer("kv_lora_rank"),
        qk_rope_head_dim=get.integer("qk_rope_head_dim"),
        qk_nope_head_dim=get.integer("qk_nope_head_dim"),
        v_head_dim=get.integer("v_head_dim"),
    )


def _moe(get: _Fields, text: Mapping[str, Any], kind: str, layers: int) -> Moe:
    if kind == "Qwen3MoeForCausalLM":
        step = max(1, get.integer("decoder_sparse_step", default=1))
        dense_only = set(text.get("mlp_only_layers") or ())
        sparse = {i for i in range(layers) if (i + 1) % step == 0 and i not in dense_only}
    elif types := text.get("mlp_layer_types"):
        sparse = {i for i, mlp in enumerate(types) if mlp == "sparse"}
    else:
        first = get.integer("first_k_dense_replace", default=0)
        every = max(1, get.integer("moe_layer_freq", default=1))
        sparse = {i for i in range(first, layers) if i % every == 0}
    return Moe(
        experts=get.integer("n_routed_experts", "num_experts", "num_local_experts"),
        active=get.integer("num_experts_per_tok"),
        shared=get.integer("n_shared_experts", default=0),
        intermediate=get.integer("moe_intermediate_size"),
        layers=frozenset(sparse),
        router_bias=kind != "Qwen3MoeForCausalLM",
    )


def _dsa(get: _Fields, text: Mapping[str, Any], layers: int) -> Dsa | None:
    """Which layers own an indexer: `indexer_types`, else a pattern of F and S, else frequency and offset."""
    if not text.get("index_topk"):
        return None
    if types := text.get("indexer_types"):
        owners = {i for i, entry in enumerate(types) if entry == "full"}
    elif pattern := text.get("index_topk_pattern"):
        owners = {i for i, entry in enumerate(pattern) if entry in ("F", "full")}
    else:
        every = max(1, get.integer("index_topk_freq", default=1))
        offset = get.integer("index_skip_topk_offset", default=2)
        owners = {i for i in range(layers) if max(i - offset + 1, 0) % every == 0}
    return Dsa(
        heads=get.integer("index_n_heads"),
        head_dim=get.integer("index_head_dim"),
        topk=get.integer("index_topk"),
        layers=frozenset(owners),
    )
