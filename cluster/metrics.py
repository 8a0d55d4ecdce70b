"""Every Prometheus metric of the product: name, kind, labels, help, in one table.

They are exported through Ray (`ray.util.metrics`), so Prometheus sees them as `ray_<name>`. This module knows the
table only; a process hands its metrics backend to `Emitter`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


TABLE: tuple[Metric, ...] = (
    # frontend
    Metric("pageferry_requests_total", "counter", "Requests that have ended, by outcome", ("outcome",)),
    Metric("pageferry_busy_total", "counter", "Requests answered with 429 or 503 because there was no room"),
    Metric("pageferry_ttft_seconds", "histogram", "Arrival at the frontend to the first token", (), SECONDS),
    Metric(
        "pageferry_tpot_seconds",
        "histogram",
        "Mean time between the tokens of a request, after the first",
        (),
        TOKEN_SECONDS,
    ),
    Metric(
        "pageferry_hand_over_seconds",
        "histogram",
        "Time of a request's way to decode by phase: admit (waiting for a ticket), prefill (computing and sealing), "
        "prefill_replica (what of that is spent in the replica), hand_over (waiting for the proof after prefill), "
        "submit (the call to decode)",
        ("phase",),
        SECONDS,
    ),
    Metric(
        "pageferry_phase_seconds_total",
        "counter",
        "Seconds spent in those phases and up to the first token (first_token), exact: Ray exports a histogram's sum "
        "from the middles of its buckets",
        ("phase",),
    ),
    Metric("pageferry_replicas_lost_total", "counter", "Times a request lost its replica, by role", ("role",)),
    Metric("pageferry_resumed_total", "counter", "Streams continued on another decode replica"),
    Metric(
        "pageferry_page_integrity_retries_total",
        "counter",
        "Requests run again elsewhere from their tokens so far because a page in their block table was not their own",
    ),
    Metric(
        "pageferry_page_integrity_errors_total",
        "counter",
        "Requests that ended as page_integrity_error: a page in their block table was not their own",
    ),
    Metric("pageferry_output_tokens_total", "counter", "Tokens passed on to clients"),
    # controller
    Metric("pageferry_tickets", "gauge", "Tickets in flight, by state", ("state",)),
    Metric("pageferry_tickets_ended_total", "counter", "Tickets that have ended, by outcome", ("outcome",)),
    Metric("pageferry_queue_requests", "gauge", "Requests waiting for a ticket"),
    Metric("pageferry_kv_blocks", "gauge", "KV pages of a replica, by state", ("pool", "replica", "state")),
    Metric("pageferry_kv_occupancy", "gauge", "Share of a replica's KV pages that are held", ("pool", "replica")),
    Metric("pageferry_replicas", "gauge", "Replicas that take tickets", ("pool",)),
    Metric("pageferry_bytes_moved_total", "counter", "Wire bytes of pages that decode has opened"),
    Metric("pageferry_bytes_saved_total", "counter", "Bytes not moved because pages are converted before they travel"),
    Metric("pageferry_tokens_moved_total", "counter", "Prompt tokens whose pages decode took over"),
    Metric("pageferry_tokens_recomputed_total", "counter", "Prompt tokens that decode had to compute itself"),
    Metric("pageferry_staging_bytes", "gauge", "Staging memory held by leases", ("node",)),
    Metric("pageferry_pages_opened_total", "counter", "Pages that decode opened or refused", ("verdict",)),
    Metric(
        "pageferry_tag_mismatches_total",
        "counter",
        "Block tables that named a page that was not the request's own, of all replicas: alert on any",
    ),
    # engines, as their heartbeats say
    Metric(
        "pageferry_engine_tokens_opened_total", "counter", "Prompt tokens taken over from prefill", ("pool", "replica")
    ),
    Metric("pageferry_engine_tokens_recomputed_total", "counter", "Prompt tokens computed again", ("pool", "replica")),
    Metric("pageferry_engine_pages_sealed_total", "counter", "Pages sealed into staging", ("pool", "replica")),
    Metric(
        "pageferry_engine_opens_failed_total", "counter", "Hand-overs that could not be opened", ("pool", "replica")
    ),
    Metric(
        "pageferry_engine_integrity_steps_total", "counter", "Forward steps that had to be proven", ("pool", "replica")
    ),
    Metric(
        "pageferry_engine_integrity_checks_total", "counter", "Steps whose tags were all checked", ("pool", "replica")
    ),
    Metric(
        "pageferry_engine_integrity_steps_unproven_total",
        "counter",
        "Steps without a full check: alert when this grows",
        ("pool", "replica"),
    ),
    Metric(
        "pageferry_engine_integrity_rows_checked_total",
        "counter",
        "Requests whose tags were checked",
        ("pool", "replica"),
    ),
    Metric(
        "pageferry_engine_integrity_pages_checked_total", "counter", "Block table entries checked", ("pool", "replica")
    ),
    Metric(
        "pageferry_engine_integrity_requests_ended_total",
        "counter",
        "Requests ended by a tag mismatch",
        ("pool", "replica"),
    ),
    Metric(
        "pageferry_engine_integrity_pages_doubted_total",
        "counter",
        "Pages put in doubt by a verdict",
        ("pool", "replica"),
    ),
    Metric(
        "pageferry_engine_integrity_breaches_total", "counter", "Broken laws of the page ledger", ("pool", "replica")
    ),
    Metric(
        "pageferry_engine_integrity_unproven_s",
        "gauge",
        "Seconds since the last full check while steps ran: alert above 10",
        ("pool", "replica"),
    ),
    Metric(
        "pageferry_engine_integrity_quarantined_share",
        "gauge",
        "Share of the pages in quarantine: alert above 0.05",
        ("pool", "replica"),
    ),
    Metric("pageferry_scale_decisions_total", "counter", "Decisions of the autoscaler", ("pool", "direction")),
)

BY_NAME = {metric.name: metric for metric in TABLE}


class Emitter:
    """Creates each metric at its first use. `backend` has `Counter`, `Gauge` and `Histogram` as `ray.util.metrics` has.

    Metrics must never break what they measure: an unknown name or label is an error here, at the call, in tests.
    """

    def __init__(self, backend: Any, **constant_labels: str) -> None:
        self._backend = backend
        self._constant = constant_labels
        self._made: dict[str, Any] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        if value > 0:
            self._get(name, "counter", labels).inc(value, tags=labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._get(name, "gauge", labels).set(value, tags=labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._get(name, "histogram", labels).observe(value, tags=labels)

    def _get(self, name: str, kind: Kind, labels: dict[str, str]) -> Any:
        metric = BY_NAME.get(name)
        if metric is None:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            raise ValueError(f"no metric {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if metric.kind != kind or set(labels) != set(metric.labels):
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}, not a {kind} with {set(labels)}")
        if name not in self._made:
            keys = (*metric.labels, *self._constant)
            make = {"counter": self._backend.Counter, "gauge": self._backend.Gauge}.get(kind)
            if make is None:
                made = self._backend.Histogram(
                    name, description=metric.help, boundaries=list(metric.boundaries), tag_keys=keys
                )
            else:
                made = make(name, description=metric.help, tag_keys=keys)
            made.set_default_tags(self._constant)
            self._made[name] = made
        return self._made[name]
