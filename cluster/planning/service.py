"""A prefill and a decode pool together: rates, split, what crosses between them, and what a token costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cluster.planning.facts import PlanError
from cluster.planning.formats import index_row_bytes, kv_row_bytes
from cluster.planning.memory import PoolPlan
from cluster.planning.roofline import Constants, Roofline, StepCost

# How far from the best rate per GPU a simpler split may be.
SPLIT_TOLERANCE = 0.05
LARGEST_SPLIT = 8


@dataclass(frozen=True)
class Workload:
    """What clients send. rate: requests a second, None for as many as the GPUs do. tpot_ms: the slowest time a token
    that is accepted, None for any. lease_s: how long staging holds bytes nobody fetches. link_gb_s: one direction
    between nodes for each GPU (50: one 400 Gb/s port). gpu_price: per GPU and hour, any currency. prefix_hit: share of
    the prompt that the prefill replica has cached; it is still read and handed over."""

    input_tokens: int = 8192
    output_tokens: int = 1000
    rate: float | None = None
    tpot_ms: float | None = None
    lease_s: float = 60.0
    link_gb_s: float = 50.0
    gpu_price: float | None = None
    prefix_hit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.prefix_hit < 1:
            raise PlanError(f"prefix_hit {self.prefix_hit} must be at least 0 and below 1")
        for name in ("rate", "tpot_ms", "gpu_price", "lease_s", "link_gb_s"):
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
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill has to compute; at least the last one."""
        return max(1, self.input_tokens - self.cached_tokens)


@dataclass(frozen=True)
class Split:
    """`prefill : decode` replicas, the request rate they sustain and which pool is then full."""

    prefill: int
    decode: int
    requests_s: float
    gpus: int
    busy_prefill: float
    busy_decode: float
    reason: str


