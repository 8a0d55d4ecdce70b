"""The work folder's memory: which output files are whole, one checksummed line each, durable before it counts.

A line is `crc32 JSON`. A kill can leave at most one cut line, at the end: it is dropped. Damage anywhere else is
an error, since a lost line in the middle means that the disk, not a kill, has eaten data.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any


def _encode(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x " % zlib.crc32(body) + body + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    crc, _, body = line.partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(body):
            return None
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """Appends records; `records` are those found on opening. One writer: the caller holds the folder's lock."""

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        good = 0
        data = path.read_bytes() if path.exists() else b""
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines):
            record = _decode(line[:-1]) if line.endswith(b"\n") else None
            if record is None:
                if number != len(lines) - 1:
                    raise ValueError(
                        f"{path}: line {number + 1} of {len(lines)} is damaged, which no kill explains; "
                        f"check the disk, then start again with --restart"
                    )
                break
            self.records.append(record)
            good += len(line)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)
        os.fsync(self._fd)

    def append(self, record: dict[str, Any]) -> None:
        """Returns when the record is on disk."""
        data = _encode(record)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)
        self.records.append(record)

    def close(self) -> None:
        os.close(self._fd)
