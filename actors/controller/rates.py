"""What a tenant may still ask for: requests and tokens a minute as token buckets, and KV tokens at one time. Pure.

A bucket holds a minute's worth and is refilled steadily. All frontends ask the one controller, so the limits are exact
for the service. A controller that has come back begins with full buckets; KV tokens are counted from live tickets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from actors.controller.forecast import SECOND
from actors.controller.journal import Tracked, TrackedDict
from actors.messages import AdmitRequest, Overloaded, Rate, Rates
from cluster.frontend_spec import TenantSpec

MINUTE_NS = 60 * SECOND
REQUESTS, TOKENS, KV_TOKENS = "requests", "tokens", "kv_tokens"


def size_of(request: AdmitRequest) -> int:
    """Tokens that it may come to hold."""
    return request.num_prompt_tokens + request.num_sequences * request.max_tokens


class Buckets(Tracked):
    def __init__(self) -> None:
        self._levels: TrackedDict[tuple[str, str], tuple[float, int]] = (
            TrackedDict()
        )  # (level, when), by tenant and kind

    def take(
        self, request: AdmitRequest, limits: TenantSpec, held: Iterable[AdmitRequest], now_ns: int
    ) -> Overloaded | None:
        """Takes what the request needs; None: it has it. `held`: all that wait or run, of every tenant."""
        tenant, tokens = request.tenant, size_of(request)
        if (most := limits.kv_tokens) is not None:
            before = sum(size_of(other) for other in held if other.tenant == tenant)
            if before + tokens > most:
                return self._refused(
                    KV_TOKENS, most, f"{before} are taken, {tokens} asked for", request, limits, now_ns
                )
        wanted = ((REQUESTS, limits.requests_per_minute, 1), (TOKENS, limits.tokens_per_minute, tokens))
        for kind, limit, amount in wanted:
            if limit is not None and self._level(tenant, kind, limit, now_ns) < min(amount, limit):
                return self._refused(kind, limit, f"{amount} asked for", request, limits, now_ns)
        for kind, limit, amount in wanted:
            if limit is not None:
                level = self._level(tenant, kind, limit, now_ns) - min(amount, limit)
                self._levels[(tenant, kind)] = (level, now_ns)
        return None

    def give_back(self, request: AdmitRequest, limits: TenantSpec, num_used: int, now_ns: int) -> None:
        """A request has ended: the tokens it took, but for those that it has used."""
        if (limit := limits.tokens_per_minute) is None:
            return
        unused = max(0, min(size_of(request), limit) - num_used)
        level = min(limit, self._level(request.tenant, TOKENS, limit, now_ns) + unused)
        self._levels[(request.tenant, TOKENS)] = (level, now_ns)

    def rates(self, tenant: str, limits: TenantSpec, now_ns: int) -> Rates | None:
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return None
        return Rates(
            requests=self._rate(tenant, REQUESTS, limits.requests_per_minute, now_ns),
            tokens=self._rate(tenant, TOKENS, limits.tokens_per_minute, now_ns),
        )

    def _level(self, tenant: str, kind: str, limit: int, now_ns: int) -> float:
        level, at_ns = self._levels.get((tenant, kind), (float(limit), now_ns))
        return min(float(limit), level + (now_ns - at_ns) * limit / MINUTE_NS)

    def _rate(self, tenant: str, kind: str, limit: int | None, now_ns: int) -> Rate | None:
        if limit is None:
            return None
        level = self._level(tenant, kind, limit, now_ns)
        return Rate(limit, math.floor(level), round((limit - level) * 60 / limit, 3))

    def _refused(
        self, kind: str, limit: int, why: str, request: AdmitRequest, limits: TenantSpec, now_ns: int
    ) -> Overloaded:
        amount = 1 if kind == REQUESTS else size_of(request)
        if kind == KV_TOKENS:
            after_s = 1.0 if amount <= limit else 0.0  # when others end, which nothing here foresees
            text = f"{limit} KV tokens at one time"
        else:
            short = min(amount, limit) - self._level(request.tenant, kind, limit, now_ns)
            after_s = max(0.001, short * 60 / limit)
            text = f"{limit} {kind} a minute"
        return Overloaded(
            reason=f"this tenant may have {text}; {why}",
            retry_after_s=after_s,
            limit=kind,
            rates=self.rates(request.tenant, limits, now_ns),
        )
