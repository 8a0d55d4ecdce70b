"""The table of metrics and the one way to emit them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ray.util.metrics

from actors.controller.ticket_state import LIVE
from actors.messages import Outcome, Role, Verdict
from cluster.metrics import BY_NAME, LIVE_STATES, OUTCOMES, POOLS, TABLE, VERDICTS, Emitter


class Backend:
    """Records what Ray's metrics module would be asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float, dict[str, str]]] = []

    def _make(self, kind: str) -> Any:
        calls = self.calls

        class Made:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Any = None) -> None:
                self.name, self.keys = name, tag_keys
                assert description and (kind != "Histogram" or boundaries == sorted(boundaries))

            def set_default_tags(self, tags: dict[str, str]) -> None:
                assert set(tags) <= set(self.keys)

            def _record(self, value: float, tags: dict[str, str]) -> None:
                assert set(tags) <= set(self.keys)
                calls.append((kind, self.name, value, tags))

            inc = set = observe = _record

        return Made

    def __getattr__(self, kind: str) -> Any:
        return self._make(kind)


def test_names_follow_prometheus() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric in TABLE:
        assert re.fullmatch(r"pageferry_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_seconds") == (metric.kind == "histogram")
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert len(metric.help) > 20 and not metric.help.endswith(".")


def test_label_values_are_those_of_the_types() -> None:
    assert set(OUTCOMES) == set(Outcome) and set(POOLS) == set(Role) and set(VERDICTS) == set(Verdict)
    assert set(LIVE_STATES) == LIVE


def test_a_wrong_name_kind_or_label_is_an_error() -> None:
    emit = Emitter(Backend())
    with pytest.raises(ValueError, match="did you mean 'pageferry_tickets'"):
        emit.set("pageferry_ticket", 1)
    with pytest.raises(ValueError, match="is a gauge"):
        emit.count("pageferry_tickets", 1, state="done")
    with pytest.raises(ValueError, match="labels"):
        emit.set("pageferry_tickets", 1, phase="done")


def test_a_label_value_that_the_table_does_not_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="outcome is one of done, cancelled, failed, refused, not 'lost'"):
        Emitter(Backend()).count("pageferry_requests_total", outcome="lost")


def test_zero_exports_what_is_known_and_nothing_else() -> None:
    backend = Backend()
    emit = Emitter(backend, application="a")
    emit.zero(TABLE)
    series = [(name, tuple(labels.values())) for _, name, value, labels in backend.calls if value == 0]
    assert len(series) == len(backend.calls) == len(set(series))
    for metric in TABLE:
        expected = [] if metric.open_labels or metric.kind == "histogram" else metric.series({})
        assert sum(name == metric.name for name, _ in series) == len(expected)
    assert ("pageferry_requests_total", ("failed",)) in series
    backend.calls.clear()
    emit.zero(TABLE, pool="decode", replica="d#1")
    assert {tuple(labels.values())[:2] for _, _, _, labels in backend.calls} == {("decode", "d#1")}
    assert {call[1] for call in backend.calls} == {metric.name for metric in TABLE if "replica" in metric.labels}


def test_ray_takes_a_zero() -> None:
    """`zero` records past `Counter.inc`, which refuses 0; this is the real class."""
    Emitter(ray.util.metrics).zero([BY_NAME["pageferry_busy_total"], BY_NAME["pageferry_tickets"]])
    with pytest.raises(ValueError, match="must be >0"):
        ray.util.metrics.Counter("pageferry_test_total", "of this test").inc(0)
