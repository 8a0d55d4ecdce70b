"""The table of metrics and the one way to emit them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.metrics import TABLE, Emitter


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


def test_every_metric_can_be_emitted() -> None:
    backend = Backend()
    emit = Emitter(backend, cluster="c")
    for metric in TABLE:
        labels = dict.fromkeys(metric.labels, "x")
        {"counter": emit.count, "gauge": emit.set, "histogram": emit.observe}[metric.kind](metric.name, 2.0, **labels)
    assert [call[1] for call in backend.calls] == [metric.name for metric in TABLE]


def test_a_wrong_name_kind_or_label_is_an_error() -> None:
    emit = Emitter(Backend())
    with pytest.raises(ValueError, match="did you mean 'pageferry_tickets'"):
        emit.set("pageferry_ticket", 1)
    with pytest.raises(ValueError, match="is a gauge"):
        emit.count("pageferry_tickets", 1, state="done")
    with pytest.raises(ValueError, match="labels"):
        emit.set("pageferry_tickets", 1, phase="done")


def test_a_counter_does_not_count_nothing() -> None:
    backend = Backend()
    Emitter(backend).count("pageferry_busy_total", 0)
    assert not backend.calls
