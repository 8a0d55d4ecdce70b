"""What vLLM says of itself in each step, summed up for the heartbeat; both pools, each replica for itself.

A frontend could not count it: several of them read one engine's output, and prefill's goes to none.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the engine's start; `cluster.metrics` has their meaning."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    tokens_generated: int = 0

    def add(self, outputs: Any) -> None:
        """`outputs`: the `EngineCoreOutputs` of one step."""
        from vllm.v1.engine import EngineCoreEventType

        stats = outputs.scheduler_stats
        if stats is not None:
            self.steps += 1
            self.prefix_queries += stats.prefix_cache_stats.queries
            self.prefix_hits += stats.prefix_cache_stats.hits
        for output in outputs.outputs:
            self.tokens_generated += len(output.new_token_ids)
            if output.prefill_stats is not None:
                self.prompt_tokens += output.prefill_stats.num_computed_tokens
            for event in output.events or ():
                self.preemptions += event.type is EngineCoreEventType.PREEMPTED

    def totals(self) -> dict[str, float]:
        return {name: float(total) for name, total in asdict(self).items()}


RATE_OVER_S = 10


@dataclass(slots=True)
class TokenRate:
    """Tokens a second, over the last `RATE_OVER_S` at most."""

    tokens: int = 0
    began_ns: int = field(default_factory=time.monotonic_ns)

    def per_second(self) -> float:
        elapsed_s = max(1e-9, (time.monotonic_ns() - self.began_ns) / 1e9)
        rate = self.tokens / elapsed_s
        if elapsed_s > RATE_OVER_S:
            self.tokens, self.began_ns = 0, time.monotonic_ns()
        return rate
