"""A service watched as in production: Prometheus scrapes it with the shipped configuration and rules."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from live_service import free_port
from serve_command import serving

SHIPPED = Path(__file__).parents[2] / "ops" / "prometheus"


@dataclass
class Watched:
    url: str
    prometheus: str
    logs: Path
    began: float
    process: subprocess.Popen[str]
    shown: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.prometheus}/api/v1/query", params={"query": expr}, timeout=20).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def value(self, expr: str) -> float | None:
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        alerts = requests.get(f"{self.prometheus}/api/v1/alerts", timeout=20).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

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


def configuration(folder: Path, targets: Path, window: str) -> Path:
    """The shipped configuration and rules, with this service's targets; windows of 5 and 10 minutes are `window`."""
    rules = re.sub(r"\[(5|10)m\]", f"[{window}]", (SHIPPED / "rules.yaml").read_text())
    (folder / "rules.yaml").write_text(re.sub(r"for: \d+m", "for: 5s", rules))
    file = folder / "prometheus.yaml"
    shipped = (SHIPPED / "prometheus.yaml").read_text()
    file.write_text(shipped.replace("/tmp/ray/prom_metrics_service_discovery.json", str(targets)))
    return file


@contextmanager
def watched_service(folder: Path, settings: list[str], window: str, **environ: str) -> Iterator[Watched]:
    with serving(settings, RAY_metrics_report_interval_ms="2000", **environ) as (process, url, shown):
        targets = Path(next(line.split()[-1] for line in shown.splitlines() if "Prometheus targets" in line))
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={configuration(folder, targets, window)}"]
        command += [f"--web.listen-address={address}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as prometheus,
        ):
            try:
                logs = targets.parent / "session_latest" / "logs" / "serve"
                made = Watched(url, f"http://{address}", logs, time.time(), process, shown)
                made.wait("scraped", lambda: _ready(made), 60)
                yield made
            finally:
                prometheus.terminate()


def _ready(made: Watched) -> bool:
    try:
        return made.value("ray_pageferry_tag_mismatches_total") is not None
    except requests.ConnectionError:
        return False
