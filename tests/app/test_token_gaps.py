"""Gaps between tokens are counted one by one, where they are seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from app.metrics import Discard, FrontendMetrics
from app.token_gaps import EMIT_AFTER, SocketGaps, TokenGaps
from cluster.metrics import GAP_BOUNDS


class Metrics(FrontendMetrics):
    """Sums up what is counted, as Prometheus would see it."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        super().__init__(Discard)

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        super().count(name, value, **labels)
        self.seen[labels.get("at", ""), labels.get("le", "sum")] += value  # type: ignore[assignment]

    def at(self, place: str) -> list[float]:
        """Gaps within each bound of `GAP_BOUNDS`."""
        return [self.seen[place, bound] for bound in GAP_BOUNDS]


@pytest.mark.parametrize(
    ("gaps", "le", "within"),
    [
        ([0.04, 0.04, 0.3], "0.04", 2),
        ([0.04, 0.3], "0.3", 2),
        ([0.0401], "0.04", 0),
        ([0.0], "0.001", 1),
        ([9], "5.0", 0),
    ],
)
def test_each_gap_is_in_the_bounds_that_hold_it(gaps: list[float], le: str, within: int) -> None:
    metrics, now = Metrics(), 100.0
    counted = TokenGaps(metrics, "frontend")
    counted.token(now)
    for gap in gaps:
        counted._last = 0.0  # times whose difference is the gap to the last digit
        counted.token(gap)
    assert metrics.at("frontend") == [0] * len(GAP_BOUNDS), "a gap is not worth a call by itself"
    counted.emit()
    counted.emit()
    assert metrics.seen["frontend", le] == within
    assert metrics.seen["frontend", "+Inf"] == len(gaps)
    assert metrics.seen["frontend", "sum"] == pytest.approx(sum(gaps))


def test_long_streams_are_seen_before_they_end() -> None:
    metrics = Metrics()
    counted = TokenGaps(metrics, "engine")
    for number in range(EMIT_AFTER + 1):
        counted.token(0.01 * number)
    assert metrics.seen["engine", "+Inf"] == EMIT_AFTER


def test_tokens_of_one_step_have_no_gap_and_another_clock_has_none_either() -> None:
    metrics = Metrics()
    counted = TokenGaps(metrics, "engine")
    counted.token(1.0, 3)
    counted.other_clock()
    counted.token(5000.0)
    counted.emit()
    assert metrics.seen["engine", "0.001"] == metrics.seen["engine", "+Inf"] == 2
    assert metrics.seen["engine", "sum"] == 0


@pytest.mark.parametrize("kind", ["text/event-stream; charset=utf-8", "application/json"])
async def test_events_of_a_stream_are_timed_as_they_leave(kind: str) -> None:
    """What the server does between two events counts, what it does after the last does not."""
    pause_s = 0.05

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"data: {%d}\n\n" % number, "more_body": True})
            await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ignore(message: Any) -> None:
        pass

    metrics = Metrics()
    await SocketGaps(server, metrics)({"type": "http"}, ignore, ignore)
    streams = kind.startswith("text/event-stream")
    assert metrics.seen["socket", "+Inf"] == (2 if streams else 0)
    assert metrics.seen["socket", "0.04"] == 0
    assert metrics.seen["socket", "sum"] >= (2 * pause_s - 0.02 if streams else 0)
