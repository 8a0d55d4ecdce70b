"""A Prometheus on this machine beside a local service, with the shipped configuration and rules in a shorter time."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

SHIPPED = Path(__file__).parent
TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"  # in the shipped configuration
INSTALLED = shutil.which("prometheus") is not None


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=20).json()
        if answer["status"] != "success":
            raise ValueError(f"{expr}: {answer}")
        return list(answer["data"]["result"])

    def value(self, expr: str) -> float | None:
        """Of the first series; None without one, or while Prometheus is not up yet."""
        try:
            found = self.query(expr)
        except requests.ConnectionError:
            return None
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        try:
            answer = requests.get(f"{self.url}/api/v1/alerts", timeout=20).json()
        except requests.ConnectionError:
            return set()
        return {a["labels"]["alertname"] for a in answer["data"]["alerts"] if a["state"] == "firing"}


def configuration(folder: Path, targets: Path, window: str, hold: str, every: str) -> Path:
    """Windows of minutes in the rules become `window`, holds of minutes `hold`, intervals `every`; nothing else."""
    rules = re.sub(r"\[(5|10)m\]", f"[{window}]", (SHIPPED / "rules.yaml").read_text())
    rules = re.sub(r"for: \d+m", f"for: {hold}", rules).replace("interval: 5s", f"interval: {every}")
    (folder / "rules.yaml").write_text(rules)
    file = folder / "prometheus.yaml"
    text = (
        (SHIPPED / "prometheus.yaml")
        .read_text()
        .replace(TARGETS, str(targets))
        .replace("interval: 5s", f"interval: {every}")
    )
    file.write_text(text.replace("refresh_interval: 10s", f"refresh_interval: {every}"))
    return file


@contextmanager
def prometheus(
    folder: Path, targets: Path, window: str = "45s", hold: str = "5s", every: str = "5s"
) -> Iterator[Prometheus]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={configuration(folder, targets, window, hold, every)}"]
    command += [f"--web.listen-address={address}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
