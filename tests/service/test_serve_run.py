"""`serve run` with shipped topologies as they are: Ray's own command, no flag of ours, on two cores."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from serve_run_command import URL, serve_run

from app.client import Client

ENDED_S = 30


@pytest.mark.timeout(480)
def test_the_cpu_topology_becomes_ready_on_two_cores_and_ends_whole() -> None:
    with serve_run("app.main:build", "config=cluster/topologies/local-cpu.yaml") as run:
        began = time.monotonic()
        run.wait_healthy()
        print(f"`serve run`: ready after {time.monotonic() - began:.0f} s")
        with Client(URL) as client:
            assert client.chat("Name a colour.", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
        until = time.monotonic() + ENDED_S
        while (left := run.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, [(Path(f"/proc/{pid}/cmdline")).read_bytes() for pid in left]
