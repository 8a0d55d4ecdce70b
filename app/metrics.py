"""From what the engine core client observes to the metrics of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.metrics import FRONTEND, PHASES, Emitter


def observer(application: str, backend: Any = None) -> Callable[[str, float, dict[str, str]], None]:
    """A function for `FerryCoreClient(observe=...)`. `backend` defaults to Ray's metrics."""
    if backend is None:
        from ray.util import metrics

        backend = metrics
    emit = Emitter(backend, application=application)
    emit.zero(FRONTEND)

    def observe(name: str, value: float, labels: dict[str, str]) -> None:
        if name in PHASES:
            emit.observe("pageferry_hand_over_seconds", value, phase=name)
            emit.count("pageferry_phase_seconds_total", value, phase=name)
        elif name == "first_token":
            emit.observe("pageferry_ttft_seconds", value)
            emit.count("pageferry_phase_seconds_total", value, phase=name)
        elif name == "token_gap":
            emit.observe("pageferry_tpot_seconds", value)
        elif name == "ended":
            emit.count("pageferry_requests_total", outcome=labels["outcome"])
            emit.count("pageferry_output_tokens_total", value)
        elif name == "lost":
            emit.count("pageferry_replicas_lost_total", role=labels["role"])
        elif name == "resumed":
            emit.count("pageferry_resumed_total")
        elif name == "busy":
            emit.count("pageferry_busy_total")
        elif name == "page_integrity_retry":
            emit.count("pageferry_page_integrity_retries_total")
        elif name == "page_integrity_error":
            emit.count("pageferry_page_integrity_errors_total")
        else:
            raise ValueError(f"nothing in the metrics table for {name!r}")

    return observe
