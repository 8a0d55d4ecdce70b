"""A frontend whose event loop stands still says for how long."""

from __future__ import annotations

import asyncio
import time

from app.loop_stall import LEAST_S, LoopStall
from app.metrics import Discard, FrontendMetrics


class Seen(FrontendMetrics):
    def __init__(self) -> None:
        super().__init__(Discard)
        self.stalls: list[float] = []

    def observe(self, name: str, value: float, **labels: str) -> None:
        assert name == "pageferry_loop_stall_seconds"
        self.stalls.append(value)


async def test_a_loop_that_stood_still_is_seen_once() -> None:
    seen = Seen()
    stall = LoopStall(seen)
    watch = asyncio.create_task(stall.watch())
    await asyncio.sleep(0.12)
    stall.take()
    time.sleep(0.5)
    await asyncio.sleep(0.15)
    assert stall.take() >= 0.35 and max(seen.stalls) >= 0.35 and min(seen.stalls) >= LEAST_S
    assert stall.take() < 0.35
    watch.cancel()