@dataclass(frozen=True)
class ServicePlan:
    """Derived from the two pools and the workload. Rates are a replica's unless named otherwise."""

    prefill: PoolPlan
    decode: PoolPlan
    work: Workload
    prefill_constants: Constants | None = None
    decode_constants: Constants | None = None

    def __post_init__(self) -> None:
        longest = max(self.work.tokens, 1)
        if longest > self.decode.arch.context:
            raise PlanError(
                f"input_tokens + output_tokens = {longest:,} is above the {self.decode.arch.context:,} tokens "
                f"{self.decode.arch.name} was made for"
            )

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
    def decode_batch(self) -> int:
        """Requests a decode replica runs at once: as many as fit at full length, as the step allows, within TPOT."""
        per_replica = self.decode.requests_of(self.work.tokens) // self.decode.settings.replicas
        batch = min(per_replica, self.decode.settings.sequences * self.decode.settings.parallel.dp)
        if self.work.tpot_ms is not None and batch:
            low, high = 0, batch
            while low < high:
                middle = (low + high + 1) // 2
                step = self.decode_line.decode_step_seconds(middle, middle * self.mean_context)
                low, high = (middle, high) if step * 1e3 <= self.work.tpot_ms else (low, middle - 1)
            batch = low
        return batch

    @property
    def decode_tokens_s(self) -> float:
        return self.decode_line.decode_tokens_per_second(self.decode_batch, self.decode_batch * self.mean_context)

    @property
    def decode_requests_s(self) -> float:
        return self.decode_tokens_s / self.work.output_tokens

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
        if not self.decode_batch:
            return 0.0
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
        return self.wire_bytes_token * -(-self.work.input_tokens // block) * block

    @property
    def wire_bytes_request_ranks(self) -> int:
        """What all tensor-parallel ranks of a replica fetch together. MLA rows are the same on each, so each fetches
        all of them; GQA ranks share the heads until they outnumber them."""
        arch, tp = self.decode.arch, self.decode.settings.parallel.tp
        copies = tp if arch.mla else max(1, tp // arch.kv_heads)
        return self.wire_bytes_request * copies

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

    def rate(self, prefill: int, decode: int) -> float:
        """Requests a second that so many replicas sustain."""
        return min(prefill * self.prefill_requests_s, decode * self.decode_requests_s)

    def staging_bytes(self, rate: float) -> int:
        """Staging in use at `rate` requests a second: Little's law over the time a request's bytes stay, which is its
        own prefill and transfer; at least two requests, so that one can be written while one is read."""
        held_s = self.prefill_cost.seconds + self.transfer_seconds
        return round(max(2.0, rate * held_s) * self.wire_bytes_request_ranks)

    def staging_bytes_worst(self, rate: float) -> int:
        """If no decode replica came for anything until the lease ran out."""
        return round(max(2.0, rate * self.work.lease_s) * self.wire_bytes_request_ranks)

    def network_gbit_s(self, rate: float) -> float:
        return rate * self.wire_bytes_request_ranks * 8 / 1e9

    def split_of(self, prefill: int, decode: int) -> Split:
        rate = self.rate(prefill, decode)
        gpus = prefill * self.prefill.settings.parallel.gpus + decode * self.decode.settings.parallel.gpus
        busy = rate / (prefill * self.prefill_requests_s), rate / (decode * self.decode_requests_s)
        work = self.work
        full = "prefill" if busy[0] > busy[1] else "decode"
        reason = (
            f"a prefill replica does {self.prefill_requests_s:.2f} prompts/s of {work.input_tokens:,} tokens, a decode "
            f"replica {self.decode_requests_s:.2f} answers/s of {work.output_tokens:,} tokens at {self.decode_batch} "
            f"requests; at {prefill}:{decode} prefill is {busy[0]:.0%} and decode {busy[1]:.0%} busy, so {full} "
            "fills first"
        )
        return Split(prefill, decode, rate, gpus, *busy, reason)

    def recommend(self, gpus: int | None = None) -> Split:
        """The split with the highest rate on `gpus` GPUs; without a number, the smallest within 5 % of the best rate
        per GPU; with a wanted rate in the workload, the fewest GPUs that reach it.

        Raises PlanError when a pool holds no request at all or the GPUs are too few.
        """
        if not self.decode_batch:
            tight = "" if self.work.tpot_ms is None else f" within {self.work.tpot_ms:g} ms a token"
            raise PlanError(f"the decode pool does not hold one request of {self.work.tokens:,} tokens{tight}")
        if not self.prefill.requests_of(self.work.input_tokens):
            raise PlanError(f"the prefill pool does not hold one prompt of {self.work.input_tokens:,} tokens")
        if self.work.rate is not None and gpus is None:
            need_p = max(1, -int(-self.work.rate // self.prefill_requests_s))
            need_d = max(1, -int(-self.work.rate // self.decode_requests_s))
            return self.split_of(need_p, need_d)
        one_p, one_d = self.prefill.settings.parallel.gpus, self.decode.settings.parallel.gpus
        if gpus is not None:
            if gpus < one_p + one_d:
                raise PlanError(f"{gpus} GPUs are fewer than one prefill ({one_p}) and one decode replica ({one_d})")
            pairs = [(p, (gpus - p * one_p) // one_d) for p in range(1, (gpus - one_d) // one_p + 1)]
            return max((self.split_of(p, d) for p, d in pairs), key=lambda s: (s.requests_s, -s.gpus))
        span = range(1, LARGEST_SPLIT + 1)
        splits = [self.split_of(p, d) for p in span for d in span]
        best = max(s.requests_s / s.gpus for s in splits)
        good = [s for s in splits if s.requests_s / s.gpus >= (1 - SPLIT_TOLERANCE) * best]
        return min(good, key=lambda s: (s.gpus, -s.requests_s))

    def cost_per_million(self, split: Split) -> tuple[float, float] | None:
        """`(per million output tokens, per million prompt and output tokens)` at the split's full rate; None without
        a GPU price."""
        if self.work.gpu_price is None:
            return None
        per_second = split.gpus * self.work.gpu_price / 3600
        outputs = split.requests_s * self.work.output_tokens
        return per_second / outputs * 1e6, per_second / (split.requests_s * self.work.tokens) * 1e6
