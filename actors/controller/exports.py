"""What the controller tells Prometheus: one walk over `status` every few seconds; pure but for its emitter."""

from __future__ import annotations

from typing import Any

from cluster.metrics import CONTROLLER, ENGINE, ENGINE_COUNTERS, VERDICTS, Emitter

NODE_CHARS = 12  # of Ray's 56 in a node id, as in the names of transfer actors


class Exporter:
    """Turns running totals into counter increments and everything else into gauges.

    A total that went down belongs to a new life of its owner and counts from zero. The totals of a replica that is
    older than this controller (`started_ns`, wall clock) were exported by an earlier one: they count from there.
    """

    def __init__(self, emitter: Emitter, started_ns: int) -> None:
        self._started_ns = started_ns
        self._emitter = emitter
        self._last: dict[tuple[str, ...], float] = {}
        self._gauges: dict[tuple[str, str], dict[tuple[str, ...], tuple[str, dict[str, str]]]] = {}  # by replica
        emitter.zero(CONTROLLER)

    def export(self, status: dict[str, Any]) -> None:
        tickets, ferry, counters = status["tickets"], status["ferry"], status["counters"]
        for state, number in tickets["by_state"].items():
            self._emitter.set("pageferry_tickets", number, state=state)
        for outcome, total in tickets["ended"].items():
            self._total("pageferry_tickets_ended_total", total, outcome=outcome)
        self._emitter.set("pageferry_queue_requests", status["queue"]["waiting"])
        self._total("pageferry_bytes_moved_total", ferry["bytes_moved"])
        self._total("pageferry_tokens_moved_total", ferry["tokens_moved"])
        self._total("pageferry_tokens_recomputed_total", ferry["tokens_recomputed"])
        self._total("pageferry_bytes_saved_total", self._saved_ratio(status) * ferry["bytes_moved"])
        for verdict in VERDICTS:
            self._total("pageferry_pages_opened_total", counters.get(f"pages_{verdict}", 0), verdict=verdict)
        self._total("pageferry_tag_mismatches_total", counters.get("tag_mismatch_events", 0))
        for each in status["scaling"]["decided"]:
            labels = {label: each[label] for label in ("pool", "direction", "cause")}
            self._total("pageferry_scale_decisions_total", each["times"], **labels)
        for pool, causes in status["engines_lost"].items():
            for cause, total in causes.items():
                self._total("pageferry_engines_lost_total", total, pool=pool, cause=cause)
        for node_id, staging in status["staging"]["nodes"].items():
            node = node_id[:NODE_CHARS]
            self._emitter.set("pageferry_staging_bytes", staging["bytes_held"], node=node)
            self._emitter.set("pageferry_staging_bytes_max", staging["bytes_max"], node=node)
        here = {(pool, r["replica_id"]) for pool, each in status["pools"].items() for r in each["replicas"]}
        for gone in self._gauges.keys() - here:
            self._forget(gone)
        for pool, each in status["pools"].items():
            ready = [replica for replica in each["replicas"] if replica["state"] == "ready"]
            self._emitter.set("pageferry_replicas", len(ready), pool=pool)
            if each["target"] is not None:
                self._emitter.set("pageferry_pool_target", each["target"], pool=pool)
            self._emitter.set("pageferry_replicas_starting", each["starting"], pool=pool)
            self._emitter.set("pageferry_replicas_unplaced", each["unplaced"], pool=pool)
            self._total("pageferry_targets_refused_total", counters.get(f"targets_refused_{pool}", 0), pool=pool)
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
        if (pool, replica["replica_id"]) not in self._gauges:
            self._emitter.zero(ENGINE, **labels)
            if replica["incarnation"] < self._started_ns:
                for name, metric in ENGINE_COUNTERS.items():
                    self._last[(metric.name, *labels.values())] = replica["counters"].get(name, 0)
        for state in ("free", "held", "quarantined"):
            self._gauge("pageferry_kv_blocks", replica[f"blocks_{state}"], state=state, **labels)
        held = replica["blocks_held"] / max(1, replica["blocks_total"])
        self._gauge("pageferry_kv_occupancy", held, **labels)
        self._gauge("pageferry_running_requests", replica["running"], **labels)
        self._gauge("pageferry_waiting_requests", replica["waiting"], **labels)
        for name, metric in ENGINE_COUNTERS.items():  # what a newer or older replica says besides is left out
            value = replica["counters"].get(name, 0)
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
