"""How long frontends' event loops stood still lately. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.controller.forecast import SECOND
from actors.controller.journal import Tracked, TrackedDict

KEPT_NS = 10 * SECOND


@dataclass(slots=True)
class Stalls(Tracked):
    """The longest one of each frontend in the last ten seconds."""

    _longest: TrackedDict[str, tuple[float, int]] = field(default_factory=TrackedDict)  # seconds, when heard

    def note(self, frontend_id: str, stall_s: float, now_ns: int) -> None:
        if stall_s >= self.of(frontend_id, now_ns):
            self._longest[frontend_id] = (stall_s, now_ns)

    def of(self, frontend_id: str, now_ns: int) -> float:
        stall_s, heard_ns = self._longest.get(frontend_id, (0.0, 0))
        return stall_s if now_ns - heard_ns < KEPT_NS else 0.0

    def forget(self, frontend_id: str) -> None:
        self._longest.pop(frontend_id, None)
