"""Every parameter of a model by its checkpoint name, shape, kind and the way it is cut over GPUs.

Names and shapes are those of the Hugging Face checkpoints; the tests compare them with real ones, tensor by
tensor. How tensors are cut follows vLLM 0.32's model classes: the first projections of MLA, the indexer and the
router are replicated on every tensor-parallel rank, which is why a GPU holds more than its even share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cluster.plan.architecture import Architecture


class Kind(StrEnum):
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared_expert"
    EXPERT = "expert"
    MTP = "mtp"


class Cut(StrEnum):
    """How a tensor is divided: over outputs, inputs, KV heads, vocabulary rows, experts, or not at all."""

    WHOLE = "whole"
    OUT = "out"
    IN = "in"
    KV = "kv"
    VOCAB = "vocab"
    EXPERT_OUT = "expert_out"
    EXPERT_IN = "expert_in"


@dataclass(frozen=True)
class Tensor:
    """`copies` tensors of one shape: 1, or the routed experts of a layer (`{e}` in the name).

    `shape` is (out, in) for a matrix. `layer` is None outside the stack. `linear` marks what a weight format may
    quantise. `float32` marks what checkpoints keep in float32 whatever the format.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: Cut
    layer: int | None = None
    copies: int = 1
    linear: bool = True
    float32: bool = False

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def elements(self) -> int:
        count = self.copies
        for side in self.shape:
            count *= side
        return count


def tensors(arch: Architecture, mtp: bool = True) -> Iterator[Tensor]:
    """All parameters in checkpoint order: embedding, layers, final norm, head; MTP layers last if `mtp`."""
    yield _plain("model.embed_tokens.weight", (arch.vocab, arch.hidden), Kind.EMBEDDING, Cut.VOCAB)
    for layer in range(arch.layers):
        yield from _layer(arch, layer)
    yield _plain("model.norm.weight", (arch.hidden,), Kind.NORM)
    if not arch.tied:
        yield _plain("lm_head.weight", (arch.vocab, arch.hidden), Kind.LM_HEAD, Cut.VOCAB)
    if mtp:
        for layer in range(arch.layers, arch.layers + arch.mtp_layers):
            yield from _mtp(arch, layer)


def parameters(arch: Architecture, mtp: bool = False) -> int:
    """Parameter count of the backbone, or with the MTP layers as well."""
    return sum(t.elements for t in tensors(arch, mtp))


def active_parameters(arch: Architecture) -> int:
    """Parameters that one token multiplies with: no embedding table, `active` of the routed experts."""
    total = 0
    for tensor in tensors(arch, mtp=False):
        if tensor.kind is Kind.EXPERT and arch.moe:
            total += tensor.elements // arch.moe.experts * arch.moe.active
        elif tensor.kind is not Kind.EMBEDDING or arch.tied:
            total += tensor.elements
    return total


def _plain(name: str, shape: tuple[int, ...], kind: Kind, cut: Cut = Cut.WHOLE, layer: int | None = None) -> Tensor:
    return Tensor(name, shape, kind, cut, layer, linear=False)


def _layer(arch: Architecture, layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}."
    yield _plain(prefix + "input_layernorm.weight", (arch.hidden,), Kind.NORM, layer=layer)
    if arch.mla:
        yield from _mla(arch, prefix + "self_attn.", layer)
    else:
        yield from _gqa(arch, prefix + "self_attn.", layer)
    yield _plain(prefix + "post_attention_layernorm.weight", (arch.hidden,), Kind.NORM, layer=layer)
    moe = arch.moe
    if moe and (layer in moe.layers or layer >= arch.layers):
        yield from _experts(arch, prefix + "mlp.", layer)
    else:
        yield from _mlp(arch, prefix + "mlp.", layer, arch.intermediate, Kind.DENSE_MLP)


def _gqa(arch: Architecture, prefix: str, layer: int) -> Iterator[Tensor]:
    sides = (
        ("q_proj", arch.heads * arch.head_dim, Cut.OUT),
        ("k_proj", arch.kv_heads * arch.head_dim, Cut.KV),
        ("v_proj", arch.kv_heads * arch.head_dim, Cut.KV),
    )
    for name, out, cut in sides:
        yield Tensor(f"{prefix}{name}.weight", (out, arch.hidden), Kind.ATTENTION, cut, layer)
        if arch.qkv_bias:
            yield _plain(f"{prefix}{name}.bias", (out,), Kind.ATTENTION, cut, layer)
    yield Tensor(prefix + "o_proj.weight", (arch.hidden, arch.heads * arch.head_dim), Kind.ATTENTION, Cut.IN, layer)
    if arch.o_bias:
        yield _plain(prefix + "o_proj.bias", (arch.hidden,), Kind.ATTENTION, layer=layer)
    if arch.qk_norm:
        yield _plain(prefix + "q_norm.weight", (arch.head_dim,), Kind.NORM, layer=layer)
        yield _plain(prefix + "k_norm.weight", (arch.head_dim,), Kind.NORM, layer=layer)


