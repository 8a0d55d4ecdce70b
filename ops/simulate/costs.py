"""Engine costs from the planner's roofline: what a step takes, nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.plan.roofline import Roofline
from ops.simulate.world import SECOND


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
