"""Time of a forward step from first principles and a few fitted constants: the one cost model of planner and simulator.

A decode step reads every weight it touches and every KV row of its requests; a prefill step multiplies. Each takes
`max(bytes / bandwidth, FLOP / peak)` on the GPU that has most to do, plus fixed costs a layer and a request, which
dominate at small batches.

The fitted constants are in `Constants`; how well they do, `pageferry plan --published` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from cluster.plan.architecture import Architecture
from cluster.plan.facts import Gpu, PlanError
from cluster.plan.formats import WeightFormat, index_row_bytes, kv_row_bytes
from cluster.plan.memory import PoolSettings
from cluster.plan.sharding import Parallel, held_shape
from cluster.plan.tensors import Kind, active_parameters, tensors


@dataclass(frozen=True)
class Constants:
    """What arithmetic cannot give. All are inputs (`--set layer_overhead_us=...`), and `--calibrate` fits them.

    layer_overhead_us: fixed time a layer and step (launches, all-reduces, small kernels).
    request_overhead_us: time a layer, step and request beside reading its rows (attention tiles, routing, sampling).
    fp8_kv_us: time a layer and step that an FP8 cache adds (quantising new rows, dequantising kernels).
    fp8_experts_us: least time a layer for the matmuls of FP8 weights with routed experts, whose grouped kernels do not
    get faster below some batch; nothing is added once reading the weights takes longer.
    prefill_efficiency: share of the BF16 peak that prefill reaches with BF16 activations. Low, as sparse experts are;
    dense models reach 0.4 to 0.6: give it yours.
    fp8_prefill_gain: how much faster than that prefill is with FP8 weights (multiplied in FP8).
    memory_efficiency: share of the data-sheet bandwidth. Assumed, not fitted: what streaming kernels usually reach.

    The defaults are those of 8 x H200, TP 8. `cluster.plan.published` says which published rates they were fitted to
    (four of Kimi K2.6, one of GLM 5.2, and both prefill rates) and how the rates come out that they were not.
    """

    layer_overhead_us: float = 93.85
    request_overhead_us: float = 1.926
    fp8_kv_us: float = 12.0
    fp8_experts_us: float = 105.6
    prefill_efficiency: float = 0.1067
    fp8_prefill_gain: float = 1.175
    memory_efficiency: float = 0.9

    def __post_init__(self) -> None:
        for name in ("layer_overhead_us", "request_overhead_us", "fp8_kv_us", "fp8_experts_us"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} {getattr(self, name)} must not be negative")
        for name in ("prefill_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(f"{name} {getattr(self, name)} must be above 0 and at most 1")
        if self.fp8_prefill_gain <= 0:
            raise PlanError(f"fp8_prefill_gain {self.fp8_prefill_gain} must be above 0")


# One core of a small cloud machine, with the bandwidth and peak of the CPU entry in facts.py: chosen so that SmolLM2
# 135M gives what was seen on one, about 27 tok/s alone and 300 at 24 requests.
CPU_CONSTANTS = Constants(400.0, 0.0, 0.0, 0.0, prefill_efficiency=1.0, fp8_prefill_gain=1.0, memory_efficiency=1.0)


def constants_for(gpu: Gpu) -> Constants:
    """The documented constants for a kind of device."""
    return CPU_CONSTANTS if gpu.is_cpu else Constants()


@dataclass(frozen=True)
class StepCost:
    """One step, seconds. `seconds = overhead_s + max(memory_s, compute_s)`."""

    overhead_s: float
    weights_s: float
    kv_s: float
    compute_s: float

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.kv_s

    @property
    def seconds(self) -> float:
        return self.overhead_s + max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        """What most of the time goes to: `overhead`, `weights`, `kv` or `compute`."""
        parts = {"overhead": self.overhead_s}
        if self.compute_s > self.memory_s:
            parts["compute"] = self.compute_s
        else:
            parts |= {"weights": self.weights_s, "kv": self.kv_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Roofline:
    """Step times of one replica. Plain numbers only, so a simulator can call it at every step.

    Bytes are per GPU; `expert_bytes` is one routed expert over all sparse layers, per GPU. `flops_per_token` is the
    replica's (all GPUs). `*_flops_per_pair` is attention between one new token and one cached token. `read_topk` is
    the most cached tokens whose rows a token reads (sparse attention), 0 for all; its indexer looks at every cached
    token and runs whole on each tensor-parallel rank (`index_flops_per_pair`).
    """

    gpu: Gpu
    parallel: Parallel
    layers: int
    dense_bytes: float
    expert_bytes: float
    experts: int
    experts_active: int
    kv_row_bytes: float
    index_row_bytes: float
    read_topk: int
    flops_per_token: float
    decode_flops_per_pair: float
    prefill_flops_per_pair: float
    index_flops_per_pair: float
    decode_tflops: float
    fp8_weights: bool = False
    fp8_kv: bool = False
    chunk_tokens: int = 8192
    constants: Constants = field(default_factory=Constants)

    @classmethod
    def of(cls, arch: Architecture, settings: PoolSettings, constants: Constants | None = None) -> Self:
        """The roofline of one replica of a pool."""
        parallel, weights = settings.parallel, settings.weights
        dense, expert = _bytes_read(arch, weights, parallel)
        heads = max(1, arch.kv_heads // parallel.tp)
        owners = len(arch.dsa.layers) if arch.dsa else 0
        return cls(
            gpu=settings.gpu,
            parallel=parallel,
            layers=arch.layers,
            dense_bytes=dense,
            expert_bytes=expert,
            experts=arch.moe.experts if arch.moe else 0,
            experts_active=arch.moe.active if arch.moe else 0,
            kv_row_bytes=arch.layers * kv_row_bytes(arch, settings.kv, heads),
            index_row_bytes=owners * index_row_bytes(arch),
            read_topk=arch.dsa.topk if arch.dsa else 0,
            flops_per_token=2.0 * active_parameters(arch),
            decode_flops_per_pair=_decode_pair_flops(arch),
            prefill_flops_per_pair=_prefill_pair_flops(arch),
            index_flops_per_pair=2.0 * owners * arch.dsa.heads * arch.dsa.head_dim if arch.dsa else 0.0,
            decode_tflops=settings.gpu.tflops(weights.name),
            fp8_weights=weights.name.startswith("fp8"),
            fp8_kv=settings.kv.startswith("fp8"),
            chunk_tokens=settings.batched_tokens,
            constants=constants or constants_for(settings.gpu),
        )

    @property
    def _bandwidth(self) -> float:
        return self.gpu.hbm_tb_s * 1e12 * self.constants.memory_efficiency

    @property
    def _ranks(self) -> int:
        return self.parallel.tp * self.parallel.dp

    def experts_touched(self, tokens: float) -> float:
        """Distinct experts a layer reads for `tokens` tokens, routed evenly: E (1 - (1 - k/E)^tokens)."""
        if not self.experts:
            return 0.0
        missed: float = (1.0 - self.experts_active / self.experts) ** tokens
        return self.experts * (1.0 - missed)

    def decode_step(self, batch: int, context_tokens_total: int) -> StepCost:
        """One token for each of `batch` requests that hold `context_tokens_total` tokens of KV together.

        Pipeline stages work on `pp` micro-batches at once, so a step is one micro-batch through all stages.
        """
        if batch < 1:
            return StepCost(0.0, 0.0, 0.0, 0.0)
        micro = max(1.0, batch / self.parallel.pp)
        context = context_tokens_total / batch * micro
        rows = min(context, micro * self.read_topk) if self.read_topk else context
        weights = self.dense_bytes + self.experts_touched(micro) * self.expert_bytes
        kv = (rows * self.kv_row_bytes + context * self.index_row_bytes) / self.parallel.dp
        flops = (micro * self.flops_per_token + rows * self.decode_flops_per_pair) / self._ranks
        flops += context * self.index_flops_per_pair / self.parallel.dp
        return self._cost(weights, kv, flops, self.decode_tflops, steps=1, requests=micro)

    def decode_step_seconds(self, batch: int, context_tokens_total: int) -> float:
        return self.decode_step(batch, context_tokens_total).seconds

    def decode_tokens_per_second(self, batch: int, context_tokens_total: int) -> float:
        """Output tokens a second of the replica at a steady batch."""
        return batch / self.decode_step_seconds(batch, context_tokens_total) if batch else 0.0

    def prefill(self, tokens: int, context_tokens: int = 0) -> StepCost:
        """`tokens` prompt tokens of one request after `context_tokens` cached ones, in chunks of `chunk_tokens`."""
        if tokens < 1:
            return StepCost(0.0, 0.0, 0.0, 0.0)
        steps = -(-tokens // self.chunk_tokens)
        per_step = min(tokens, self.chunk_tokens)
        weights = steps * (self.dense_bytes + self.experts_touched(per_step) * self.expert_bytes)
        # Later chunks read what the earlier ones wrote; each row is also written once.
        reread = sum(context_tokens + step * self.chunk_tokens for step in range(steps))
        kv = (reread + tokens) * (self.kv_row_bytes + self.index_row_bytes)
        seen = self.read_topk if self.read_topk else context_tokens + tokens
        pairs = _pairs(tokens, context_tokens, seen)
        flops = (tokens * self.flops_per_token + pairs * self.prefill_flops_per_pair) / self._ranks
        every_pair = _pairs(tokens, context_tokens, context_tokens + tokens)
        flops += every_pair * self.index_flops_per_pair / self.parallel.dp
        peak = self.gpu.bf16_tflops * self.constants.prefill_efficiency
        if self.fp8_weights and self.gpu.fp8_tflops:
            peak *= self.constants.fp8_prefill_gain
        return self._cost(weights, kv, flops, peak, steps)

    def prefill_seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Time to first token of a prompt that has the replica to itself."""
        return self.prefill(tokens, context_tokens).seconds

    def prefill_tokens_per_second(self, tokens: int) -> float:
        """Prompt tokens a second of the replica; pipeline stages work on different prompts."""
        return self.parallel.pp * tokens / self.prefill_seconds(tokens)

    def _cost(
        self, weights: float, kv: float, flops: float, tflops: float, steps: int, requests: float = 0.0
    ) -> StepCost:
        fixed = self.constants
        layer_us = fixed.layer_overhead_us + fixed.request_overhead_us * requests + fixed.fp8_kv_us * self.fp8_kv
        least_us = fixed.fp8_experts_us if self.fp8_weights and self.experts else 0.0
        return StepCost(
            overhead_s=steps * self.layers * layer_us * 1e-6,
            weights_s=max(weights / self._bandwidth, steps * self.layers * least_us * 1e-6),
            kv_s=kv / self._bandwidth,
            compute_s=flops / (tflops * 1e12) if tflops else 0.0,
        )


