"""The metrics that a frontend exports; each series that can be is there at 0 from its start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.metrics import FRONTEND, GAP_BOUNDS, TENANT, Emitter

TENANTS_MAX = 50  # labels; whoever comes after them in the configuration is counted as OTHER
OTHER = "other"


class FrontendMetrics(Emitter):
    """`tenants`: those of the configuration, in its order."""

    def __init__(self, backend: Any, application: str = "", tenants: Iterable[str] = ()) -> None:
        super().__init__(backend, application=application)
        self._tenants = frozenset(list(dict.fromkeys(tenants))[:TENANTS_MAX])
        self.zero(FRONTEND)
        for tenant in sorted(self._tenants):
            self.zero(TENANT, tenant=tenant)

    def of_tenant(self, tenant: str, outcome: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if not tenant:
            return
        label = tenant if tenant in self._tenants else OTHER
        self.count("pageferry_tenant_requests_total", tenant=label, outcome=outcome)
        self.count("pageferry_tenant_prompt_tokens_total", num_prompt_tokens, tenant=label)
        self.count("pageferry_tenant_output_tokens_total", num_output_tokens, tenant=label)

    def token_gaps(self, at: str, counts: Sequence[int], seconds: float) -> None:
        """`counts`: how many gaps were at most as long as each of `GAP_BOUNDS`, and longer than the one before."""
        total = 0
        for bound, count in zip(GAP_BOUNDS, counts, strict=True):
            total += count
            self.count("pageferry_token_gaps_total", total, at=at, le=bound)
        self.count("pageferry_token_gap_seconds_total", seconds, at=at)


class Discard:
    """A metrics backend that keeps nothing, for a client outside the service."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def set_default_tags(self, tags: dict[str, str]) -> None:
        pass

    def inc(self, value: float, tags: dict[str, str]) -> None:
        pass

    set = observe = _record = inc

    Counter: Any
    Gauge: Any
    Histogram: Any


Discard.Counter = Discard.Gauge = Discard.Histogram = Discard
