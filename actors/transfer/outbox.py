"""What a transfer machine has to tell the controller, at least once and in order. Pure."""

from __future__ import annotations

from actors.messages import Sealed, TransferEvent
from actors.transfer.staging import Key

REPORT_EVERY_NS = 500_000_000
REPORT_AGAIN_NS = 200_000_000


class Outbox:
    """Events until a report with them is answered, and every seal that waits for its reader (`standing`)."""

    def __init__(self) -> None:
        self.standing: dict[Key, Sealed] = {}
        self._events: list[TransferEvent] = []
        self._sending: list[TransferEvent] | None = None
        self._next_ns = 0  # the next report without an event
        self._hold_ns = 0  # none before

    @property
    def unheard(self) -> tuple[TransferEvent, ...]:
        """Events that no report has been sent with since they were added, or since that report failed."""
        return tuple(self._events)

    def add(self, event: TransferEvent) -> None:
        self._events.append(event)

    def take(self, now_ns: int) -> tuple[TransferEvent, ...] | None:
        """The events of the report that is due now; None when none is due, or one is on its way."""
        if self._sending is not None or now_ns < self._hold_ns or (not self._events and now_ns < self._next_ns):
            return None
        self._sending, self._events = self._events, []
        return tuple(self._sending)

    def answered(self, now_ns: int) -> None:
        self._sending = None
        self._next_ns = now_ns + REPORT_EVERY_NS

    def failed(self, now_ns: int) -> None:
        """It may be a new controller that comes back: it hears of every seal that still waits for its reader."""
        unheard = [*(self._sending or ()), *self._events]
        self._events = [*(sealed for sealed in self.standing.values() if sealed not in unheard), *unheard]
        self._sending = None
        self._hold_ns = now_ns + REPORT_AGAIN_NS
