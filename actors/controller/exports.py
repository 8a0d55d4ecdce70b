"""What the controller tells Prometheus: one walk over `status` every few seconds; pure but for its emitter."""

from __future__ import annotations

from typing import Any

from cluster.metrics import BY_NAME, Emitter

VERDICT_PREFIX = "pages_"
REPLICA_PREFIX = "pageferry_engine_"


class Exporter:
    """Turns running totals into counter increments and everything else into gauges.

    A total that went down belongs to a new life of its owner and counts from zero.
    """

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._last: dict[tuple[str, ...], float] = {}
        self._gauges: dict[tuple[str, str], dict[tuple[str, ...], tuple[str, dict[str, str]]]] = {}  # by replica

    def export(self, status: dict[str, Any]) -> None:
        tickets, ferry, counters = status["tickets"], status["ferry"], status["counters"]
        for state, number in tickets["by_state"].items():
            self._emitter.set("pageferry_tickets", number, state=state)
        for outcome, total in tickets["ended"].items():
            self._total("pageferry_tickets_ended_total", total, outcome=outcome)
        self._emitter.set("pageferry_queue_requests", status["queue"]["waiting"])
        for name in ("bytes_moved", "tokens_moved", "tokens_recomputed"):
            self._total(f"pageferry_{name}_total", ferry[name])
        self._total("pageferry_bytes_saved_total", self._saved_ratio(status) * ferry["bytes_moved"])
        for name, total in counters.items():
            if name.startswith(VERDICT_PREFIX):
                self._total("pageferry_pages_opened_total", total, verdict=name.removeprefix(VERDICT_PREFIX))
        self._total("pageferry_tag_mismatches_total", counters.get("tag_mismatch_events", 0))
        for node, staging in status["staging"]["nodes"].items():
            self._emitter.set("pageferry_staging_bytes", staging["bytes_held"], node=node)
        here = {(pool, r["replica_id"]) for pool, each in status["pools"].items() for r in each["replicas"]}
        for gone in self._gauges.keys() - here:
            self._forget(gone)
        for pool, each in status["pools"].items():
            ready = [replica for replica in each["replicas"] if replica["state"] == "ready"]
            self._emitter.set("pageferry_replicas", len(ready), pool=pool)
            for replica in each["replicas"]:
                self._replica(pool, replica)

    def _forget(self, gone: tuple[str, str]) -> None:
        """A replica that is no more: what it said last would stand, and alert, for as long as this process lives."""
        for name, labels in self._gauges.pop(gone).values():
            self._emitter.set(name, 0, **labels)
        self._last = {key: total for key, total in self._last.items() if key[1:] != gone}

    def _gauge(self, name: str, value: float, **labels: str) -> None:
        self._emitter.set(name, value, **labels)
        of = self._gauges.setdefault((labels["pool"], labels["replica"]), {})
        of[(name, *labels.values())] = (name, labels)

    def _replica(self, pool: str, replica: dict[str, Any]) -> None:
        labels = {"pool": pool, "replica": replica["replica_id"]}
        for state in ("free", "held", "quarantined"):
            self._gauge("pageferry_kv_blocks", replica[f"blocks_{state}"], state=state, **labels)
        held = replica["blocks_held"] / max(1, replica["blocks_total"])
        self._gauge("pageferry_kv_occupancy", held, **labels)
        for name, value in replica["counters"].items():
            metric = BY_NAME.get(f"{REPLICA_PREFIX}{name}") or BY_NAME.get(f"{REPLICA_PREFIX}{name}_total")
            if metric is None:
                continue  # a total of a newer or older replica in a rolling update
            if metric.kind == "gauge":
                self._gauge(metric.name, value, **labels)
            else:
                self._total(metric.name, value, **labels)

    def _total(self, name: str, total: float, **labels: str) -> None:
        key = (name, *labels.values())
        before = self._last.get(key, 0.0)
        self._last[key] = total
        self._emitter.count(name, total - before if total >= before else total, **labels)

    @staticmethod
    def _saved_ratio(status: dict[str, Any]) -> float:
        """Bytes not moved for each byte moved: how much larger prefill's pages are than what travels."""
        sizes = {
            pool: _bytes_per_value(each["replicas"][0]["layout"]["dtype"])
            for pool, each in status["pools"].items()
            if each["replicas"]
        }
        if "prefill" not in sizes or "decode" not in sizes:
            return 0.0
        return sizes["prefill"] / sizes["decode"] - 1.0


def _bytes_per_value(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 1
