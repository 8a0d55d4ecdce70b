"""What a replica has to say to the controller with its next heartbeat. Bookkeeping only: sending is the server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.engine.in_flight import InFlight
from actors.messages import PAGE_INTEGRITY, PageDelta, ReplicaEvent, ReplicaEventKind

MISMATCHES_REMEMBERED = 256  # requests


class PendingReport:
    """`wants_all_pages`: the controller may have missed something, so the engine has to name all its pages again."""

    def __init__(self) -> None:
        self.events: list[ReplicaEvent] = []
        self.wants_all_pages = False
        self._pages: tuple[PageDelta, ...] = ()
        self._pages_whole = False
        self._mismatched: dict[str, int] = {}  # requests that a page mismatch ended, whose verdict is yet to come

    def add(self, kind: ReplicaEventKind, live: InFlight | None = None, request_id: str = "", **more: Any) -> None:
        ticket_id = live.ticket.ticket_id if live else 0
        self.events.append(ReplicaEvent(kind=kind, ticket_id=ticket_id, request_id=request_id, **more))

    def note_mismatch(self, output: Any, live: InFlight) -> None:
        """Remembers the ticket of a request that this output ends for a page mismatch; its verdict comes by itself."""
        if output.stop_reason == PAGE_INTEGRITY:
            self._mismatched[output.request_id] = live.ticket.ticket_id
            while len(self._mismatched) > MISMATCHES_REMEMBERED:
                del self._mismatched[next(iter(self._mismatched))]

    def add_answer(self, stats: dict[str, Any], in_flight: Mapping[str, InFlight]) -> None:
        """The engine's answer: pages taken and given back, and an event for each tag mismatch."""
        self._pages = tuple(
            PageDelta(
                request_id=request_id,
                released=released,
                added=dict(zip(pages, tags)),
                ticket_id=in_flight[request_id].ticket.ticket_id if request_id in in_flight else 0,
            )
            for request_id, released, pages, tags in stats.get("pages", ())
        )
        self._pages_whole = stats.get("pages_whole", False)
        for verdict in stats.get("verdicts", ()):
            request_id = verdict["request_id"]
            live, ticket_id = in_flight.get(request_id), self._mismatched.pop(request_id, 0)
            self.events.append(
                ReplicaEvent(
                    kind=ReplicaEventKind.TAG_MISMATCH,
                    ticket_id=live.ticket.ticket_id if live else ticket_id,
                    request_id=request_id,
                    position=verdict["position"],
                    detail=verdict["text"],
                )
            )

    def take(self) -> tuple[tuple[ReplicaEvent, ...], tuple[PageDelta, ...], bool]:
        """Events, pages, and whether these are all pages; each is taken once."""
        taken = tuple(self.events), self._pages, self._pages_whole
        self.events, self._pages, self._pages_whole = [], (), False
        return taken

    def put_back(self, events: tuple[ReplicaEvent, ...]) -> None:
        """The heartbeat did not arrive: its events go with the next one, and the engine names all its pages again."""
        self.events = [*events, *self.events]
        self.wants_all_pages = True
