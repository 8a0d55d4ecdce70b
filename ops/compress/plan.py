"""What will be written, decided from headers alone: every output tensor, its file, its place, before a byte is read.

The plan depends on the source and the options, never on the number of processes or the memory: that is why a
resumed run and a parallel run write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

from ops.compress import FORMAT_VERSION
from ops.compress.families import Choice, check_fused, ignore_patterns, kind_of
from ops.compress.source import SCALE_SUFFIX, Checkpoint
from ops.compress.tensorfile import OutTensor, TensorRef

FLOATS = ("BF16", "F16", "F32")
GROUP_SIZES = (32, 64, 128)  # what kernels of engines take
SHARD_BYTES = (128 << 20, 2 << 30)
PACK_FACTOR = 8  # INT4 values in one int32


class Action(StrEnum):
    PACK = "pack"  # to INT4
    DEQUANT = "dequant"  # FP8 blocks to BF16: kept, but the result has no FP8
    COPY = "copy"  # byte for byte


@dataclass(frozen=True)
class Options:
    """What decides the bytes of the result."""

    group_size: int = 128
    symmetric: bool = True
    clip_grid: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8)
    shard_bytes: int = 0  # of an output file; 0: a sixteenth of the result, within SHARD_BYTES
    tensor_parallel: int = 1
    method: str = "rtn"  # or one of `calibrated.METHODS`
    calibration: str = ""  # names the calibration text and its windows


@dataclass(frozen=True, slots=True)
class Task:
    """One source tensor and what becomes of it."""

    module: str
    kind: str
    action: Action
    source: TensorRef
    scale: TensorRef | None
    outputs: tuple[OutTensor, ...]

    @property
    def bytes_in(self) -> int:
        return self.source.nbytes + (self.scale.nbytes if self.scale else 0)

    @property
    def bytes_out(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: the unit of work and of resuming."""

    index: int
    file: str
    tasks: tuple[Task, ...]

    @property
    def bytes_in(self) -> int:
        return sum(task.bytes_in for task in self.tasks)


@dataclass(frozen=True)
class Plan:
    options: Options
    source_fingerprint: str
    shards: tuple[Shard, ...]
    ignore: tuple[str, ...]

    @property
    def tasks(self) -> Iterator[Task]:
        for shard in self.shards:
            yield from shard.tasks

    @property
    def bytes_in(self) -> int:
        return sum(shard.bytes_in for shard in self.shards)

    @property
    def bytes_out(self) -> int:
        return sum(task.bytes_out for task in self.tasks)

    def identity(self) -> dict[str, str]:
        """Named digests: two runs may share a work folder only if all of them agree."""
        outputs = hashlib.sha256()
        for shard in self.shards:
            outputs.update(shard.file.encode())
            for task in shard.tasks:
                outputs.update(repr((task.action.value, task.source, task.scale, task.outputs)).encode())
        return {
            "program": f"format {FORMAT_VERSION}",
            "source": self.source_fingerprint,
            "options": json.dumps(asdict(self.options), sort_keys=True),
            "outputs": outputs.hexdigest(),
        }


def _dividing_group_sizes(columns: int) -> list[int]:
    return [size for size in GROUP_SIZES if columns % size == 0]


