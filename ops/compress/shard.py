"""One output file, a few rows at a time: read, pack or keep, write, and say what became of it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kernels.int4 import FP8_BLOCK, PackedInt4
from ops.compress import codec
from ops.compress.plan import Action, Options, Shard, Task, rows_within
from ops.compress.source import Checkpoint
from ops.compress.tensorfile import Bytes, TensorFileWriter, TensorRef, fsync_directory, read_bytes

# Rows are taken by this many, from row 0: a whole FP8 block, a whole int32 of zero points.
ROW_MULTIPLE = 128

Counts = npt.NDArray[np.int64]


class Source:
    """Reads of one checkpoint's files, with the next rows asked for while these are worked on."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._fds: dict[str, int] = {}

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = fd = os.open(self._path / name, os.O_RDONLY)
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


class Chunk(NamedTuple):
    """Some rows of a weight, and the number of the first."""

    row: int
    rows: codec.Rows

    @property
    def num_rows(self) -> int:
        return int(self.rows.values.shape[0])


def chunks_of(task: Task, chunk_weights: int) -> Iterator[tuple[int, int]]:
    """(first row, count) over a tensor; a scalar is one row."""
    total = task.source.shape[0] if task.source.shape else 1
    step = rows_within(task.source.shape, chunk_weights, ROW_MULTIPLE)
    for row in range(0, total, step):
        yield row, min(step, total - row)


