"""The metrics that a frontend exports; each series that can be is there at 0 from its start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.metrics import FRONTEND, GAP_BOUNDS, TENANT, Emitter

TENANTS_MAX = 50  # labels; tenants beyond them are counted as OTHER, as are callers without a tenant
OTHER = "other"


class FrontendMetrics(Emitter):
    """`tenants`: those with keys now. A later one has a label of its own too, while there are not too many."""

    def __init__(self, backend: Any, application: str = "", tenants: Iterable[str] = ()) -> None:
        super().__init__(backend, application=application)
        self._tenants: set[str] = set()
        self.zero(FRONTEND)
        for tenant in dict.fromkeys(tenants):
            self._label(tenant)

    def of_tenant(self, tenant: str, outcome: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if not tenant:
            return
        label = self._label(tenant)
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

    def limited(self, tenant: str, limit: str) -> None:
        self.count("pageferry_tenant_limited_total", tenant=self._label(tenant or OTHER), limit=limit)

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                tenant = OTHER
            if tenant not in self._tenants:
                self._tenants.add(tenant)
                self.zero(TENANT, tenant=tenant)
        return tenant


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
