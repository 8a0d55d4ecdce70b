"""How much of the machine other work used while a system was being measured: a figure is only as good as that."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from ops.bench.systems import Running

QUIET_CORES = 0.1


def machine_cpu_seconds() -> float:
    """CPU time of the whole machine that was not idle, stolen time included."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Counts from its making. `foreign` is in cores: 0.5 means that half a core's time went elsewhere."""

    def __init__(self, running: Sequence[Running]) -> None:
        self._running = list(running)
        self._began = time.monotonic(), machine_cpu_seconds(), self._own()

    def _own(self) -> float:
        return sum(each.cpu_seconds() for each in self._running) + time.process_time()

    def foreign(self) -> float:
        now, machine, own = self._began
        seconds = time.monotonic() - now
        return max(0.0, (machine_cpu_seconds() - machine - (self._own() - own)) / seconds)


def warning(foreign_cores: float) -> str:
    """ "" when the machine was quiet."""
    if foreign_cores <= QUIET_CORES:
        return ""
    return f"**Noisy:** other processes used up to {foreign_cores:.1f} cores meanwhile; these are no figures to quote."
