"""Every Prometheus metric of the product: name, kind, labels with their values, help, in one table.

They are exported through Ray (`ray.util.metrics`), so Prometheus sees them as `ray_<name>`. This module knows the
table only; a process hands its metrics backend to `Emitter`.

A series that appears with its first event has no earlier value, so `increase()` misses that event. Each process
therefore calls `Emitter.zero` for what it emits when it starts, and for each replica and tenant when that appears.
Histograms are the exception: Ray has no way to export an empty one.

`tests/app/test_metric_call_sites.py` looks for the call that emits each metric of the table.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Values = Sequence[str] | None  # None: open, such as a replica's name

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)

GAP_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
GAP_BOUNDS = (*(str(bound) for bound in GAP_SECONDS), "+Inf")

POOLS = ("prefill", "decode")
OUTCOMES = ("done", "cancelled", "failed")
REQUEST_OUTCOMES = (*OUTCOMES, "refused")  # refused: a 4xx, as for want of room or by a limit
VERDICTS = ("ok", "mismatch", "missing", "stale", "wrong_layout")
LIVE_STATES = ("admitted", "prefilling", "sealed", "moving", "verified", "recomputing", "decoding")
ENGINE_LOSSES = ("died", "hung", "silent")
GAPS_AT = ("engine", "frontend", "socket")
LIMITS = ("requests", "tokens", "kv_tokens")
SCALE_CAUSES = ("woken", "pressure", "low", "idle", "by_hand")
PHASES = ("admit", "prefill", "prefill_replica", "hand_over", "submit")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `values` holds for each label all of its values, or None when they are not known beforehand."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[Values, ...] = ()
    boundaries: tuple[float, ...] = ()

    @property
    def open_labels(self) -> set[str]:
        return {label for label, values in zip(self.labels, self.values) if values is None}

    def series(self, known: dict[str, str]) -> list[dict[str, str]]:
        """Every label set, given the values of its open labels (and of others, which it is then limited to)."""
        choices = [
            (known[label],) if label in known else values or () for label, values in zip(self.labels, self.values)
        ]
        return [dict(zip(self.labels, chosen)) for chosen in itertools.product(*choices)]


def counter(name: str, help: str, **labels: Values) -> Metric:
    return Metric(f"pageferry_{name}_total", "counter", help, tuple(labels), tuple(labels.values()))


def gauge(name: str, help: str, **labels: Values) -> Metric:
    return Metric(f"pageferry_{name}", "gauge", help, tuple(labels), tuple(labels.values()))


def histogram(name: str, help: str, boundaries: tuple[float, ...], **labels: Values) -> Metric:
    return Metric(f"pageferry_{name}_seconds", "histogram", help, tuple(labels), tuple(labels.values()), boundaries)


def engine(name: str, help: str, kind: Kind = "counter") -> Metric:
    """A number of `Heartbeat.counters`: there it is called `name`."""
    make = counter if kind == "counter" else gauge
    return make(f"engine_{name}", help, pool=POOLS, replica=None)


FRONTEND = (
    counter("requests", "Requests that have ended, by outcome", outcome=REQUEST_OUTCOMES),
    counter("busy", "Requests answered with 429 or 503 because there was no room"),
    histogram("ttft", "Arrival at the frontend to the first token", SECONDS),
    histogram("tpot", "Mean time between the tokens of a request, after the first", TOKEN_SECONDS),
    histogram(
        "hand_over",
        "Time of a request's way to decode by phase: admit (waiting for a ticket), prefill (computing and sealing), "
        "prefill_replica (what of that is spent in the replica), hand_over (waiting for the proof after prefill), "
        "submit (the call to decode)",
        SECONDS,
        phase=PHASES,
    ),
    counter(
        "phase_seconds",
        "Seconds spent in those phases and up to the first token (first_token), exact: Ray exports a histogram's sum "
        "from the middles of its buckets",
        phase=(*PHASES, "first_token"),
    ),
    histogram("loop_stall", "Times for which the frontend's event loop stood still, from 0.05 s on", SECONDS),
    counter(
        "token_gaps",
        "Gaps between the tokens of a stream, by where they are seen: engine (its steps, on its own clock), frontend "
        "(tokens of the request arrive), socket (events of the HTTP stream leave). Cumulative by `le`, in seconds, as "
        "a histogram's buckets, but exact and there from the start",
        at=GAPS_AT,
        le=GAP_BOUNDS,
    ),
    counter("token_gap_seconds", "Sum of those gaps in seconds, exact", at=GAPS_AT),
    counter("replicas_lost", "Times a request lost its replica, by role", role=POOLS),
    counter("resumed", "Streams continued on another decode replica"),
    counter(
        "page_integrity_retries",
        "Requests run again elsewhere from their tokens so far because a page in their block table was not their own",
    ),
    counter(
        "page_integrity_errors",
        "Requests that ended as page_integrity_error: a page in their block table was not their own",
    ),
    counter("output_tokens", "Tokens passed on to clients"),
)

TENANT = (
    counter(
        "tenant_requests", "Requests of a tenant that have ended, by outcome", tenant=None, outcome=REQUEST_OUTCOMES
    ),
    counter("tenant_prompt_tokens", "Prompt tokens of a tenant's requests", tenant=None),
    counter("tenant_output_tokens", "Tokens passed on to a tenant's clients", tenant=None),
    counter("tenant_limited", "Requests of a tenant that its limits refused, by limit", tenant=None, limit=LIMITS),
)

ENGINE = (
    engine("tokens_opened", "Prompt tokens taken over from prefill"),
    engine("tokens_recomputed", "Prompt tokens computed again"),
    engine("pages_sealed", "Pages sealed into staging"),
    engine("opens_failed", "Hand-overs that could not be opened"),
    engine("steps", "Scheduler steps of vLLM's engine"),
    engine("preemptions", "Requests whose pages vLLM took away to compute them again later"),
    engine("prefix_queries", "Prompt tokens looked up in the engine's own prefix cache"),
    engine("prefix_hits", "Prompt tokens found in the engine's own prefix cache"),
    engine("prompt_tokens", "Prompt tokens computed, neither cached nor handed over"),
    engine("tokens_generated", "Tokens sampled by the engine"),
    engine("integrity_steps", "Forward steps that had to be proven"),
    engine("integrity_checks", "Forward steps whose proof covered every scheduled request"),
    engine("integrity_steps_unproven", "Forward steps without a full proof: alert when this grows"),
    engine("integrity_rows_checked", "Requests checked, summed over steps"),
    engine("integrity_pages_checked", "Block table entries checked, summed over steps"),
    engine("integrity_requests_ended", "Requests ended by a tag mismatch"),
    engine("integrity_pages_doubted", "Pages put in doubt by a verdict or a broken ledger law"),
    engine("integrity_breaches", "Broken laws of the page ledger"),
    engine("integrity_unproven_s", "Seconds since the last full proof while steps ran: alert above 10", "gauge"),
    engine("integrity_quarantined_share", "Share of the pages in quarantine: alert above 0.05", "gauge"),
)

CONTROLLER = (
    gauge("tickets", "Tickets in flight, by state", state=LIVE_STATES),
    counter("tickets_ended", "Tickets that have ended, by outcome", outcome=OUTCOMES),
    gauge("queue_requests", "Requests waiting for a ticket"),
    gauge(
        "kv_blocks", "KV pages of a replica, by state", pool=POOLS, replica=None, state=("free", "held", "quarantined")
    ),
    gauge("kv_occupancy", "Share of a replica's KV pages that are held", pool=POOLS, replica=None),
    gauge("pool_target", "Replicas that Serve holds the pool at", pool=POOLS),
    gauge("replicas", "Replicas that take tickets", pool=POOLS),
    gauge("replicas_starting", "Replicas that load their engine", pool=POOLS),
    gauge("replicas_unplaced", "Replicas that found no room on any node: alert when it stays", pool=POOLS),
    counter("targets_refused", "Pool sizes that Serve was asked for and did not take", pool=POOLS),
    counter("bytes_moved", "Wire bytes of pages that decode has opened"),
    counter("bytes_saved", "Bytes not moved because pages are converted before they travel"),
    counter("tokens_moved", "Prompt tokens whose pages decode took over"),
    counter("tokens_recomputed", "Prompt tokens that decode had to compute itself"),
    gauge("running_requests", "Requests in a replica's batch", pool=POOLS, replica=None),
    gauge("waiting_requests", "Requests that wait in a replica's engine", pool=POOLS, replica=None),
    gauge("staging_bytes_max", "Staging memory that a node has", node=None),
    gauge("staging_bytes", "Staging memory held by leases", node=None),
    counter("pages_opened", "Pages that decode opened or refused", verdict=VERDICTS),
    counter(
        "tag_mismatches",
        "Block tables that named a page that was not the request's own, of all replicas: alert on any",
    ),
    counter(
        "engines_lost",
        "Engines that were given up: died (its process ended), hung (it has requests and makes no step, or one of its "
        "processes is stopped), silent (its replica was not heard)",
        pool=POOLS,
        cause=ENGINE_LOSSES,
    ),
    counter(
        "scale_decisions",
        "Decisions to change a pool's size, by cause: woken (from zero, by a request), pressure (above the band), low "
        "(below the band), idle (to zero), by_hand; the words to each are in /status and the log",
        pool=POOLS,
        direction=("up", "down"),
        cause=SCALE_CAUSES,
    ),
    *ENGINE,
)

TABLE = (*FRONTEND, *TENANT, *CONTROLLER)
BY_NAME = {metric.name: metric for metric in TABLE}
# Running totals and gauges of one engine, by their name in `Heartbeat.counters`.
ENGINE_COUNTERS = {m.name.removeprefix("pageferry_engine_").removesuffix("_total"): m for m in ENGINE}


class Emitter:
    """Creates each metric at its first use. `backend` has `Counter`, `Gauge` and `Histogram` as `ray.util.metrics` has.

    Metrics must never break what they measure: an unknown name or label is an error here, at the call.
    """

    def __init__(self, backend: Any, **constant_labels: str) -> None:
        self._backend = backend
        self._constant = constant_labels
        self._made: dict[str, Any] = {}

    def zero(self, metrics: Sequence[Metric], **known: str) -> None:
        """Exports 0 for every series of `metrics`; `known` says what has appeared (`replica`, with its `pool`).

        Without `known` it is the series without open labels, with it only those that have all its labels.
        """
        for metric in metrics:
            if metric.kind == "histogram" or not known.keys() <= set(metric.labels):
                continue
            if not metric.open_labels <= known.keys():
                continue
            for labels in metric.series(known):
                made = self._get(metric.name, metric.kind, labels)
                if metric.kind == "gauge":
                    made.set(0, tags=labels)
                else:
                    made._record(0.0, tags=labels)  # `inc` refuses 0, and without it there is no series

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
        for label, values in zip(metric.labels, metric.values):
            if values is not None and labels[label] not in values:
                raise ValueError(f"{name}: {label} is one of {', '.join(values)}, not {labels[label]!r}")
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
