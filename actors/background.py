"""Work that a process repeats for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

SAY_AGAIN_S = 10.0


async def repeat(name: str, work: Callable[[], Awaitable[None] | None], every_s: float, logger: logging.Logger) -> None:
    """Calls `work` every `every_s` seconds until it is cancelled. No exception ends it; the log has it."""
    said_at = -SAY_AGAIN_S
    while True:
        await asyncio.sleep(every_s)
        try:
            if (waiting := work()) is not None:
                await waiting
        except Exception:
            if time.monotonic() - said_at >= SAY_AGAIN_S:
                said_at = time.monotonic()
                logger.exception("%s failed; it is tried again every %g s", name, every_s)
