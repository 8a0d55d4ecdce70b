"""`pageferry serve` in a process of its own, as a person starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from live_service import free_port

from app.processes import MARK


@contextmanager
def serving(settings: list[str], **environ: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its URL, and what it has said up to "Ctrl-C ends it". Ended at the end, if it has not by then."""
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "local-cpu", *settings, "--port", str(port)]
    command += ["--dashboard-port", str(free_port())]
    # Not those of the service that this session shares: it starts a Ray of its own.
    kept = {name: value for name, value in os.environ.items() if name != MARK and not name.startswith("RAY_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept | environ) as process:
        try:
            assert process.stdout is not None
            shown = ""
            while "Ctrl-C ends it" not in shown:
                line = process.stdout.readline()
                assert line, f"it ended with status {process.wait()}:\n{shown}"
                shown += line
            yield process, f"http://127.0.0.1:{port}", shown
        finally:
            try:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.communicate(timeout=60)
            finally:
                process.kill()
