"""The dashboards: what is asked of Prometheus, and why one looks at it."""

from __future__ import annotations

from cluster.metrics import GAPS_AT
from ops.grafana.panels import Dashboard, Panel, Query
from ops.grafana.promql import gap, grown, now, quantile, rate, ratio

REQUESTS = rate("requests_total")
PHASE_SECONDS = f"{rate('phase_seconds_total', 'phase')} / on () group_left () ({REQUESTS} > 0)"

FLEET = Dashboard(
    "pageferry-fleet",
    "pageferry: fleet",
    "What clients get: requests, refusals, failures, time to the first token and between tokens.",
    [
        Panel("Requests", [Query(REQUESTS)], "Requests that end, a second", "reqps", "stat", width=4),
        Panel(
            "Failed",
            [Query(ratio(rate("requests_total", labels=', outcome="failed"'), REQUESTS))],
            "Share of the requests that end as failed",
            "percentunit",
            "stat",
            red=0.01,
            width=4,
        ),
        Panel(
            "Refused",
            [Query(ratio(rate("busy_total"), REQUESTS))],
            "Share of the requests that get 429 or 503 for want of room",
            "percentunit",
            "stat",
            red=0.05,
            width=4,
        ),
        Panel(
            "First token, p95", [Query(quantile(0.95, "ttft_seconds"))], "From arrival", "s", "stat", red=10, width=4
        ),
        Panel("Output", [Query(rate("output_tokens_total"))], "Tokens a second to clients", "short", "stat", width=4),
        Panel("Waiting", [Query(now("queue_requests"))], "Requests without a ticket", "short", "stat", width=4),
        Panel(
            "Requests by outcome",
            [Query(rate("requests_total", "outcome"), "{{outcome}}")],
            "How requests end, a second",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Time to first token",
            [Query(quantile(q, "ttft_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99)],
            "From arrival at the frontend",
            "s",
        ),
        Panel(
            "Time per token",
            [Query(quantile(q, "tpot_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99)],
            "Mean of a request, after its first token",
            "s",
        ),
        Panel(
            "Gaps between tokens, p99",
            [Query(gap(0.99, at), at) for at in GAPS_AT],
            "At the engine's steps, in the frontend, at the socket: where they part, tokens wait",
            "s",
        ),
        Panel(
            "Tickets in flight",
            [Query(now("tickets", "state"), "{{state}}")],
            "Where requests are on their way",
            stacked=True,
        ),
        Panel("Output tokens", [Query(rate("output_tokens_total"), "tokens")], "Passed on to clients, a second"),
        Panel(
            "Lost replicas, resumed streams",
            [
                Query(grown("replicas_lost_total", "5m", "role"), "lost {{role}}"),
                Query(grown("resumed_total", "5m"), "resumed"),
            ],
            "In five minutes: requests whose replica went away, and streams that go on elsewhere",
        ),
    ],
)

POOLS = Dashboard(
    "pageferry-pools",
    "pageferry: pools and autoscaling",
    "How full the pools are, what the autoscaler wants and what it got.",
    [
        Panel(
            "KV occupancy of the pools",
            [Query("pageferry:kv_occupancy:avg{$A}", "{{pool}}")],
            "Held pages of all pages; the autoscaler keeps decode between scaling.target_low and target_high",
            "percentunit",
        ),
        Panel(
            "Replicas",
            [
                Query(now("replicas", "pool"), "{{pool}} ready"),
                Query(now("pool_target", "pool"), "{{pool}} wanted"),
                Query(now("replicas_starting", "pool"), "{{pool}} starting"),
                Query(now("replicas_unplaced", "pool"), "{{pool}} without room"),
            ],
            "Replicas that take tickets, and how many the controller wants",
        ),
        Panel("Queue", [Query(now("queue_requests"), "waiting")], "Requests that wait for a ticket"),
        Panel(
            "KV occupancy by replica",
            [Query(now("kv_occupancy", "pool, replica", how="max"), "{{pool}} {{replica}}")],
            "Uneven lines: prefixes or sessions draw requests to one replica",
            "percentunit",
            width=12,
        ),
        Panel(
            "Scaling decisions",
            [
                Query(
                    grown("scale_decisions_total", "5m", "pool, direction, cause"), "{{pool}} {{direction}}: {{cause}}"
                ),
            ],
            "In five minutes; the reason of each is in `pageferry status` and in the controller's log",
            width=12,
        ),
        Panel(
            "KV pages by state",
            [Query(now("kv_blocks", "pool, state"), "{{pool}} {{state}}")],
            "All replicas of a pool",
            width=12,
        ),
        Panel("Refused", [Query(rate("busy_total"), "refused")], "429 and 503 a second", "reqps", width=12),
    ],
)

HAND_OVER = Dashboard(
    "pageferry-hand-over",
    "pageferry: hand-over and staging",
    "Pages on their way from prefill to decode: bytes, verdicts, staging, and where the time goes.",
    [
        Panel(
            "Bytes moved and saved",
            [Query(rate("bytes_moved_total"), "moved"), Query(rate("bytes_saved_total"), "saved by converting")],
            "A second",
            "Bps",
        ),
        Panel(
            "Prompt tokens",
            [
                Query(rate("tokens_moved_total"), "taken over"),
                Query(rate("tokens_recomputed_total"), "computed again by decode"),
            ],
            "A second; the second line should be near 0",
        ),
        Panel(
            "Pages by verdict",
            [Query(rate("pages_opened_total", "verdict"), "{{verdict}}")],
            "Opened or refused by decode, a second",
        ),
        Panel(
            "Staging",
            [
                Query(now("staging_bytes", "node"), "held {{node}}"),
                Query(now("staging_bytes_max", "node"), "size {{node}}"),
            ],
            "Shared memory that leases hold",
            "bytes",
        ),
        Panel(
            "Seconds of a request by phase",
            [Query(PHASE_SECONDS, "{{phase}}")],
            "Mean over the requests that ended",
            "s",
        ),
        Panel(
            "Phases, p95",
            [Query(quantile(0.95, "hand_over_seconds", "phase"), "{{phase}}")],
            "admit waits for room, prefill computes, hand_over waits for the seals, submit calls decode",
            "s",
        ),
        Panel(
            "Pages sealed",
            [Query(rate("engine_pages_sealed_total", "replica", ', pool="prefill"'), "{{replica}}")],
            "A second, by prefill replica",
            width=12,
        ),
        Panel(
            "Hand-overs not opened",
            [Query(rate("engine_opens_failed_total", "replica", ', pool="decode"'), "{{replica}}")],
            "A second, by decode replica",
            width=12,
        ),
    ],
)

BY_REPLICA = "pool, replica"
REPLICA_LEGEND = "{{pool}} {{replica}}"

INTEGRITY = Dashboard(
    "pageferry-integrity",
    "pageferry: page integrity",
    "Whether every step is checked, and what the check has found. With integrity off all of it is 0.",
    [
        Panel(
            "Page mix-ups, 1 h",
            [Query(grown("tag_mismatches_total", "1h"))],
            "Block tables that named a page of another request",
            kind="stat",
            red=0.5,
            width=6,
        ),
        Panel(
            "Broken ledger laws, 1 h",
            [Query(grown("engine_integrity_breaches_total", "1h"))],
            "Laws of the page ledger",
            kind="stat",
            red=0.5,
            width=6,
        ),
        Panel(
            "Pages not verified, 1 h",
            [Query(grown("pages_opened_total", "1h", labels=', verdict!="ok"'))],
            "Pages that decode refused to open",
            kind="stat",
            red=0.5,
            width=6,
        ),
        Panel(
            "Since the last full check",
            [Query(now("engine_integrity_unproven_s", how="max"))],
            "The longest of all replicas",
            "s",
            "stat",
            red=10,
            width=6,
        ),
        Panel(
            "Steps and checked steps",
            [
                Query(rate("engine_integrity_steps_total", "pool"), "{{pool}} steps"),
                Query(rate("engine_integrity_checks_total", "pool"), "{{pool}} checked"),
            ],
            "A second; the lines of a pool lie on each other",
        ),
        Panel(
            "Steps without a full check",
            [Query(rate("engine_integrity_steps_unproven_total", BY_REPLICA), REPLICA_LEGEND)],
            "A second",
        ),
        Panel(
            "Table entries checked",
            [Query(rate("engine_integrity_pages_checked_total", "pool"), "{{pool}}")],
            "A second",
        ),
        Panel(
            "Quarantine",
            [Query(now("engine_integrity_quarantined_share", BY_REPLICA, how="max"), REPLICA_LEGEND)],
            "Share of the pages",
            "percentunit",
        ),
        Panel(
            "What was found",
            [
                Query(grown("tag_mismatches_total", "5m"), "page mix-ups"),
                Query(grown("engine_integrity_requests_ended_total", "5m"), "requests ended"),
                Query(grown("engine_integrity_pages_doubted_total", "5m"), "pages doubted"),
                Query(grown("engine_integrity_breaches_total", "5m"), "laws broken"),
            ],
            "In five minutes",
        ),
        Panel(
            "What clients met",
            [
                Query(grown("page_integrity_errors_total", "5m"), "errors"),
                Query(grown("page_integrity_retries_total", "5m"), "run again"),
            ],
            "In five minutes",
        ),
    ],
)

ENGINES = Dashboard(
    "pageferry-engines",
    "pageferry: engines",
    "vLLM's own numbers, by replica, of both pools.",
    [
        Panel("Running", [Query(now("running_requests", BY_REPLICA), REPLICA_LEGEND)], "Requests in the batch"),
        Panel(
            "Waiting", [Query(now("waiting_requests", BY_REPLICA), REPLICA_LEGEND)], "Requests in the engine's queue"
        ),
        Panel("Preemptions", [Query(grown("engine_preemptions_total", "5m", BY_REPLICA), REPLICA_LEGEND)], "In 5 min"),
        Panel("Tokens sampled", [Query(rate("engine_tokens_generated_total", BY_REPLICA), REPLICA_LEGEND)], "A second"),
        Panel(
            "Prompt tokens computed",
            [Query(rate("engine_prompt_tokens_total", BY_REPLICA), REPLICA_LEGEND)],
            "A second",
        ),
        Panel("Steps", [Query(rate("engine_steps_total", BY_REPLICA), REPLICA_LEGEND)], "Of the scheduler, a second"),
        Panel(
            "Prefix hits",
            [
                Query(
                    ratio(
                        rate("engine_prefix_hits_total", BY_REPLICA), rate("engine_prefix_queries_total", BY_REPLICA)
                    ),
                    REPLICA_LEGEND,
                )
            ],
            "Share of the prompt tokens found in the engine's own cache",
            "percentunit",
        ),
        Panel(
            "Tokens a step",
            [
                Query(
                    ratio(rate("engine_tokens_generated_total", BY_REPLICA), rate("engine_steps_total", BY_REPLICA)),
                    REPLICA_LEGEND,
                )
            ],
            "The mean batch",
        ),
        Panel(
            "Pages held",
            [Query(now("kv_blocks", BY_REPLICA, ', state="held"'), REPLICA_LEGEND)],
            "Of the KV cache",
        ),
    ],
)

TENANTS = Dashboard(
    "pageferry-tenants",
    "pageferry: tenants",
    "Who uses the service. Tenants beyond the first 50 of the configuration are counted as `other`.",
    [
        Panel(
            "Requests",
            [Query(rate("tenant_requests_total", "tenant"), "{{tenant}}")],
            "That end, a second",
            "reqps",
            stacked=True,
            width=12,
        ),
        Panel(
            "Output tokens",
            [Query(rate("tenant_output_tokens_total", "tenant"), "{{tenant}}")],
            "A second",
            stacked=True,
            width=12,
        ),
        Panel(
            "Prompt tokens",
            [Query(rate("tenant_prompt_tokens_total", "tenant"), "{{tenant}}")],
            "A second",
            stacked=True,
            width=12,
        ),
        Panel(
            "Failed, and refused by its limits",
            [
                Query(rate("tenant_requests_total", "tenant", ', outcome="failed"'), "{{tenant}}"),
                Query(rate("tenant_limited_total", "tenant, limit"), "{{tenant}}: {{limit}}"),
            ],
            "A second",
            "reqps",
            width=12,
        ),
    ],
)

DASHBOARDS = (FLEET, POOLS, HAND_OVER, INTEGRITY, ENGINES, TENANTS)