def _mla(arch: Architecture, prefix: str, layer: int) -> Iterator[Tensor]:
    mla = arch.mla
    assert mla is not None

    def linear(name: str, out: int, into: int, cut: Cut, kind: Kind = Kind.ATTENTION) -> Tensor:
        return Tensor(f"{prefix}{name}.weight", (out, into), kind, cut, layer)

    query = arch.heads * mla.qk_head_dim
    if mla.q_lora_rank:
        yield linear("q_a_proj", mla.q_lora_rank, arch.hidden, Cut.WHOLE)
        if arch.qkv_bias:
            yield _plain(prefix + "q_a_proj.bias", (mla.q_lora_rank,), Kind.ATTENTION, layer=layer)
        yield _plain(prefix + "q_a_layernorm.weight", (mla.q_lora_rank,), Kind.NORM, layer=layer)
        yield linear("q_b_proj", query, mla.q_lora_rank, Cut.OUT)
    else:
        yield linear("q_proj", query, arch.hidden, Cut.OUT)
    yield linear("kv_a_proj_with_mqa", mla.latent, arch.hidden, Cut.WHOLE)
    if arch.qkv_bias:
        yield _plain(prefix + "kv_a_proj_with_mqa.bias", (mla.latent,), Kind.ATTENTION, layer=layer)
    yield _plain(prefix + "kv_a_layernorm.weight", (mla.kv_lora_rank,), Kind.NORM, layer=layer)
    yield linear("kv_b_proj", arch.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, Cut.OUT)
    yield linear("o_proj", arch.hidden, arch.heads * mla.v_head_dim, Cut.IN)
    if arch.o_bias:
        yield _plain(prefix + "o_proj.bias", (arch.hidden,), Kind.ATTENTION, layer=layer)
    dsa = arch.dsa
    if dsa and (layer in dsa.layers or layer >= arch.layers):
        assert mla.q_lora_rank
        yield linear("indexer.wq_b", dsa.heads * dsa.head_dim, mla.q_lora_rank, Cut.WHOLE, Kind.INDEXER)
        yield linear("indexer.wk", dsa.head_dim, arch.hidden, Cut.WHOLE, Kind.INDEXER)
        yield _plain(prefix + "indexer.k_norm.weight", (dsa.head_dim,), Kind.INDEXER, layer=layer)
        yield _plain(prefix + "indexer.k_norm.bias", (dsa.head_dim,), Kind.INDEXER, layer=layer)
        yield _plain(prefix + "indexer.weights_proj.weight", (dsa.heads, arch.hidden), Kind.INDEXER, layer=layer)


def _mlp(arch: Architecture, prefix: str, layer: int, width: int, kind: Kind) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{prefix}{name}.weight", (width, arch.hidden), kind, Cut.OUT, layer)
        if arch.mlp_bias:
            yield _plain(f"{prefix}{name}.bias", (width,), kind, Cut.OUT, layer)
    yield Tensor(prefix + "down_proj.weight", (arch.hidden, width), kind, Cut.IN, layer)
    if arch.mlp_bias:
        yield _plain(prefix + "down_proj.bias", (arch.hidden,), kind, layer=layer)


def _experts(arch: Architecture, prefix: str, layer: int) -> Iterator[Tensor]:
    moe = arch.moe
    assert moe is not None
    yield _plain(prefix + "gate.weight", (moe.experts, arch.hidden), Kind.ROUTER, layer=layer)
    if moe.router_bias:
        name = prefix + "gate.e_score_correction_bias"
        yield Tensor(name, (moe.experts,), Kind.ROUTER, Cut.WHOLE, layer, linear=False, float32=True)
    wide, narrow = (moe.intermediate, arch.hidden), (arch.hidden, moe.intermediate)
    for name, shape, cut in (
        ("gate_proj", wide, Cut.EXPERT_OUT),
        ("up_proj", wide, Cut.EXPERT_OUT),
        ("down_proj", narrow, Cut.EXPERT_IN),
    ):
        yield Tensor(f"{prefix}experts.{{e}}.{name}.weight", shape, Kind.EXPERT, cut, layer, copies=moe.experts)
    if moe.shared:
        yield from _mlp(arch, prefix + "shared_experts.", layer, moe.intermediate * moe.shared, Kind.SHARED_EXPERT)


def _mtp(arch: Architecture, layer: int) -> Iterator[Tensor]:
    """One multi-token-prediction layer: a decoder layer and what joins it to the backbone."""
    prefix = f"model.layers.{layer}."
    yield from _layer(arch, layer)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _plain(f"{prefix}{name}.weight", (arch.hidden,), Kind.MTP, layer=layer)
    yield _plain(prefix + "eh_proj.weight", (arch.hidden, 2 * arch.hidden), Kind.MTP, layer=layer)
    if arch.mtp_copies_embedding:
        for name in ("embed_tokens", "shared_head.head"):
            yield _plain(f"{prefix}{name}.weight", (arch.vocab, arch.hidden), Kind.MTP, Cut.VOCAB, layer)
