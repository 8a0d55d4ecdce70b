"""Garbage collection for a process that keeps many small objects for long. Tickets have no reference cycles."""

from __future__ import annotations

import gc

GENERATION_0 = 100_000  # objects made before the youngest generation is looked at


def tune_gc() -> None:
    """What exists now is never walked again, and new objects seldom: a full pass would stop every decision."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GENERATION_0, 50, 1000)
