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
    """The planner's step times, unchanged."""

    roofline: Roofline

    def prefill_ns(self, tokens: int) -> int:
        return int(self.roofline.prefill_seconds(tokens) * SECOND) if tokens > 0 else 0

    def step_ns(self, batch: int, context_tokens: int) -> int:
        return int(self.roofline.decode_step_seconds(batch, context_tokens) * SECOND)
