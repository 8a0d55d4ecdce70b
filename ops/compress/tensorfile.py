"""Safetensors files by offset: read any rows of any tensor, write a file whose header is known beforehand.

The public library maps whole files; here a tensor may be larger than the memory we may use and the page cache
belongs to the other work on the machine, so reads are positioned, bounded and dropped from the cache.
Format: u64 little-endian header length, JSON header, then the tensors' bytes back to back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]  # always one-dimensional

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
HEADER_BYTES_MAX = 100 << 20  # the public reader's own limit


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor lies: `start` is the absolute byte offset in `file`; row-major, no padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; the whole tensor for a scalar."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> tuple[list[TensorRef], bytes]:
    """Every tensor of one file in the order of their bytes, and the raw header (for a fingerprint).

    Raises ValueError when the header is not JSON, is too large, leaves a gap or does not end with the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        raw_length = file.read(8)
        length = int.from_bytes(raw_length, "little")
        if len(raw_length) < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise ValueError(f"{path}: header length {length} does not fit a file of {size} bytes; not a whole file")
        raw = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{path}: header is not JSON ({error}); the file is damaged") from error
    entries.pop("__metadata__", None)
    refs = []
    for name, entry in entries.items():
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{path}: tensor {name} has dtype {entry['dtype']}; known: {', '.join(ITEM_BYTES)}")
        begin, end = entry["data_offsets"]
        ref = TensorRef(name, entry["dtype"], tuple(entry["shape"]), path.name, 8 + length + begin)
        if end - begin != ref.nbytes:
            raise ValueError(f"{path}: tensor {name} of shape {ref.shape} takes {ref.nbytes} bytes, not {end - begin}")
        refs.append(ref)
    refs.sort(key=lambda ref: (ref.start, ref.nbytes))
    cursor = 8 + length
    for ref in refs:
        if ref.start != cursor:
            raise ValueError(f"{path}: tensor {ref.name} begins at {ref.start}, expected {cursor}; the file is damaged")
        cursor += ref.nbytes
    if cursor != size:
        raise ValueError(f"{path}: tensors end at {cursor}, the file at {size}; it was cut or is still being written")
    return refs, raw


def read_bytes(fd: int, start: int, nbytes: int, out: Bytes | None = None) -> Bytes:
    """`nbytes` bytes from absolute offset `start`, then dropped from the page cache. Raises EOFError when cut."""
    buffer = np.empty(nbytes, np.uint8) if out is None else out[:nbytes]
    view = memoryview(buffer.data)
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            raise EOFError(f"file ends at {start + done}, {nbytes - done} bytes short: it changed while being read")
        done += got
    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
    return buffer


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def layout(tensors: Iterable[OutTensor]) -> tuple[bytes, dict[str, int]]:
    """The prefix (length and header) of a file with these tensors, and each tensor's absolute offset.

    Wide items come first, so that every tensor is aligned to its own item size.
    """
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for tensor in ordered:
        end = cursor + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [cursor, end]}
        cursor = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    base = 8 + len(raw)
    offsets = {name: base + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    return len(raw).to_bytes(8, "little") + raw, offsets


class TensorFileWriter:
    """Writes one file at known offsets. Each tensor is filled front to back; tensors may be interleaved."""

    def __init__(self, file: BinaryIO, tensors: Sequence[OutTensor]) -> None:
        prefix, offsets = layout(tensors)
        self._fd = file.fileno()
        self._next = offsets
        self._end = {tensor.name: offsets[tensor.name] + tensor.nbytes for tensor in tensors}
        self.nbytes = len(prefix) + sum(tensor.nbytes for tensor in tensors)
        os.ftruncate(self._fd, self.nbytes)
        _write_all(self._fd, prefix, 0)

    def append(self, name: str, data: Bytes | bytes) -> None:
        """The next bytes of tensor `name`."""
        view = memoryview(data if isinstance(data, bytes) else data.data)
        end = self._next[name] + view.nbytes
        assert end <= self._end[name], f"{name} overruns its place by {end - self._end[name]} bytes"
        _write_all(self._fd, view, self._next[name])
        self._next[name] = end

    def finish(self) -> None:
        """Raises when a tensor was not filled; then makes the bytes durable."""
        short = [name for name, end in self._end.items() if self._next[name] != end]
        assert not short, f"tensors not filled: {short[:3]}"
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def fsync_directory(path: Path) -> None:
    """Makes names (creations and renames) in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