def weight_chunks(
    task: Task, source: Source, chunk_weights: int, progress: Callable[[int], None] = lambda nbytes: None
) -> Iterator[Chunk]:
    """A 2-D weight with its FP8 scales, if it has any. `progress` gets source bytes once they are worked on."""
    columns = task.source.shape[1]
    scale = None
    if task.scale:
        scale = codec.as_tensor(source.read(task.scale), task.scale.dtype, task.scale.shape).float()
        progress(task.scale.nbytes)
    for row, count in chunks_of(task, chunk_weights):
        values = codec.as_tensor(source.read(task.source, row, count), task.source.dtype, (count, columns))
        if scale is None:
            yield Chunk(row, codec.plain_rows(values))
        else:
            yield Chunk(row, codec.Rows(values, scale[row // FP8_BLOCK : -(-(row + count) // FP8_BLOCK)]))
        progress(count * task.source.row_bytes)


class Packer(Protocol):
    """Where a chunk's codes come from."""

    def pack(self, task: Task, chunk: Chunk) -> PackedInt4: ...

    def kept(self, task: Task) -> tuple[Source, TensorRef] | None:
        """Where the bytes of a tensor that stays are, if not in the source."""


class RoundToNearest:
    """Codes made here, without data."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def pack(self, task: Task, chunk: Chunk) -> PackedInt4:
        options = self._options
        return codec.pack_rows(chunk.rows, options.group_size, options.symmetric, options.clip_grid)

    def kept(self, task: Task) -> None:
        return None


class TakenOver:
    """Codes that a calibrated method chose, from the checkpoint it wrote. AWQ also rescales what it does not pack."""

    def __init__(self, options: Options, calibrated: Checkpoint, stack: ExitStack) -> None:
        self._rescales = options.method == "awq"
        self._tensors = calibrated.tensors
        self._source = Source(calibrated.path, stack)

    def pack(self, task: Task, chunk: Chunk) -> PackedInt4:
        packed = self._rows(f"{task.module}.weight_packed", chunk.row, chunk.num_rows)
        scale = self._rows(f"{task.module}.weight_scale", chunk.row, chunk.num_rows)
        zero_name = f"{task.module}.weight_zero_point"
        zero = self._rows(zero_name, chunk.row // 8, chunk.num_rows // 8) if zero_name in self._tensors else None
        return PackedInt4(packed, scale, zero)

    def _rows(self, name: str, row: int, count: int) -> Any:
        ref = self._tensors[name]
        return codec.as_tensor(self._source.read(ref, row, count), ref.dtype, (count, ref.shape[1]))

    def kept(self, task: Task) -> tuple[Source, TensorRef] | None:
        if not self._rescales:
            return None
        ref, planned = self._tensors[task.source.name], task.outputs[0]
        if (ref.dtype, ref.shape) != (planned.dtype, planned.shape):
            raise ValueError(f"calibration made {ref.dtype} {list(ref.shape)} of {planned.dtype} {list(planned.shape)}")
        return self._source, ref


class ShardWriter:
    """Turns one `Shard` into one file of `folder`. `write` returns its record."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        options: Options,
        calibrated: Checkpoint | None,
        chunk_weights: int,
        progress: Callable[[int], None],
    ) -> None:
        self._source_path = source
        self._folder = folder
        self._options = options
        self._calibrated = calibrated
        self._chunk_weights = chunk_weights
        self._progress = progress

    def write(self, shard: Shard) -> dict[str, Any]:
        """Raises ValueError that names the tensor when one cannot be packed."""
        path = self._folder / shard.file
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        codes = np.zeros(codec.CODES, np.int64)
        rows = []
        with ExitStack() as stack, partial.open("w+b", buffering=0) as file:
            source = Source(self._source_path, stack)
            given = TakenOver(self._options, self._calibrated, stack) if self._calibrated else None
            packer: Packer = given or RoundToNearest(self._options)
            writer = TensorFileWriter(file, [output for task in shard.tasks for output in task.outputs])
            for task in shard.tasks:
                try:
                    relative, largest, counts = self._fulfil(task, source, packer, writer)
                except ValueError as error:
                    raise ValueError(f"{task.source.name} in {task.source.file}: {error}") from error
                codes += counts
                rows.append([task.source.name, task.kind, task.action.value, task.bytes_in, task.bytes_out,
                             relative, largest])  # fmt: skip
            writer.finish()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.rename(partial, path)
        fsync_directory(self._folder)
        return {"shard": shard.index, "file": shard.file, "bytes": writer.nbytes, "sha256": digest,
                "codes": codes.tolist(), "tensors": rows}  # fmt: skip

    def _fulfil(
        self, task: Task, source: Source, packer: Packer, writer: TensorFileWriter
    ) -> tuple[float | None, float | None, Counts]:
        if task.action is Action.PACK:
            return self._pack(task, source, packer, writer)
        if task.action is Action.DEQUANT:
            for chunk in weight_chunks(task, source, self._chunk_weights, self._progress):
                writer.append(task.outputs[0].name, codec.as_bytes(codec.dequantise(chunk.rows).bfloat16()))
        else:
            origin, ref = packer.kept(task) or (source, task.source)
            for row, count in chunks_of(task, self._chunk_weights):
                data = origin.read(ref, row, count)
                writer.append(task.outputs[0].name, data)
                self._progress(data.nbytes)
        return None, None, np.zeros(codec.CODES, np.int64)

    def _pack(
        self, task: Task, source: Source, packer: Packer, writer: TensorFileWriter
    ) -> tuple[float | None, float | None, Counts]:
        module = task.module
        squared, energy, largest, codes = [], [], 0.0, np.zeros(codec.CODES, np.int64)
        for chunk in weight_chunks(task, source, self._chunk_weights, self._progress):
            packed = packer.pack(task, chunk)
            errors = codec.row_errors(chunk.rows, packed, self._options.group_size)
            squared.append(errors.squared)
            energy.append(errors.energy)
            largest = max(largest, errors.largest)
            codes += errors.codes
            writer.append(f"{module}.weight_packed", codec.as_bytes(packed.packed))
            writer.append(f"{module}.weight_scale", codec.as_bytes(packed.scale))
            if packed.zero_point is not None:
                writer.append(f"{module}.weight_zero_point", codec.as_bytes(packed.zero_point))
        writer.append(f"{module}.weight_shape", np.array(task.source.shape, "<i8").view(np.uint8))
        if self._options.method == "awq":
            return None, None, codes  # its weights are scaled against the activations: no error to speak of
        total = math.fsum(np.concatenate(energy))
        relative = math.sqrt(math.fsum(np.concatenate(squared)) / total) if total else 0.0
        return relative, largest, codes
