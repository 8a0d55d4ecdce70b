"""The controller's metrics: totals become increments, a new life counts from zero, every name is in the table."""

from __future__ import annotations

from typing import Any

from actors.controller.exports import Exporter
from cluster.metrics import CONTROLLER, Emitter


class Recorder:
    """A metrics backend that keeps what it gets, as `ray.util.metrics` would take it."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], float] = {}

    def _make(self, name: str, **_: Any) -> Any:
        values = self.values

        class Made:
            def set_default_tags(self, tags: dict[str, str]) -> None:
                assert tags == {}

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0, "Ray refuses it"
                self._record(value, tags)

            def _record(self, value: float, tags: dict[str, str]) -> None:
                key = (name, *tags.values())
                values[key] = values.get(key, 0.0) + value

            def set(self, value: float, tags: dict[str, str]) -> None:
                values[(name, *tags.values())] = value

        return Made()

    Counter = Gauge = Histogram = _make


STARTED_NS = 1_000


def status(moved: int = 0, checks: float = 0.0, held: int = 3, incarnation: int = STARTED_NS + 1) -> dict[str, Any]:
    def replica(name: str, dtype: str) -> dict[str, Any]:
        return {
            "replica_id": name,
            "state": "ready",
            "blocks_total": 12,
            "blocks_free": 12 - held,
            "blocks_held": held,
            "blocks_quarantined": 0,
            "running": 2,
            "waiting": 1,
            "layout": {"dtype": dtype},
            "incarnation": incarnation,
            "counters": {"integrity_checks": checks, "integrity_unproven_s": 0.5, "from_the_future": 1.0},
        }

    return {
        "tickets": {"by_state": {"decoding": 2}, "ended": {"done": 5}},
        "engines_lost": {"decode": {"hung": 1}},
        "queue": {"waiting": 1},
        "ferry": {"bytes_moved": moved, "tokens_moved": 10, "tokens_recomputed": 0},
        "counters": {"pages_ok": 4, "pages_mismatch": 1, "admitted": 9, "tag_mismatch_events": 2},
        "staging": {"nodes": {"n": {"bytes_held": 7, "bytes_max": 9}}},
        "scaling": {
            "decided": [
                {"pool": "decode", "direction": "up", "cause": "pressure", "times": 3},
                {"pool": "decode", "direction": "down", "cause": "low", "times": 1},
            ]
        },
        "pools": {
            "prefill": {"target": None, "starting": 0, "unplaced": 0, "replicas": [replica("p", "bfloat16")]},
            "decode": {"target": 2, "starting": 0, "unplaced": 1, "replicas": [replica("d", "float8_e4m3fn")]},
        },
    }


def test_totals_are_counted_once_and_survive_a_new_life() -> None:
    backend = Recorder()
    exporter = Exporter(Emitter(backend), started_ns=STARTED_NS)
    exporter.export(status(moved=100, checks=10))
    exporter.export(status(moved=150, checks=10))
    assert backend.values[("pageferry_replicas_unplaced", "decode")] == 1
    assert backend.values[("pageferry_pool_target", "decode")] == 2
    assert backend.values[("pageferry_bytes_moved_total",)] == 150
    assert backend.values[("pageferry_bytes_saved_total",)] == 150, "BF16 pages are twice as large as what travels"
    exporter.export(status(moved=30, checks=4))
    assert backend.values[("pageferry_bytes_moved_total",)] == 180
    assert backend.values[("pageferry_engine_integrity_checks_total", "decode", "d")] == 14
    assert backend.values[("pageferry_tickets_ended_total", "done")] == 5
    assert backend.values[("pageferry_pages_opened_total", "mismatch")] == 1
    assert backend.values[("pageferry_tag_mismatches_total",)] == 2
    assert backend.values[("pageferry_scale_decisions_total", "decode", "up", "pressure")] == 3
    assert backend.values[("pageferry_kv_occupancy", "decode", "d")] == 0.25
    assert backend.values[("pageferry_kv_blocks", "free", "prefill", "p")] == 9
    assert backend.values[("pageferry_engine_integrity_unproven_s", "decode", "d")] == 0.5
    assert backend.values[("pageferry_staging_bytes", "n")] == 7


def test_every_series_is_there_at_zero_before_its_first_event() -> None:
    backend = Recorder()
    exporter = Exporter(Emitter(backend), started_ns=STARTED_NS)
    without_replica = {key for key, value in backend.values.items() if value == 0}
    for metric in CONTROLLER:
        if not metric.open_labels:
            assert {(metric.name, *labels.values()) for labels in metric.series({})} <= without_replica
    assert ("pageferry_tag_mismatches_total",) in without_replica
    assert ("pageferry_pages_opened_total", "stale") in without_replica
    assert ("pageferry_scale_decisions_total", "decode", "up", "pressure") in without_replica
    joined = status()
    joined["pools"]["decode"]["replicas"][0]["counters"] = {}  # integrity off: the engine names none of them
    exporter.export(joined)
    assert backend.values[("pageferry_engine_integrity_breaches_total", "decode", "d")] == 0
    assert backend.values[("pageferry_engine_integrity_quarantined_share", "decode", "d")] == 0


def test_gauges_of_a_replica_that_is_gone_do_not_stand() -> None:
    backend = Recorder()
    exporter = Exporter(Emitter(backend), started_ns=STARTED_NS)
    exporter.export(status(checks=10))
    gone = status(checks=10)
    gone["pools"]["decode"]["replicas"] = []
    exporter.export(gone)
    assert backend.values[("pageferry_engine_integrity_unproven_s", "decode", "d")] == 0
    assert backend.values[("pageferry_kv_occupancy", "decode", "d")] == 0
    exporter.export(status(checks=10))  # the same name again is another life: its total counts anew
    assert backend.values[("pageferry_engine_integrity_checks_total", "decode", "d")] == 20


def test_totals_from_before_a_restart_of_the_controller_are_not_counted_again() -> None:
    backend = Recorder()
    exporter = Exporter(Emitter(backend), started_ns=STARTED_NS)
    exporter.export(status(checks=500, incarnation=STARTED_NS - 1))
    assert backend.values[("pageferry_engine_integrity_checks_total", "decode", "d")] == 0
    exporter.export(status(checks=503, incarnation=STARTED_NS - 1))
    assert backend.values[("pageferry_engine_integrity_checks_total", "decode", "d")] == 3
