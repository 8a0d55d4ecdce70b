"""What fits: a replica's memory divided into weights, workspace, reserve and KV pages, in the engine's own units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from cluster import capacity
from cluster.plan.architecture import Architecture
from cluster.plan.facts import GIB, Gpu, PlanError
from cluster.plan.formats import WeightFormat, index_row_bytes, kv_row_bytes
from cluster.plan.sharding import Held, Parallel, held_weights, stages
from cluster.plan.tensors import Kind, tensors

# vLLM 0.32's default for gpu_memory_utilization.
UTILIZATION = 0.92
# CUDA context, NCCL buffers, CUDA graphs and allocator slack, GiB a GPU. vLLM measures these at start; before there
# is a GPU they are an assumption, and an input.
RUNTIME_GIB = 3.0
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class PoolSettings:
    """One pool as it would be run: `replicas` engines of `parallel.gpus` GPUs each.

    context: tokens of one request at its longest (prompt and output). concurrency: requests that must be resident at
    once in the whole pool. utilization: share of HBM the engine may use. activation_gib: peak of a forward pass, GiB a
    GPU; None estimates it (`activation_bytes`). runtime_gib: see RUNTIME_GIB. kv_space_gib: KV bytes given outright, as
    on a CPU; nothing is then subtracted. blocks_override: pages of each cache, whatever the room
    (num_gpu_blocks_override). batched_tokens, sequences: the engine's step limits. mtp: load the
    multi-token-prediction layers, with a KV cache of their own. extra_weights_gib: what the config does not describe
    (a vision tower), whole on every GPU.
    """

    gpu: Gpu
    weights: WeightFormat
    kv: str
    parallel: Parallel = field(default_factory=Parallel)
    replicas: int = 1
    block_tokens: int = BLOCK_TOKENS
    context: int = 8192
    concurrency: int = 1
    utilization: float = UTILIZATION
    activation_gib: float | None = None
    runtime_gib: float = RUNTIME_GIB
    kv_space_gib: float | None = None
    blocks_override: int | None = None
    batched_tokens: int = 8192
    sequences: int = 256
    mtp: bool = False
    extra_weights_gib: float = 0.0

    def __post_init__(self) -> None:
        for name in ("replicas", "block_tokens", "context", "concurrency", "batched_tokens", "sequences"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} {getattr(self, name)} must be at least 1")
        if not 0 < self.utilization <= 1:
            raise PlanError(f"utilization {self.utilization} must be above 0 and at most 1")
        for name in ("activation_gib", "runtime_gib", "kv_space_gib", "extra_weights_gib"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PlanError(f"{name} {value} must not be negative")
        if self.gpu.is_cpu and not self.kv_space_gib:
            raise PlanError("kv_space_gib is needed on a CPU pool: GiB of KV cache, as in VLLM_CPU_KVCACHE_SPACE")


@dataclass(frozen=True)
class Stage:
    """One GPU of a pipeline stage. `page_bytes` is a page over this stage's layers; `kv_bytes` what pages may take."""

    layers: int
    held: Held
    page_bytes: int
    kv_bytes: int
    blocks_override: int | None = None

    @property
    def blocks(self) -> int:
        if self.blocks_override is not None:
            return self.blocks_override
        return max(0, self.kv_bytes) // self.page_bytes


