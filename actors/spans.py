"""Spans of a request over its processes, and the tracer that is off.

A span's context travels as the text of a W3C `traceparent`: in `AdmitRequest.trace`, and from there in the ticket. ""
stands for a request that is not sampled, of which no span is made anywhere.
"""

from __future__ import annotations

from typing import Any


class Span:
    """A request's own span, at its frontend. This one is of a request that is not sampled."""

    context = ""
    began = 0.0  # monotonic seconds

    def child(self, name: str, seconds: float, **attributes: Any) -> None:
        """A part of it that ends now and took so long."""

    def end(self, status: int, **attributes: Any) -> None:
        """`status`: HTTP."""


NO_SPAN = Span()


class Tracer:
    """This one is off."""

    def request(self, name: str, traceparent: str, tracestate: str) -> Span:
        """Begins a request's span, in the trace of its client where it sent one."""
        return NO_SPAN

    def span(self, name: str, parent: str, seconds: float, **attributes: Any) -> None:
        """A finished span that ends now and took so long; nothing when `parent` is ""."""
