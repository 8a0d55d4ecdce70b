"""The last ten minutes of a service in sixty points, for people who have just opened its page. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

STEP_S = 10.0
POINTS_MAX = 60


class History:
    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)

    def add(self, status: dict[str, Any]) -> None:
        """`status`: of `actors.controller.status`; one that comes within `STEP_S` of the last point is left out."""
        if self._points and status["uptime_s"] - self._points[-1]["uptime_s"] < STEP_S:
            return
        self._points.append(
            {
                "uptime_s": status["uptime_s"],
                "waiting": status["queue"]["waiting"],
                "tickets": status["tickets"]["in_flight"],
                "occupancy": {pool: _occupancy(each["replicas"]) for pool, each in status["pools"].items()},
            }
        )

    def points(self) -> list[dict[str, Any]]:
        """Oldest first. `occupancy` of a pool without replicas is None."""
        return list(self._points)


def _occupancy(replicas: list[dict[str, Any]]) -> float | None:
    total = sum(replica["blocks_total"] for replica in replicas)
    return round(sum(replica["blocks_held"] for replica in replicas) / total, 4) if total else None
