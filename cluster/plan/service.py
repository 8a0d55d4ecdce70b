"""A prefill and a decode pool together: rates, what crosses between them, and what a token costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cluster.capacity import Capacity, of_request, staging_bytes
from cluster.plan.facts import PlanError
from cluster.plan.formats import index_row_bytes, kv_row_bytes
from cluster.plan.memory import PoolPlan
from cluster.plan.roofline import Constants, Roofline, StepCost


@dataclass(frozen=True)
class Workload:
    """What clients send. tpot_ms: the slowest time a token that is accepted, None for any. link_gb_s: one direction
    between nodes for each GPU (50: one 400 Gb/s port). gpu_price: per GPU and hour, any currency. prefix_hit: share of
    the prompt that the prefill replica has cached; it is still read and handed over. failed: share of requests whose
    work was paid for and whose answer was not delivered. retried: share of requests whose work was done twice."""

    input_tokens: int = 8192
    output_tokens: int = 1000
    tpot_ms: float | None = None
    link_gb_s: float = 50.0
    gpu_price: float | None = None
    prefix_hit: float = 0.0
    failed: float = 0.0
    retried: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("prefix_hit", "failed", "retried"):
            if not 0 <= getattr(self, name) < 1:
                raise PlanError(f"{name} {getattr(self, name)} must be at least 0 and below 1")
        for name in ("tpot_ms", "gpu_price", "link_gb_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise PlanError(f"{name} {value} must be above 0")

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def cached_tokens(self) -> int:
        return int(self.input_tokens * self.prefix_hit)

    @property
    def work_per_answer(self) -> float:
        """Requests computed for each answer that a client got."""
        return (1 + self.retried) / (1 - self.failed)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill has to compute; at least the last one."""
        return max(1, self.input_tokens - self.cached_tokens)


