"""Whether this process's event loop gets round in time: everything that a frontend does waits while it stands still."""

from __future__ import annotations

import asyncio

from app.metrics import FrontendMetrics

EVERY_S = 0.1
LEAST_S = 0.05  # a shorter one is a busy machine's


class LoopStall:
    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._longest_s = 0.0

    async def watch(self) -> None:
        """Until it is cancelled."""
        time = asyncio.get_running_loop().time
        while True:
            due = time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            late_s = time() - due
            self._longest_s = max(self._longest_s, late_s)
            if late_s >= LEAST_S:
                self._metrics.observe("pageferry_loop_stall_seconds", late_s)

    def take(self) -> float:
        """The longest, in seconds, since this was called before."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s
