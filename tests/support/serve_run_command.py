"""`serve run` in a process of its own, as a person starts it: a Ray cluster of its own, nothing of ours around it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.commands.own_http import DIRECT
from app.processes import MARK, end_marked, marked

RUN = "PAGEFERRY_TEST_RUN"  # in the environment of every process that the command starts
ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class ServeRun:
    process: subprocess.Popen[bytes]
    mark: str
    folder: Path  # Ray's files

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def processes(self) -> list[int]:
        return marked(self.mark, RUN)

    def get(self, path: str) -> Any:
        with DIRECT.open(URL + path, timeout=20) as answer:
            return json.load(answer)

    def wait_healthy(self, timeout_s: float = 300.0) -> None:
        until = time.monotonic() + timeout_s
        while not self._healthy():
            assert self.process.poll() is None and time.monotonic() < until, self.said[-4000:]
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            with DIRECT.open(f"{URL}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def serve_status(self, deployment: str) -> dict[str, Any]:
        """What Serve itself says of a deployment, from its dashboard."""
        address = re.search(r"dashboard at [^\n]*?(127\.0\.0\.1:\d+)", self.said)
        assert address is not None, self.said
        with DIRECT.open(f"http://{address[1]}/api/serve/applications/", timeout=20) as answer:
            [application] = json.load(answer)["applications"].values()
        found: dict[str, Any] = application["deployments"][deployment]
        return found

    def metrics(self) -> str:
        """All of the node's metrics, in Prometheus' text form."""
        file = next(self.folder.rglob("prom_metrics_service_discovery.json"))
        texts = []
        for target in json.loads(file.read_text())[0]["targets"]:
            with DIRECT.open(f"http://{target}/metrics", timeout=20) as answer:
                texts.append(answer.read().decode())
        return "\n".join(texts)


@contextmanager
def serve_run(*arguments: str) -> Iterator[ServeRun]:
    """All processes of it are ended at the end."""
    mark, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="pf-run-", dir="/tmp"))
    kept = {name: value for name, value in os.environ.items() if name != MARK and not name.startswith("RAY_")}
    environ = kept | {RUN: mark, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    environ["RAY_worker_niceness"] = "0"  # Ray's own 15 lets whatever else runs on the machine go first
    command = [str(Path(sys.executable).parent / "serve"), "run", *arguments]
    with (
        (folder / "said").open("wb") as said,
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield ServeRun(process, mark, folder)
        finally:
            process.kill()
            end_marked(mark, variable=RUN)
            shutil.rmtree(folder, ignore_errors=True)