@dataclass(frozen=True)
class PoolPlan:
    """A pool's memory, derived from `arch` and `settings`; nothing here is a second setting."""

    arch: Architecture
    settings: PoolSettings

    @cached_property
    def checkpoint_bytes(self) -> int:
        """All tensors of the checkpoint, MTP layers included, in the pool's format."""
        weights = self.settings.weights
        return sum(weights.tensor_bytes(t) for t in tensors(self.arch, mtp=True)) + self._extra

    @cached_property
    def checkpoint_by_kind(self) -> dict[Kind, int]:
        by_kind: dict[Kind, int] = {}
        for tensor in tensors(self.arch, mtp=True):
            kind = Kind.MTP if tensor.layer is not None and tensor.layer >= self.arch.layers else tensor.kind
            by_kind[kind] = by_kind.get(kind, 0) + self.settings.weights.tensor_bytes(tensor)
        return by_kind

    @property
    def even_share_bytes(self) -> float:
        """Checkpoint bytes over the GPUs of a replica: the figure usually quoted, below what a GPU really holds."""
        return self.checkpoint_bytes / self.settings.parallel.gpus

    @property
    def _extra(self) -> int:
        return round(self.settings.extra_weights_gib * GIB)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        s = self.settings
        held = held_weights(self.arch, s.weights, s.parallel, s.mtp)
        parts = stages(self.arch.layers, s.parallel.pp)
        found = []
        for rank, (entry, part) in enumerate(zip(held, parts)):
            row = self._layer_rows(part, with_mtp=s.mtp and rank == s.parallel.pp - 1)
            if s.kv_space_gib is not None:
                room = round(s.kv_space_gib * GIB)
            else:
                room = self.usable_bytes - entry.total - self._extra - self.activation_bytes - self.runtime_bytes
            found.append(Stage(len(part), entry, row * s.block_tokens, room, s.blocks_override))
        return tuple(found)

    def _layer_rows(self, layers: range, with_mtp: bool) -> int:
        """Bytes a token takes on one GPU over `layers`: KV rows and the index keys of layers that own an indexer."""
        heads = max(1, self.arch.kv_heads // self.settings.parallel.tp)
        row = kv_row_bytes(self.arch, self.settings.kv, heads)
        extra = self.arch.mtp_layers if with_mtp else 0
        owners = len(self.arch.dsa.layers & set(layers)) + extra if self.arch.dsa else 0
        return (len(layers) + extra) * row + owners * index_row_bytes(self.arch)

    @cached_property
    def tightest(self) -> Stage:
        """The stage with the fewest pages; it sets the number for all."""
        return min(self.stages, key=lambda stage: (stage.blocks, stage.kv_bytes))

    @property
    def resident_bytes(self) -> int:
        """Weights on the fullest GPU once loaded: its cut, what is replicated, MLA's absorbed copies."""
        return max(stage.held.total for stage in self.stages) + self._extra

    @property
    def hbm_bytes(self) -> int:
        return round(self.settings.gpu.hbm_gib * GIB)

    @property
    def usable_bytes(self) -> int:
        return round(self.hbm_bytes * self.settings.utilization)

    @property
    def runtime_bytes(self) -> int:
        return 0 if self.settings.gpu.is_cpu else round(self.settings.runtime_gib * GIB)

    @cached_property
    def activation_bytes(self) -> int:
        s = self.settings
        if s.gpu.is_cpu:
            return 0
        return activation_bytes(self.arch, s) if s.activation_gib is None else round(s.activation_gib * GIB)

    @property
    def kv_bytes_per_token(self) -> int:
        """One copy, whole model: rows of every layer and head, and index keys."""
        whole = replace(self.settings, parallel=Parallel())
        return PoolPlan(self.arch, whole)._layer_rows(range(self.arch.layers), with_mtp=whole.mtp)

    @property
    def kv_bytes_per_token_gpu(self) -> float:
        """On the tightest GPU. MLA rows are whole on every tensor-parallel rank."""
        return self.tightest.page_bytes / self.settings.block_tokens

    @property
    def page_bytes(self) -> int:
        """One page over all layers of one tensor-parallel rank, pipeline stages together."""
        return sum(stage.page_bytes for stage in self.stages)

    @property
    def kv_bytes_gpu(self) -> int:
        return self.tightest.kv_bytes

    @property
    def blocks(self) -> int:
        """Pages of one data-parallel rank of one replica."""
        return self.tightest.blocks

    @property
    def kv_tokens_replica(self) -> int:
        return self.blocks * self.settings.block_tokens * self.settings.parallel.dp

    @property
    def kv_tokens(self) -> int:
        return self.kv_tokens_replica * self.settings.replicas

    def requests_of(self, context: int) -> int:
        """Requests of `context` tokens resident at once in the pool. vLLM keeps one page of each cache for itself."""
        each = capacity.blocks(context, 0, self.settings.block_tokens)
        return max(0, self.blocks - 1) // each * self.settings.parallel.dp * self.settings.replicas

    @property
    def max_requests(self) -> int:
        return self.requests_of(self.settings.context)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest single request that fits beside nothing else."""
        return min(max(0, self.blocks - 1) * self.settings.block_tokens, self.arch.context)

    @property
    def gpus(self) -> int:
        return self.settings.parallel.gpus * self.settings.replicas

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this cannot run as asked; empty when it fits."""
        s, problems = self.settings, _cpu_problems(self.arch, self.settings)
        if s.context > self.arch.context:
            problems.append(
                f"context {s.context:,} is above the {self.arch.context:,} tokens {self.arch.name} was made for"
            )
        if self.kv_bytes_gpu <= 0:
            work = self.activation_bytes + self.runtime_bytes
            problems.append(
                f"weights {self.resident_bytes / GIB:.1f} GiB and workspace {work / GIB:.1f} GiB a GPU exceed the "
                f"{self.usable_bytes / GIB:.1f} GiB that utilization {s.utilization:g} of {s.gpu.hbm_gib:g} GiB leaves"
            )
        elif s.blocks_override and s.blocks_override * self.tightest.page_bytes > self.kv_bytes_gpu:
            taken = s.blocks_override * self.tightest.page_bytes / GIB
            problems.append(
                f"blocks_override {s.blocks_override} takes {taken:.2f} GiB, above the "
                f"{self.kv_bytes_gpu / GIB:.2f} GiB of KV space"
            )
        elif self.requests_of(s.context) < s.concurrency:
            problems.append(
                f"{s.concurrency} requests of {s.context:,} tokens do not fit: the pool holds {self.kv_tokens:,} "
                f"tokens, {self.max_requests} such requests"
            )
        return tuple(problems)

    @property
    def fits(self) -> bool:
        return not self.problems


def _cpu_problems(arch: Architecture, settings: PoolSettings) -> list[str]:
    """What vLLM 0.32's CPU build does not run, whatever the memory."""
    if not settings.gpu.is_cpu:
        return []
    problems = []
    if arch.dsa:
        problems.append(f"{arch.name} has sparse attention, which the CPU build does not run")
    elif arch.mla and settings.kv != "bf16":
        problems.append("kv fp8 with MLA: the CPU build wants a BF16 latent cache")
    return problems


def activation_bytes(arch: Architecture, settings: PoolSettings) -> int:
    """Peak of one forward pass on a GPU, an estimate made of the buffers that are alive together:

    four BF16 copies of the hidden state of every batched token (residual, norm, attention out, MLP out), the widest
    intermediate of a layer (MoE: gate-up and down outputs for each token and active expert), the gathered query, and
    float32 logits of every sequence, twice (logits and sampler).
    """
    tokens, tp = settings.batched_tokens, settings.parallel.tp
    hidden = 4 * 2 * tokens * arch.hidden
    widest = 2 * tokens * 3 * -(-arch.intermediate // tp)
    if arch.moe:
        ranks = 1 if settings.parallel.ep else settings.parallel.expert_ranks
        per_token = arch.moe.active * (3 * -(-arch.moe.intermediate // ranks) + arch.hidden)
        widest = max(widest, 2 * tokens * per_token)
    head = arch.mla.qk_head_dim + arch.mla.v_head_dim if arch.mla else 2 * arch.head_dim
    query = 2 * tokens * -(-arch.heads // tp) * head
    logits = 2 * 4 * settings.sequences * arch.vocab
    return hidden + widest + query + logits


def plan_pool(arch: Architecture, settings: PoolSettings) -> PoolPlan:
    """The pool's memory. Raises PlanError when the engine could not cut the model that way; a plan that is merely
    too large comes back with `problems`."""
    plan = PoolPlan(arch, settings)
    _ = plan.stages
    return plan


def implied_reserve(plan: PoolPlan, tokens: int) -> tuple[float, float]:
    """`(GiB a GPU, utilization)` left over when a replica is known to hold `tokens` of KV.

    What the published capacity says about everything that is neither weights nor KV: the inverse of the plan.
    """
    per_rank = tokens / plan.settings.parallel.dp
    used = plan.resident_bytes + per_rank * plan.kv_bytes_per_token_gpu
    reserve = plan.hbm_bytes - used
    return reserve / GIB, used / plan.hbm_bytes