def _pairs(tokens: int, context: int, seen: int) -> float:
    """(new token, earlier token) pairs when each attends to at most `seen`: causal, so half of tokens squared."""
    full = tokens * context + tokens * (tokens + 1) / 2
    return min(full, float(tokens) * seen)


def _bytes_read(arch: Architecture, weights: WeightFormat, parallel: Parallel) -> tuple[float, float]:
    """`(dense, one expert)` weight bytes per GPU that a step through all stages reads.

    The embedding table is read a row a token, so it counts only where it is the output head too.
    """
    dense = expert = 0.0
    for tensor in tensors(arch, mtp=False):
        if tensor.kind is Kind.EXPERT and arch.moe:
            whole = weights.tensor_bytes(tensor) / parallel.expert_ranks
            expert += whole / arch.moe.experts
        elif tensor.kind is not Kind.EMBEDDING or arch.tied:
            dense += weights.tensor_bytes(tensor, *held_shape(tensor, arch, parallel))
    return dense, expert


def _decode_pair_flops(arch: Architecture) -> float:
    """Score and weigh one cached token for one new one, all layers and heads. MLA works on the latent row."""
    if arch.mla:
        return 2.0 * arch.layers * arch.heads * (arch.mla.latent + arch.mla.kv_lora_rank)
    return 4.0 * arch.layers * arch.heads * arch.head_dim


def _prefill_pair_flops(arch: Architecture) -> float:
    if arch.mla:
        return 2.0 * arch.layers * arch.heads * (arch.mla.qk_head_dim + arch.mla.v_head_dim)
    return 4.0 * arch.layers * arch.heads * arch.head_dim