def _check_shape(task_name: str, shape: tuple[int, ...], module: str, options: Options) -> None:
    rows, columns = shape
    group = options.group_size
    if columns % group:
        fitting = _dividing_group_sizes(columns)
        way_out = (
            f"--group-size {' or '.join(map(str, fitting))} divides it" if fitting else "no usual group size divides it"
        )
        raise ValueError(
            f"{task_name} has {columns} input columns, which --group-size {group} does not divide; {way_out}; "
            f"or keep it with --keep-match '{module.rpartition('.')[2]}$'"
        )
    if not options.symmetric and rows % PACK_FACTOR:
        raise ValueError(
            f"{task_name} has {rows} rows; asymmetric zero points are packed by {PACK_FACTOR} rows: use symmetric"
        )
    row_parallel = module.endswith(("o_proj", "down_proj", "w2"))
    split = options.tensor_parallel
    if row_parallel and (columns % split or (columns // split) % group):
        fitting = [size for size in GROUP_SIZES if columns % split == 0 and (columns // split) % size == 0]
        raise ValueError(
            f"{task_name} has {columns} input columns; over --tp {split} that is {columns / split:g} a GPU, which "
            f"--group-size {group} does not divide; group sizes that do: {fitting or 'none, lower --tp'}"
        )


def _packed_outputs(module: str, shape: tuple[int, ...], options: Options) -> tuple[OutTensor, ...]:
    rows, columns = shape
    groups = columns // options.group_size
    outputs = [
        OutTensor(f"{module}.weight_packed", "I32", (rows, columns // PACK_FACTOR)),
        OutTensor(f"{module}.weight_scale", "BF16", (rows, groups)),
        OutTensor(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not options.symmetric:
        outputs.append(OutTensor(f"{module}.weight_zero_point", "I32", (rows // PACK_FACTOR, groups)))
    return tuple(outputs)


def _task(checkpoint: Checkpoint, ref: TensorRef, choice: Choice, options: Options) -> Task:
    module = ref.name.removesuffix(".weight")
    is_weight = module != ref.name
    kind = kind_of(module if is_weight else ref.name.rpartition(".")[0])
    scale = checkpoint.scale_of(ref)
    if len(ref.shape) == 3 and ".experts." in ref.name and not any(p.search(ref.name) for p in choice.keep_match):
        raise ValueError(
            f"{ref.name} holds all experts in one tensor {list(ref.shape)}; only one tensor an expert is understood: "
            f"save the checkpoint with one tensor an expert, or keep it with --keep-match '{module}'"
        )
    if is_weight and len(ref.shape) == 2 and choice.packs(module):
        if scale is None and ref.dtype not in FLOATS:
            raise ValueError(f"{ref.name} is {ref.dtype}; only BF16, F16, F32 and block-scaled FP8 can be packed")
        _check_shape(ref.name, ref.shape, module, options)
        return Task(module, kind, Action.PACK, ref, scale, _packed_outputs(module, ref.shape, options))
    if scale is not None:
        return Task(module, kind, Action.DEQUANT, ref, scale, (OutTensor(ref.name, "BF16", ref.shape),))
    return Task(module, kind, Action.COPY, ref, None, (OutTensor(ref.name, ref.dtype, ref.shape),))


def make_plan(checkpoint: Checkpoint, choice: Choice, options: Options) -> Plan:
    """ValueError names the tensor or option that cannot be, and what would."""
    _check_options(options)
    method = (checkpoint.quantization_config or {}).get("quant_method")
    if method not in (None, "fp8"):
        raise ValueError(f"{checkpoint.path} is already quantised ({method}); compress its BF16 or FP8 original")
    tasks: list[Task] = []
    for ref in checkpoint.tensors.values():
        weight = ref.name.removesuffix(SCALE_SUFFIX)
        if weight != ref.name:
            if weight not in checkpoint.tensors:
                raise ValueError(f"{ref.name} scales {weight}, which is not in {checkpoint.path}")
            continue
        tasks.append(_task(checkpoint, ref, choice, options))
    packed = {
        task.module: task.action is Action.PACK
        for task in tasks
        if len(task.source.shape) == 2 and task.source.name.endswith(".weight")
    }
    check_fused(packed)
    if not any(packed.values()):
        raise ValueError(
            f"nothing in {checkpoint.path} would be packed: no module of the kinds {sorted(choice.packed)}"
        )
    fitting = min(max(sum(task.bytes_out for task in tasks) // 16, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards = tuple(_cut(tasks, options.shard_bytes or fitting))
    return Plan(options, checkpoint.fingerprint, shards, tuple(ignore_patterns(packed)))


def _check_options(options: Options) -> None:
    if options.group_size not in GROUP_SIZES:
        raise ValueError(f"--group-size {options.group_size}: one of {', '.join(map(str, GROUP_SIZES))}")
    if not options.clip_grid or any(not 0.5 <= ratio <= 1.0 for ratio in options.clip_grid):
        raise ValueError(f"clip ratios {options.clip_grid}: at least one, each from 0.5 to 1")
    if options.shard_bytes < 0 or options.tensor_parallel <= 0:
        raise ValueError(f"shard size {options.shard_bytes} bytes and --tp {options.tensor_parallel} must be positive")


def _cut(tasks: list[Task], shard_bytes: int) -> Iterator[Shard]:
    """Runs of tasks in source order, each at most `shard_bytes` of output unless one tensor alone is more."""
    runs: list[list[Task]] = [[]]
    filled = 0
    for task in tasks:
        if runs[-1] and filled + task.bytes_out > shard_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(task)
        filled += task.bytes_out
    total = len(runs)
    for index, run in enumerate(runs):
        name = "model.safetensors" if total == 1 else f"model-{index + 1:05d}-of-{total:05d}.safetensors"
        yield Shard(index, name, tuple(run))


def rows_within(shape: tuple[int, ...], weights: int, multiple: int) -> int:
    """How many rows of a tensor to take at once to stay within `weights` values, a multiple of `multiple`."""
    columns = max(1, math.prod(shape[1:]))
    return max(multiple, weights // columns // multiple * multiple)
