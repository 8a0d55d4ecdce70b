"""`serve run` with a shipped topology as it is: Ray's own command, a cluster of its own, no flag of ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.client import Client
from app.processes import MARK, end_marked, marked

RUN = "PAGEFERRY_TEST_RUN"  # in the environment of every process that the command starts
ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
READY_S = 300
ENDED_S = 30


@contextmanager
def serve_run(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The command, the mark of its processes, and its output; all of it is ended at the end."""
    mark, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="pf-run-", dir="/tmp"))
    kept = {name: value for name, value in os.environ.items() if name != MARK and not name.startswith("RAY_")}
    environ = {**kept, RUN: mark, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(Path(sys.executable).parent / "serve"), "run", *arguments]
    with (
        (folder / "said").open("wb") as said,
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process, mark, folder / "said"
        finally:
            process.kill()
            end_marked(mark, variable=RUN)
            shutil.rmtree(folder, ignore_errors=True)


def healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(480)
def test_the_cpu_topology_becomes_ready_on_two_cores_and_ends_whole() -> None:
    with serve_run("app.main:build", "config=cluster/topologies/local-cpu.yaml") as (process, mark, said):
        until = time.monotonic() + READY_S
        while not healthy(URL):
            assert process.poll() is None and time.monotonic() < until, said.read_text()[-4000:]
            time.sleep(0.5)
        with Client(URL) as client:
            assert client.chat("Name a colour.", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        until = time.monotonic() + ENDED_S
        while (left := marked(mark, RUN)) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, [(Path(f"/proc/{pid}/cmdline")).read_bytes() for pid in left]
