"""The folder a result is built in, and the one rename that makes it a checkpoint.

`.NAME.compressing` lies beside the destination and is locked by its one user. It holds `identity.json` (which source
and options it is for), `files/`, the future checkpoint, and `records/`, one small file for each finished file of it. A
file is written aside and renamed, then its record is: what has no record was being written when the last run ended.
The last step renames `files/` to the destination: a half-made folder never bears its name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ops.compress.tensorfile import fsync_directory

IDENTITY = "identity.json"


class WorkFolder:
    """Opens or makes the folder for `destination`, for the work that `identity` names. Use as a context."""

    def __init__(self, destination: Path, identity: dict[str, str], restart: bool = False) -> None:
        if destination.exists():
            raise ValueError(f"{destination} exists; name another destination or remove it")
        self.destination = destination
        self.path = destination.with_name(f".{destination.name}.compressing")
        self.files, self._records = self.path / "files", self.path / "records"
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._open(identity, restart)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, identity: dict[str, str], restart: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is in use by another run compressing to {self.destination}") from None
        if restart or not (self.path / IDENTITY).exists():
            _empty(self.path)
            write_durably(self.path / IDENTITY, as_json(identity))
        self.files.mkdir(exist_ok=True)
        self._records.mkdir(exist_ok=True)
        found = json.loads((self.path / IDENTITY).read_text())
        changed = [key for key in identity if found.get(key) != identity[key]]
        if changed:
            raise ValueError(
                f"{self.path} holds unfinished work with another {' and '.join(changed)}; "
                "run it again as it was, or throw that work away with --restart"
            )
        self.records: list[dict[str, Any]] = [json.loads(file.read_bytes()) for file in self._records.glob("*.json")]
        self._check_files()

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def add(self, record: dict[str, Any]) -> None:
        """What became of `record["file"]`, which is whole. Returns when it is on disk."""
        write_durably(self._records / f"{record['file']}.json", as_json(record))
        self.records.append(record)

    def _check_files(self) -> None:
        """Removes what no record vouches for (it was being written when the last run ended); ValueError when
        a file that one does vouch for is not as it was."""
        whole = {record["file"]: record["bytes"] for record in self.records}
        for entry in self.files.iterdir():
            if entry.name not in whole:
                _remove(entry)
        for name, nbytes in whole.items():
            file = self.files / name
            found = file.stat().st_size if file.exists() else -1
            if found != nbytes:
                raise ValueError(f"{file} should hold {nbytes} bytes, found {found}: start again with --restart")

    def publish(self, copies: Iterable[tuple[Path, str]], files: dict[str, bytes]) -> None:
        """Adds copies (source, relative name) and small files, the last of which should be config.json, then lets
        the folder take the destination's name."""
        for source, name in copies:
            target = self.files / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            with target.open("rb") as copied:
                os.fsync(copied.fileno())
            fsync_directory(target.parent)
        for name, data in files.items():
            write_durably(self.files / name, data)
        os.rename(self.files, self.destination)
        fsync_directory(self.destination.parent)
        _remove(self.path)


def write_durably(path: Path, data: bytes) -> None:
    """All of `data` under `path`, or nothing: written aside, synced, renamed."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    fsync_directory(path.parent)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        _remove(entry)
