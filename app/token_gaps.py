"""Gaps between the tokens of a stream, counted where they are seen."""

from __future__ import annotations

import time
from bisect import bisect_left

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics import FrontendMetrics
from cluster.metrics import GAP_BOUNDS, GAP_SECONDS

EMIT_AFTER = 64  # gaps: a metric takes longer than a gap is to be measured


class TokenGaps:
    """Of one stream. `at`: one of `cluster.metrics.GAPS_AT`. Times are seconds of one clock."""

    def __init__(self, metrics: FrontendMetrics, at: str) -> None:
        self._metrics = metrics
        self._at = at
        self._last: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._counts, self._number, self._seconds = [0] * len(GAP_BOUNDS), 0, 0.0

    def token(self, now: float, tokens: int = 1) -> None:
        """So many tokens at once; all but one of them have no gap."""
        last, self._last = self._last, now
        self._counts[0] += tokens - 1
        self._number += tokens - 1
        if last is not None:
            gap = max(0.0, now - last)
            self._counts[bisect_left(GAP_SECONDS, gap)] += 1
            self._number += 1
            self._seconds += gap
        if self._number >= EMIT_AFTER:
            self.emit()

    def other_clock(self) -> None:
        """Times that follow are of another clock."""
        self._last = None

    def emit(self) -> None:
        if self._number:
            self._metrics.token_gaps(self._at, self._counts, self._seconds)
            self._clear()


class SocketGaps:
    """Pure ASGI middleware: when the events of each event stream are written to their socket."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gaps: TokenGaps | None = None

        async def seen(message: Message) -> None:
            nonlocal gaps
            await send(message)
            if message["type"] == "http.response.start":
                if dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream"):
                    gaps = TokenGaps(self._metrics, "socket")
            elif gaps is not None and message.get("body", b"")[:7] in (b"data: {", b"event: "):
                gaps.token(time.monotonic())

        try:
            await self.app(scope, receive, seen)
        finally:
            if gaps is not None:
                gaps.emit()
