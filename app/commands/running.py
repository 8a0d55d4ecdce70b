"""Which services `pageferry serve` runs on this machine for this user, for the commands that ask one.

Each has a note in the folder of this user's sockets, locked for as long as its process lives.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import IO

from actors.transfer.memory import socket_folder

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = f"of the service; default: the one that `pageferry serve` runs on this machine, else {DEFAULT_URL}"


class SeveralServices(ValueError):
    """One has to be named."""


class Note:
    """This process's service, found by others until `close` or the process's end."""

    def __init__(self, url: str) -> None:
        self._path = socket_folder() / f"service-{os.getpid()}.json"
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump({"url": url}, self._file)
        self._file.flush()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def urls() -> list[str]:
    """Of the services that run now. Takes away the notes of those that were killed."""
    found = []
    for path in sorted(socket_folder().glob("service-*.json")):
        try:
            with path.open() as file:
                if _is_locked(file):
                    found.append(str(json.load(file)["url"]))
                else:
                    path.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError):
            continue  # it has just been taken away, or is being written
    return found


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def find(url: str | None) -> str:
    """The service that is meant by `--url`. Raises `SeveralServices`."""
    if url is not None:
        return url
    found = urls()
    if len(found) > 1:
        raise SeveralServices(f"--url: {len(found)} services run on this machine: {', '.join(found)}")
    return found[0] if found else DEFAULT_URL
