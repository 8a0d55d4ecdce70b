"""What one GPU of a replica holds: tensors cut over tensor, pipeline, data and expert parallel ranks.

A replica is `tp * pp * dp` GPUs. `dp` ranks each attend over their own requests with their own KV cache
(data-parallel attention); attention weights are whole on each of them and cut over `tp` inside. Experts are cut over
all `tp * dp` ranks: each expert's width by default, whole experts with `ep`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cluster.plan.architecture import Architecture
from cluster.plan.facts import PlanError
from cluster.plan.formats import FP8_BLOCK, WeightFormat
from cluster.plan.tensors import Cut, Kind, Tensor, tensors

# vLLM pads the vocabulary to a multiple of this before cutting it.
VOCAB_PADDING = 64
# Classes whose router vLLM keeps in float32 whatever the checkpoint holds.
FLOAT32_ROUTERS = ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")


@dataclass(frozen=True)
class Parallel:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        return self.tp * self.dp

    def describe(self) -> str:
        parts = [f"TP {self.tp}"]
        parts += [f"PP {self.pp}"] if self.pp > 1 else []
        parts += [f"DP attention {self.dp}"] if self.dp > 1 else []
        parts += ["EP"] if self.ep else []
        return ", ".join(parts)


def check_parallel(arch: Architecture, parallel: Parallel, weights: WeightFormat) -> None:
    """Raises PlanError when the engine could not cut the model this way, naming what would do."""
    tp, ranks = parallel.tp, parallel.expert_ranks
    for field, value in (("tp", tp), ("pp", parallel.pp), ("dp_attention", parallel.dp)):
        if value < 1:
            raise PlanError(f"{field} {value} must be at least 1")
    if arch.heads % tp:
        raise PlanError(f"tp {tp} does not divide {arch.heads} attention heads; use one of {_divisors(arch.heads)}")
    if arch.mla is None and max(arch.kv_heads, tp) % min(arch.kv_heads, tp):
        raise PlanError(f"tp {tp} and {arch.kv_heads} KV heads: one must divide the other")
    if parallel.pp > arch.layers:
        raise PlanError(f"pp {parallel.pp} is more stages than the {arch.layers} layers of {arch.name}")
    if parallel.ep and arch.moe is None:
        raise PlanError(f"ep needs experts; {arch.name} is dense")
    if arch.moe and not parallel.ep and arch.moe.intermediate % ranks:
        raise PlanError(
            f"experts are {arch.moe.intermediate} wide, which {ranks} ranks do not divide; use --ep (whole experts) or "
            "fewer ranks"
        )
    for tensor in _kinds(arch):
        _check_blocks(tensor, arch, parallel, weights)


def _kinds(arch: Architecture) -> Iterator[Tensor]:
    """One layer of each sort: the others have the same shapes."""
    first: dict[tuple[Kind, tuple[int, ...], Cut], Tensor] = {}
    for tensor in tensors(arch, mtp=False):
        first.setdefault((tensor.kind, tensor.shape, tensor.cut), tensor)
    return iter(first.values())


def _check_blocks(tensor: Tensor, arch: Architecture, parallel: Parallel, weights: WeightFormat) -> None:
    """INT4 groups and, where a side is cut, FP8 blocks must come out whole, or the engine does not load them."""
    storage = weights.storage(tensor)
    if storage not in ("fp8", "int4"):
        return
    (out, into), _ = held_shape(tensor, arch, parallel)
    expert = tensor.kind is Kind.EXPERT
    way_out = "use --ep (whole experts) or fewer ranks" if expert and not parallel.ep else "use fewer ranks"
    name = tensor.name.split(".", 3)[-1].replace("{e}", "*")
    if storage == "int4" and into % weights.group:
        if tensor.shape[1] % weights.group:
            way_out = f"use a group that divides {tensor.shape[1]}, such as {math.gcd(tensor.shape[1], 128)}"
        raise PlanError(f"{name} has {into} inputs on a GPU, not a multiple of group {weights.group}; {way_out}")
    sides = ((out, tensor.shape[0]), (into, tensor.shape[1]))
    if storage == "fp8" and any(side != whole and side % FP8_BLOCK for side, whole in sides):
        raise PlanError(f"{name} is {out} x {into} on a GPU, not whole {FP8_BLOCK} x {FP8_BLOCK} blocks; {way_out}")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def stages(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; what does not divide goes to the stages before the last, as in vLLM."""
    sizes = [layers // pp] * pp
    for offset in range(2, layers % pp + 2):
        sizes[-offset] += 1
    starts = [sum(sizes[:rank]) for rank in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def held_shape(tensor: Tensor, arch: Architecture, parallel: Parallel) -> tuple[tuple[int, ...], int]:
    """`(shape, copies)` of a tensor on one rank; the largest rank's where it does not divide."""
    first, *rest = tensor.shape
    tp, ranks = parallel.tp, parallel.expert_ranks

    def cut(side: int, parts: int) -> int:
        return -(-side // parts)

    match tensor.cut:
        case Cut.WHOLE:
            return tensor.shape, tensor.copies
        case Cut.OUT:
            return (cut(first, tp), *rest), tensor.copies
        case Cut.IN:
            return (first, cut(rest[0], tp)), tensor.copies
        case Cut.KV:
            return (cut(first, min(tp, arch.kv_heads)), *rest), tensor.copies
        case Cut.VOCAB:
            padded = cut(first, VOCAB_PADDING) * VOCAB_PADDING
            return (cut(padded, tp), *rest), tensor.copies
        case Cut.EXPERT_OUT | Cut.EXPERT_IN if parallel.ep:
            return tensor.shape, cut(tensor.copies, ranks)
        case Cut.EXPERT_OUT:
            return (cut(first, ranks), *rest), tensor.copies
        case Cut.EXPERT_IN:
            return (first, cut(rest[0], ranks)), tensor.copies


@dataclass(frozen=True)
class Held:
    """Weight bytes on one GPU of a pipeline stage. `replicated` is the part beyond this GPU's even share of each
    tensor; `absorbed` are vLLM's BF16 copies of MLA's kv_b_proj, folded into queries and outputs at decode."""

    by_kind: dict[Kind, int]
    replicated: int
    absorbed: int

    @property
    def total(self) -> int:
        return sum(self.by_kind.values()) + self.absorbed


@lru_cache(maxsize=256)
def held_weights(arch: Architecture, weights: WeightFormat, parallel: Parallel, mtp: bool) -> tuple[Held, ...]:
    """What a GPU of each pipeline stage holds once the engine has loaded the weights.

    `mtp`: the multi-token-prediction layers are loaded too (speculative decoding), on the last stage.
    """
    check_parallel(arch, parallel, weights)
    split = stages(arch.layers, parallel.pp)
    last = parallel.pp - 1
    owner = {layer: rank for rank, part in enumerate(split) for layer in part}
    by_kind: list[dict[Kind, int]] = [{} for _ in split]
    replicated = [0] * parallel.pp
    for tensor in tensors(arch, mtp):
        for rank in _ranks(tensor, arch, owner, last):
            shape, copies = held_shape(tensor, arch, parallel)
            size = _resident_bytes(tensor, arch, weights, shape, copies)
            by_kind[rank][tensor.kind] = by_kind[rank].get(tensor.kind, 0) + size
            even = _resident_bytes(tensor, arch, weights, tensor.shape, tensor.copies) / (parallel.tp * parallel.dp)
            replicated[rank] += max(0, round(size - even))
    absorbed = [_absorbed_bytes(arch, parallel.tp) * len(part) for part in split]
    if mtp:
        absorbed[last] += _absorbed_bytes(arch, parallel.tp) * arch.mtp_layers
    return tuple(Held(*entry) for entry in zip(by_kind, replicated, absorbed))


def _ranks(tensor: Tensor, arch: Architecture, owner: dict[int, int], last: int) -> list[int]:
    if tensor.layer is not None:
        return [owner.get(tensor.layer, last)]
    if tensor.kind is Kind.EMBEDDING:
        return [0, last] if arch.tied and last else [0]
    return [last]


def _resident_bytes(
    tensor: Tensor, arch: Architecture, weights: WeightFormat, shape: tuple[int, ...], copies: int
) -> int:
    size = weights.tensor_bytes(tensor, shape, copies)
    if tensor.kind is Kind.ROUTER and not tensor.float32 and arch.kind in FLOAT32_ROUTERS:
        return 2 * size
    return size


def _absorbed_bytes(arch: Architecture, tp: int) -> int:
    if arch.mla is None:
        return 0
    return 2 * -(-arch.heads // tp) * (arch.mla.qk_nope_head_dim + arch.mla.v_head_dim) * arch.mla.kv_lora_rank
