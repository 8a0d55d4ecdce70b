"""One process that writes output files, a few rows at a time, inside a hard limit of memory.

The parent sends a `Shard`, the worker answers with `Progress` values and one `Done` (or `Failed`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.int4 import FP8_BLOCK
from ops.compress import codec
from ops.compress.plan import Action, Options, Shard, Task, rows_within
from ops.compress.tensorfile import Bytes, OutTensor, TensorFileWriter, TensorRef, fsync_directory, read_bytes

# Rows are taken by this many, from row 0: a whole FP8 block, a whole int32 of zero points.
ROW_MULTIPLE = 128
CHUNK_WEIGHTS_MAX = 16 << 20  # more only costs memory
SLACK_BYTES = 48 << 20  # allocator, hashing and message buffers beside the rows in work
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Setup:
    """What a worker is started with. `share_bytes`: resident memory it may come to; `threads`: of its kernels."""

    source: Path
    folder: Path
    options: Options
    share_bytes: int
    widest_row: int
    threads: int


@dataclass(frozen=True)
class Ready:
    base_bytes: int
    chunk_weights: int


@dataclass(frozen=True)
class Progress:
    bytes_in: int


@dataclass(frozen=True)
class Done:
    record: dict[str, Any]
    peak_bytes: int


@dataclass(frozen=True)
class Failed:
    message: str


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A memory figure of /proc/PID/status: VmHWM (largest resident so far), VmRSS, VmData."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    raise ValueError(f"/proc/{pid}/status has no {key}")


class Source:
    """Reads of the source, with the next rows asked for while these are worked on."""

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self._source = source
        self._stack = stack
        self._fds: dict[str, int] = {}

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = fd = os.open(self._source / name, os.O_RDONLY)
            self._stack.callback(os.close, fd)
        return self._fds[name]

    def read(self, ref: TensorRef, row: int = 0, count: int | None = None) -> Bytes:
        """Rows `row` .. `row + count` as bytes; the whole tensor by default."""
        if count is None:
            return read_bytes(self._fd(ref.file), ref.start, ref.nbytes)
        fd, start, nbytes = self._fd(ref.file), ref.start + row * ref.row_bytes, count * ref.row_bytes
        data = read_bytes(fd, start, nbytes)
        os.posix_fadvise(fd, start + nbytes, nbytes, os.POSIX_FADV_WILLNEED)
        return data


class ShardWriter:
    """Turns one `Shard` into one file. `write` returns the journal's record."""

    def __init__(self, setup: Setup, chunk_weights: int, progress: Callable[[int], None]) -> None:
        self._setup = setup
        self._chunk_weights = chunk_weights
        self._progress = progress

    def write(self, shard: Shard) -> dict[str, Any]:
        path = self._setup.folder / shard.file
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        outputs = [output for task in shard.tasks for output in task.outputs]
        codes = np.zeros(codec.CODES, np.int64)
        rows = []
        with ExitStack() as stack, partial.open("w+b", buffering=0) as file:
            source = Source(self._setup.source, stack)
            writer = TensorFileWriter(file, outputs)
            for task in shard.tasks:
                relative: float | None = None
                largest: float | None = None
                if task.action is Action.PACK:
                    relative, largest, counts = self._named(task, source, writer)
                    codes += counts
                else:
                    self._keep(task, source, writer)
                rows.append([task.source.name, task.kind, task.action.value, task.bytes_in, task.bytes_out,
                             relative, largest])  # fmt: skip
            writer.finish()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.rename(partial, path)
        fsync_directory(self._setup.folder)
        return {"shard": shard.index, "file": shard.file, "bytes": writer.nbytes, "sha256": digest,
                "codes": codes.tolist(), "tensors": rows}  # fmt: skip

    def _chunks(self, task: Task) -> Iterator[tuple[int, int]]:
        total = task.source.shape[0] if task.source.shape else 1
        step = rows_within(task.source.shape, self._chunk_weights, ROW_MULTIPLE)
        for row in range(0, total, step):
            yield row, min(step, total - row)

    def _weights(self, task: Task, source: Source) -> Iterator[codec.Rows]:
        """The rows of a 2-D weight, a chunk at a time."""
        columns = task.source.shape[1]
        scale = None
        if task.scale:
            stored = codec.as_tensor(source.read(task.scale), task.scale.dtype, task.scale.shape)
            scale = stored.to(torch.float32)
            self._progress(task.scale.nbytes)
        for row, count in self._chunks(task):
            values = codec.as_tensor(source.read(task.source, row, count), task.source.dtype, (count, columns))
            if scale is None:
                yield codec.plain_rows(values)
            else:
                yield codec.Rows(values, scale[row // FP8_BLOCK : -(-(row + count) // FP8_BLOCK)])
            self._progress(count * task.source.row_bytes)

    def _pack(
        self, task: Task, source: Source, writer: TensorFileWriter
    ) -> tuple[float, float, np.ndarray[Any, np.dtype[np.int64]]]:
        options = self._setup.options
        module = task.module
        squared, energy, largest, codes = [], [], 0.0, np.zeros(codec.CODES, np.int64)
        for weight in self._weights(task, source):
            packed = codec.pack_rows(weight, options.group_size, options.symmetric, options.clip_grid)
            errors = codec.row_errors(weight, packed, options.group_size)
            squared.append(errors.squared)
            energy.append(errors.energy)
            largest = max(largest, errors.largest)
            codes += errors.codes
            writer.append(f"{module}.weight_packed", codec.as_bytes(packed.packed))
            writer.append(f"{module}.weight_scale", codec.as_bytes(packed.scale))
            if packed.zero_point is not None:
                writer.append(f"{module}.weight_zero_point", codec.as_bytes(packed.zero_point))
        writer.append(f"{module}.weight_shape", np.array(task.source.shape, "<i8").view(np.uint8))
        total = math.fsum(np.concatenate(energy))
        relative = math.sqrt(math.fsum(np.concatenate(squared)) / total) if total else 0.0
        return relative, largest, codes

    def _named(
        self, task: Task, source: Source, writer: TensorFileWriter
    ) -> tuple[float, float, np.ndarray[Any, np.dtype[np.int64]]]:
        try:
            return self._pack(task, source, writer)
        except ValueError as error:
            raise ValueError(f"{task.source.name} in {task.source.file}: {error}") from error

    def _keep(self, task: Task, source: Source, writer: TensorFileWriter) -> None:
        output: OutTensor = task.outputs[0]
        if task.action is Action.DEQUANT:
            for weight in self._weights(task, source):
                writer.append(output.name, codec.as_bytes(codec.dequantise(weight).bfloat16()))
            return
        for row, count in self._chunks(task):
            data = source.read(task.source, row, count)
            writer.append(output.name, data)
            self._progress(data.nbytes)


def _limit_memory(setup: Setup) -> Ready:
    """Warms every kernel, then forbids the process to grow past its share. ValueError when the share is too small."""
    options = setup.options
    warm = torch.ones(ROW_MULTIPLE, 128)
    for rows in (codec.plain_rows(warm), codec.Rows(warm.to(torch.float8_e4m3fn), torch.ones(1, 1))):
        packed = codec.pack_rows(rows, options.group_size, options.symmetric, options.clip_grid)
        codec.row_errors(rows, packed, options.group_size)
    base = status_bytes("VmRSS")
    free = setup.share_bytes - base - SLACK_BYTES
    least = codec.WORKING_BYTES_PER_WEIGHT * setup.widest_row * ROW_MULTIPLE
    if free < least:
        raise ValueError(
            f"--max-memory leaves {setup.share_bytes >> 20} MiB a worker, but it needs "
            f"{(base + SLACK_BYTES + least >> 20) + 1} MiB ({base >> 20} MiB of it libraries); "
            "raise --max-memory or lower --workers"
        )
    limit = status_bytes("VmData") + free + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return Ready(base, min(free // codec.WORKING_BYTES_PER_WEIGHT, CHUNK_WEIGHTS_MAX))


def main(setup: Setup, pipe: Connection) -> None:
    """The process's body: `Ready`, then a `Done` for every `Shard`, until the pipe ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent leaves no writer behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    torch.set_num_threads(setup.threads)
    try:
        ready = _limit_memory(setup)
        pipe.send(ready)
        writer = ShardWriter(setup, ready.chunk_weights, lambda nbytes: pipe.send(Progress(nbytes)))
        while True:
            shard = pipe.recv()
            pipe.send(Done(writer.write(shard), status_bytes("VmHWM")))
    except EOFError:
        return
    except Exception as error:  # whatever it is, the parent must hear of it
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