@dataclass(frozen=True)
class ServicePlan:
    """Derived from the two pools and the workload. Rates are a replica's unless named otherwise."""

    prefill: PoolPlan
    decode: PoolPlan
    work: Workload
    prefill_constants: Constants | None = None
    decode_constants: Constants | None = None

    def __post_init__(self) -> None:
        """Raises PlanError when a pool cannot hold one request, within `tpot_ms` where it is given."""
        if self.work.tokens > self.decode.arch.context:
            raise PlanError(
                f"input_tokens + output_tokens = {self.work.tokens:,} is above the {self.decode.arch.context:,} tokens "
                f"{self.decode.arch.name} was made for"
            )
        if not self.decode_batch:
            tight = "" if self.work.tpot_ms is None else f" within {self.work.tpot_ms:g} ms a token"
            raise PlanError(f"the decode pool does not hold one request of {self.work.tokens:,} tokens{tight}")
        if not self.prefill.requests_of(self.work.input_tokens):
            raise PlanError(f"the prefill pool does not hold one prompt of {self.work.input_tokens:,} tokens")

    @cached_property
    def prefill_line(self) -> Roofline:
        return Roofline.of(self.prefill.arch, self.prefill.settings, self.prefill_constants)

    @cached_property
    def decode_line(self) -> Roofline:
        return Roofline.of(self.decode.arch, self.decode.settings, self.decode_constants)

    @property
    def mean_context(self) -> int:
        """Tokens a decoding request holds on average: the prompt and half its output."""
        return self.work.input_tokens + self.work.output_tokens // 2

    @cached_property
    def request(self) -> Capacity:
        """What one request takes, as admission counts it."""
        work, pool = self.work, self.decode.settings
        page_bytes = self.wire_bytes_token * pool.block_tokens * self._copies // pool.parallel.tp
        return of_request(
            work.input_tokens,
            work.output_tokens,
            block_tokens=pool.block_tokens,
            page_bytes=page_bytes,
            ranks=pool.parallel.tp,
            computed_tokens=work.computed_tokens,
            prompt_token_s=self.prefill_cost.seconds / work.computed_tokens,
        )

    @property
    def decode_rank(self) -> Capacity:
        """What a data-parallel rank of a decode replica has. vLLM keeps one page of each cache for itself."""
        return Capacity(max(0, self.decode.blocks - 1), self.decode.settings.sequences)

    @cached_property
    def decode_batch(self) -> int:
        """Requests a decode replica runs at once: as many as fit at full length, as the step allows, within TPOT."""
        batch = int(self.decode_rank.requests(self.request)) * self.decode.settings.parallel.dp
        if self.work.tpot_ms is not None and batch:
            low, high = 0, batch
            while low < high:
                middle = (low + high + 1) // 2
                step = self.decode_line.decode_step_seconds(middle, middle * self.mean_context)
                low, high = (middle, high) if step * 1e3 <= self.work.tpot_ms else (low, middle - 1)
            batch = low
        return batch

    @property
    def decode_short_of(self) -> str:
        """What keeps the batch from being larger."""
        at_most = int(self.decode_rank.requests(self.request)) * self.decode.settings.parallel.dp
        if self.decode_batch < at_most:
            return "time a token"
        return self.decode_rank.scarcest(self.request)

    @property
    def decode_tokens_s(self) -> float:
        return self.decode_line.decode_tokens_per_second(self.decode_batch, self.decode_batch * self.mean_context)

    @cached_property
    def prefill_cost(self) -> StepCost:
        """One prompt that has the replica to itself."""
        return self.prefill_line.prefill(self.work.computed_tokens, self.work.cached_tokens)

    @property
    def prefill_requests_s(self) -> float:
        """Pipeline stages work on different prompts."""
        return self.prefill.settings.parallel.pp / self.prefill_cost.seconds

    @property
    def tpot_ms(self) -> float:
        return self.decode_line.decode_step_seconds(self.decode_batch, self.decode_batch * self.mean_context) * 1e3

    @property
    def wire_bytes_token(self) -> int:
        """One token's rows in the decode pool's format, over all layers, one copy."""
        arch, kv = self.decode.arch, self.decode.settings.kv
        owners = len(arch.dsa.layers) if arch.dsa else 0
        return arch.layers * kv_row_bytes(arch, kv) + owners * index_row_bytes(arch)

    @property
    def wire_bytes_request(self) -> int:
        """Bytes of one prompt's pages, whole pages, one copy."""
        block = self.decode.settings.block_tokens
        return staging_bytes(self.work.input_tokens, block, self.wire_bytes_token * block, 1)

    @property
    def wire_bytes_request_ranks(self) -> int:
        """What all tensor-parallel ranks of a replica fetch together. MLA rows are the same on each, so each fetches
        all of them; GQA ranks share the heads until they outnumber them."""
        return self.wire_bytes_request * self._copies

    @property
    def _copies(self) -> int:
        arch, tp = self.decode.arch, self.decode.settings.parallel.tp
        return tp if arch.mla else max(1, tp // arch.kv_heads)

    @property
    def transfer_seconds(self) -> float:
        """One request's pages over the links of a replica, all ranks at once."""
        tp = self.decode.settings.parallel.tp
        return self.wire_bytes_request_ranks / (tp * self.work.link_gb_s * 1e9)

    @property
    def ttft_seconds(self) -> float:
        """Prefill, the last pages' way over, and the decode step that samples the first token. Empty queues."""
        last = self.transfer_seconds * min(1.0, self.prefill_line.chunk_tokens / self.work.input_tokens)
        return self.prefill_cost.seconds + last + self.tpot_ms / 1e3

    @property
    def cost_per_million(self) -> tuple[float, float] | None:
        """`(per million prompt tokens, per million output tokens)` that were delivered by pools that are kept busy,
        failed and retried work included; None without a GPU price."""
        if self.work.gpu_price is None:
            return None
        second = self.work.gpu_price / 3600 * self.work.work_per_answer
        prompt = second * self.prefill.settings.parallel.gpus / (self.prefill_requests_s * self.work.input_tokens)
        output = second * self.decode.settings.parallel.gpus / self.decode_tokens_s
        return prompt * 1e6, output * 1e6
