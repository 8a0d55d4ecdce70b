"""What is measured and logged of one request: metrics while it runs, one line of log when it has ended.

The line is a JSON object, with a JSON log also as fields of its own. It holds no text of the prompt or the answer.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from actors.messages import Role, Ticket
from app.metrics import FrontendMetrics
from app.request.context import Caller
from app.request.events import PAGE_INTEGRITY_ERROR, End
from app.token_gaps import TokenGaps
from cluster.metrics import LIMITS

logger = logging.getLogger("pageferry.request")

ERROR_MAX = 200  # characters of a fault's message in the log


class RequestRecord:
    """`request_id`: the client's, as it is in the answer."""

    def __init__(self, metrics: FrontendMetrics, request_id: str, caller: Caller, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self.request_id = request_id
        self.tenant = caller.tenant  # "" where the service has none
        self.num_prompt_tokens = num_prompt_tokens
        self._began = time.monotonic()
        self._phases: dict[str, float] = {}
        self._replicas: list[str] = []
        self._resumed = 0
        self._gaps, self._engine_gaps = TokenGaps(metrics, "frontend"), TokenGaps(metrics, "engine")
        self._span, self._since = caller.span, self._began  # of the phase that runs now
        self._span.child("frontend.prepare", self._began - self._span.began, prompt_tokens=num_prompt_tokens)

    def phase(self, name: str, seconds: float) -> None:
        """`name`: one of `cluster.metrics.PHASES`, which has just ended."""
        if name != "prefill_replica":  # it is a part of prefill, and the replica's own span
            self._end_phase(f"frontend.{name}")
        self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._metrics.observe("pageferry_hand_over_seconds", seconds, phase=name)
        self._metrics.count("pageferry_phase_seconds_total", seconds, phase=name)

    def _end_phase(self, name: str, **attributes: Any) -> None:
        now = time.monotonic()
        self._span.child(name, now - self._since, **attributes)
        self._since = now

    def first_token(self, seconds: float) -> None:
        self._phases["first_token"] = seconds
        self._metrics.observe("pageferry_ttft_seconds", seconds)
        self._metrics.count("pageferry_phase_seconds_total", seconds, phase="first_token")

    def tokens(self, count: int, step_s: float) -> None:
        """So many have come for the client, out of a step that ended at `step_s` on the engine's clock."""
        self._gaps.token(time.monotonic(), count)
        self._engine_gaps.token(step_s, count)

    def new_engine(self) -> None:
        self._engine_gaps.other_clock()

    def placed(self, ticket: Ticket) -> None:
        """It has a ticket, or a new attempt of it."""
        for replica in (ticket.prefill, ticket.decode):
            if replica is not None and replica not in self._replicas:
                self._replicas.append(replica)

    def lost(self, role: Role, replica_id: str, reason: str) -> None:
        self._metrics.count("pageferry_replicas_lost_total", role=str(role))
        logger.warning(
            "request %s has lost its %s replica %s: %s", self.request_id, role, replica_id, reason[:ERROR_MAX]
        )

    def run_again(self) -> None:
        """Elsewhere, because a page in its block table was not its own."""
        self._metrics.count("pageferry_page_integrity_retries_total")
        logger.warning("request %s runs again elsewhere: a page in its block table was not its own", self.request_id)

    def as_continuation(self) -> None:
        self._resumed += 1
        self._metrics.count("pageferry_resumed_total")

    def ended(self, end: End, num_output_tokens: int, token_gap_s: float | None) -> None:
        outcome, fault = end.outcome, end.fault
        self._gaps.emit()
        self._engine_gaps.emit()
        self._end_phase("frontend.stream", outcome=str(outcome), tokens=num_output_tokens)
        if token_gap_s is not None:
            self._metrics.observe("pageferry_tpot_seconds", token_gap_s)
        if fault is not None and fault.kind in LIMITS:
            self._metrics.limited(self.tenant, fault.kind)
        elif fault is not None and fault.retry_after_s > 0:
            self._metrics.count("pageferry_busy_total")
        if fault is not None and fault.kind == PAGE_INTEGRITY_ERROR:
            self._metrics.count("pageferry_page_integrity_errors_total")
        name = "refused" if fault is not None and fault.status < 500 else str(outcome)
        self._metrics.count("pageferry_requests_total", outcome=name)
        self._metrics.count("pageferry_output_tokens_total", num_output_tokens)
        self._metrics.of_tenant(self.tenant, name, self.num_prompt_tokens, num_output_tokens)
        fields = self._fields(end, name, num_output_tokens, token_gap_s)
        level = logging.WARNING if name == "failed" else logging.INFO
        logger.log(level, "%s", json.dumps(fields), extra={"request_id": self.request_id, "pageferry": fields})

    def _fields(self, end: End, outcome: str, num_output_tokens: int, token_gap_s: float | None) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request": self.request_id,
            "outcome": outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": num_output_tokens,
            "seconds": round(time.monotonic() - self._began, 4),
            "phases": {name: round(seconds, 4) for name, seconds in self._phases.items()},
            "replicas": self._replicas,
        }
        if self.tenant:
            fields["tenant"] = self.tenant
        if token_gap_s is not None:
            fields["token_gap"] = round(token_gap_s, 5)
        if self._resumed:
            fields["resumed"] = self._resumed
        if end.fault is not None:
            fields["status"] = end.fault.status
            fields["error"] = end.fault.message[:ERROR_MAX]
        return fields
