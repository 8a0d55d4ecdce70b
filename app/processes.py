"""Ending every process of a service by a mark in its environment: children of killed workers included."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

MARK = "PAGEFERRY_SERVICE"


def marked(mark: str, variable: str = MARK) -> list[int]:
    """Process ids (never this one) that have `variable=mark` in their environment."""
    needle = f"{variable}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or not ours to read
    return found


def end_marked(mark: str, grace_s: float = 3.0, variable: str = MARK) -> list[int]:
    """SIGTERM, then SIGKILL after `grace_s`. Returns what is still there after that."""
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for pid in marked(mark, variable):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        until = time.monotonic() + wait_s
        while marked(mark, variable) and time.monotonic() < until:
            time.sleep(0.05)
    return marked(mark, variable)


def sweep(pids: list[int]) -> None:
    """Removes staging memory and sockets of transfer actors that were ended before they could do it themselves."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"pageferry-*-{pid}"):
            path.unlink(missing_ok=True)
    for path in Path(tempfile.gettempdir()).glob("pageferry-*/transfer-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # nobody listens: what is left of one that was killed
                path.unlink(missing_ok=True)
            except OSError:
                continue
