"""`pageferry serve` with a real Prometheus beside it that has the shipped configuration and rules."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
from serve_command import serving

from ops.prometheus.local import Prometheus, prometheus


@dataclass
class Watched:
    url: str
    prometheus: Prometheus
    logs: Path
    began: float
    process: subprocess.Popen[str]
    shown: str

    def value(self, expr: str) -> float | None:
        return self.prometheus.value(expr)

    def wait(self, what: str, until: Callable[[], bool], seconds: float) -> float:
        began = time.monotonic()
        while not until():
            assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
            time.sleep(0.5)
        return time.monotonic() - began

    def counters(self, pool: str, name: str, headers: dict[str, str]) -> float:
        """A running total of the pool's engines, as `/status` has it."""
        status = requests.get(f"{self.url}/status", headers=headers, timeout=20).json()
        return float(sum(replica["counters"].get(name, 0) for replica in status["pools"][pool]["replicas"]))


@contextmanager
def watched_service(folder: Path, settings: list[str], window: str) -> Iterator[Watched]:
    with serving(settings, RAY_metrics_report_interval_ms="2000") as (process, url, shown):
        targets = Path(next(line.split()[-1] for line in shown.splitlines() if "Prometheus targets" in line))
        with prometheus(folder, targets, window) as watching:
            logs = targets.parent / "session_latest" / "logs" / "serve"
            made = Watched(url, watching, logs, time.time(), process, shown)
            made.wait("scraped", lambda: made.value("ray_pageferry_tag_mismatches_total") is not None, 60)
            made.wait("seen by all rules", lambda: not watching.firing(), 60)
            yield made
