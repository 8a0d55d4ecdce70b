"""What engine work takes, nanoseconds: a straight line, or the planner's roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.simulate.world import MS, SECOND

if TYPE_CHECKING:
    from cluster.plan.roofline import Roofline


@dataclass(frozen=True, slots=True)
class LinearCosts:
    prefill_token_ns: int = 100_000
    step_base_ns: int = 20 * MS
    step_request_ns: int = 500_000
    step_token_ns: int = 100

    def prefill_ns(self, tokens: int) -> int:
        return tokens * self.prefill_token_ns

    def step_ns(self, batch: int, context_tokens: int) -> int:
        return self.step_base_ns + batch * self.step_request_ns + context_tokens * self.step_token_ns


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """`kv_efficiency`: share of the usual memory bandwidth that reading KV rows reaches (FP8 rows are dequantised)."""

    roofline: Roofline
    kv_efficiency: float = 1.0

    def prefill_ns(self, tokens: int) -> int:
        return int(self.roofline.prefill_seconds(tokens) * SECOND) if tokens > 0 else 0

    def step_ns(self, batch: int, context_tokens: int) -> int:
        cost = self.roofline.decode_step(batch, context_tokens)
        memory_s = cost.weights_s + cost.kv_s / self.kv_efficiency
        return int((cost.overhead_s + max(memory_s, cost.compute_s)) * SECOND)
