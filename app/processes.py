"""Ending every process of a service by a mark in its environment: children of killed workers included."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from actors.engine import engine_shm
from actors.transfer.memory import socket_folder

MARK = "PAGEFERRY_SERVICE"
TRACKERS_S = 2.0


def marked(mark: str, variable: str = MARK) -> list[int]:
    """Process ids (never this one) that have `variable=mark` in their environment."""
    needle = f"{variable}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
        except OSError:
            continue  # gone, or not ours to read
    return pids


def end_marked(mark: str, grace_s: float = 3.0, variable: str = MARK) -> list[int]:
    """SIGTERM, then SIGKILL after `grace_s`. Returns what is still there after that.

    Python's resource trackers are left to end by themselves, which they do when the processes that they watch have
    ended: they take away what those have left in /dev/shm.
    """
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for pid in _without_trackers(marked(mark, variable)):
            _signal(pid, sign)
        until = time.monotonic() + wait_s
        while _without_trackers(marked(mark, variable)) and time.monotonic() < until:
            time.sleep(0.05)
    until = time.monotonic() + TRACKERS_S
    while marked(mark, variable) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in marked(mark, variable):
        _signal(pid, signal.SIGKILL)
    return marked(mark, variable)


def _signal(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def _without_trackers(pids: list[int]) -> list[int]:
    return [pid for pid in pids if b"multiprocessing.resource_tracker" not in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def sweep() -> None:
    """Removes what transfer actors and engines that were ended before they could do it themselves have left."""
    engine_shm.sweep()
    for path in socket_folder().glob("transfer-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # it has no listener: what is left of one that was killed
                path.unlink(missing_ok=True)
            except OSError:
                continue
