"""`pageferry serve` as a person runs it: says what it waits for, answers, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from serve_command import serving

from actors.engine import engine_shm
from app.client import Client
from app.processes import MARK


def marks() -> dict[str, list[int]]:
    """Process ids by the mark of the service that they belong to."""
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        for item in environ:
            if item.startswith(f"{MARK}=".encode()):
                found.setdefault(item.decode().partition("=")[2], []).append(int(entry.name))
    return found


@pytest.mark.timeout(300)
def test_serve_answers_and_ends_with_everything_it_started() -> None:
    before = set(marks())
    with serving(["pools.prefill.replicas=0", "model.max_model_len=1024"]) as (process, url, shown):
        assert "waiting for Decode 0/1 (engine start-up)" in shown
        assert f"curl {url}/v1/chat/completions" in shown
        assert "Ray dashboard: http://127.0.0.1:" in shown
        with Client(url) as client:
            assert client.healthy()
            assert client.chat("Name a colour.", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        [ours] = set(marks()) - before
        shared = engine_shm.mapped_by(marks()[ours])
        assert shared, "an engine core and its worker talk through shared memory"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(60) == 0, rest
        assert rest == "pageferry: SIGINT: ending what was started\n"
        assert time.monotonic() - began < 15
    until = time.monotonic() + 5
    while ours in marks() and time.monotonic() < until:
        time.sleep(0.1)
    assert ours not in marks()
    assert not shared & {path.name for path in Path("/dev/shm").iterdir()}
