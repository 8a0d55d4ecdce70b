"""Spans of what a node's staging does for a request: sealing, and the opening of its pages."""

from __future__ import annotations

import time
from collections.abc import Iterable

from actors.messages import OpenedAt, Sealed, TransferEvent
from actors.tracing import tracer
from actors.transfer.staging import Key
from cluster.frontend_spec import TracingSpec

OFF = TracingSpec()
KEPT = 4096  # leases whose end may still come


class TransferSpans:
    def __init__(self, spec: TracingSpec, node_id: str) -> None:
        self._node_id = node_id
        self._spec = spec
        self._tracer = tracer(spec, "transfer", node_id)
        self._writing: dict[Key, tuple[str, float]] = {}  # trace, and since when
        self._reading: dict[Key, tuple[str, float]] = {}

    def configure(self, spec: TracingSpec) -> None:
        if spec != self._spec:
            self._spec, self._tracer = spec, tracer(spec, "transfer", self._node_id)

    def leased(self, key: Key, trace: str) -> None:
        self._note(self._writing, key, trace)

    def reads(self, key: Key, trace: str) -> None:
        self._note(self._reading, key, trace)

    @staticmethod
    def _note(kept: dict[Key, tuple[str, float]], key: Key, trace: str) -> None:
        if trace:
            kept[key] = trace, time.monotonic()
            if len(kept) > KEPT:
                del kept[next(iter(kept))]

    def happened(self, events: Iterable[TransferEvent]) -> None:
        """A report that failed is repeated; its events make one span each."""
        if not self._writing and not self._reading:
            return
        now = time.monotonic()
        for event in events:
            if isinstance(event, Sealed):
                trace, since = self._writing.pop((event.seal.ticket_id, event.seal.attempt), ("", now))
                self._tracer.span("transfer.staged", trace, now - since, bytes=event.lease.num_bytes)
            elif isinstance(event, OpenedAt):
                opened = event.opened
                trace, since = self._reading.pop((opened.ticket_id, opened.attempt), ("", now))
                self._tracer.span("transfer.opened", trace, now - since, bytes=opened.num_bytes, pages=opened.num_pages)
