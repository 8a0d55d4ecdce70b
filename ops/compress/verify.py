"""Re-reads a finished checkpoint and compares it with its source by other code than wrote it: files through
the public safetensors reader, INT4 through the compressed-tensors library's own decoder (the one that transformers
uses), errors computed anew and compared with the report's. AWQ rescales weights against activations, so there only
names, shapes and digests are compared; the evaluation is what judges it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ops.compress import codec
from ops.compress.plan import Action, Options, Plan, Shard, Task
from ops.compress.shard import Source, weight_chunks
from ops.compress.source import INDEX_NAME, Checkpoint

CHUNK_WEIGHTS = 2 << 20
TOLERANCE = 1e-5  # between two ways of summing one tensor's error, relative


@dataclass
class Verification:
    """`problems` is empty when every byte is what the plan and the report say."""

    tensors: int = 0
    packed: int = 0
    decoder: str = ""
    problems: list[str] = field(default_factory=list)


def verify(
    checkpoint: Checkpoint,
    plan: Plan,
    destination: Path,
    workers: int,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> Verification:
    """Compares every tensor of `destination` with `checkpoint`. `on_progress` gets source bytes."""
    report = json.loads((destination / "report.json").read_text())
    result = Verification(decoder=f"compressed-tensors {importlib.metadata.version('compressed-tensors')}")
    result.problems += _check_index(plan, destination)
    result.problems += _check_ignore(plan, destination)
    digests = {entry["file"]: entry["sha256"] for entry in report["files"]}
    errors = {entry["tensor"]: entry["relative_error"] for entry in report["tensors"]}

    def arguments(shard: Shard) -> tuple[Any, ...]:
        recorded = {task.source.name: errors.get(task.source.name) for task in shard.tasks}
        digest = digests.get(shard.file, "")
        return checkpoint.path, destination, shard, plan.options, digest, recorded

    on_progress(0)  # nothing is kept of an earlier verification
    if workers == 1:
        for shard in plan.shards:
            result.problems += check_shard(*arguments(shard))
            on_progress(shard.bytes_in)
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = {pool.submit(check_shard, *arguments(shard)): shard for shard in plan.shards}
            for job in as_completed(jobs):
                result.problems += job.result()
                on_progress(jobs[job].bytes_in)
    result.tensors = sum(1 for _ in plan.tasks)
    result.packed = sum(task.action is Action.PACK for task in plan.tasks)
    return result


def _check_index(plan: Plan, destination: Path) -> list[str]:
    index = json.loads((destination / INDEX_NAME).read_text())["weight_map"]
    wanted = {output.name: shard.file for shard in plan.shards for task in shard.tasks for output in task.outputs}
    return [] if index == wanted else [f"{INDEX_NAME} does not name the {len(wanted)} tensors of the plan"]


def _check_ignore(plan: Plan, destination: Path) -> list[str]:
    """An engine decides by `ignore` which modules are INT4: it must say what the files say."""
    config = json.loads((destination / "config.json").read_text())["quantization_config"]
    patterns = [re.compile(entry.removeprefix("re:")) for entry in config["ignore"]]
    wrong = []
    for task in plan.tasks:
        if len(task.source.shape) != 2 or not task.source.name.endswith(".weight"):
            continue
        ignored = any(pattern.match(task.module) for pattern in patterns)
        if ignored == (task.action is Action.PACK):
            wrong.append(f"config.json {'ignores' if ignored else 'does not ignore'} {task.module}")
    return wrong


def check_shard(
    source_path: Path,
    destination: Path,
    shard: Shard,
    options: Options,
    sha256: str,
    errors: dict[str, float | None],
) -> list[str]:
    """The problems of one output file, in words."""
    path = destination / shard.file
    if not path.exists():
        return [f"{shard.file} is missing"]
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return [f"{shard.file} has another sha256 than the report says"]
    problems = []
    with ExitStack() as stack, safe_open(str(path), framework="pt") as result:
        source = Source(source_path, stack)
        for task in shard.tasks:
            problem = _check_task(task, source, result, options, errors[task.source.name])
            if problem:
                problems.append(f"{task.source.name} in {shard.file}: {problem}")
    return problems


def _check_task(task: Task, source: Source, result: Any, options: Options, recorded: float | None) -> str:
    names = set(result.keys())
    missing = [output.name for output in task.outputs if output.name not in names]
    if missing:
        return f"{', '.join(missing)} missing"
    if task.action is Action.PACK:
        return _check_packed(task, source, result, options.group_size, recorded)
    if options.method == "awq":
        return ""
    whole = result.get_tensor(task.outputs[0].name)
    if task.action is Action.COPY:
        same = codec.as_bytes(whole).tobytes() == source.read(task.source).tobytes()
    else:
        chunks = weight_chunks(task, source, CHUNK_WEIGHTS)
        same = all(
            torch.equal(whole[chunk.row : chunk.row + chunk.num_rows], codec.dequantise(chunk.rows).bfloat16())
            for chunk in chunks
        )
    return "" if same else f"{task.action.value} differs from the source"


def _check_packed(task: Task, source: Source, result: Any, group_size: int, recorded: float | None) -> str:
    shape = tuple(result.get_tensor(f"{task.module}.weight_shape").tolist())
    if shape != task.source.shape:
        return f"weight_shape says {shape}, the source is {task.source.shape}"
    if recorded is None:
        return ""
    packed = result.get_slice(f"{task.module}.weight_packed")
    scale = result.get_slice(f"{task.module}.weight_scale")
    zero = result.get_slice(f"{task.module}.weight_zero_point") if len(task.outputs) == 4 else None
    squared, energy = [], []
    for chunk in weight_chunks(task, source, CHUNK_WEIGHTS):
        row, end = chunk.row, chunk.row + chunk.num_rows
        weight = codec.dequantise(chunk.rows).double()
        zero_rows = None if zero is None else zero[row // 8 : -(-end // 8)]
        decoded = library_decode(packed[row:end], scale[row:end], zero_rows, group_size)
        squared.append(float((weight - decoded).square().sum()))
        energy.append(float(weight.square().sum()))
    total = math.fsum(energy)
    relative = math.sqrt(math.fsum(squared) / total) if total else 0.0
    if abs(relative - recorded) > TOLERANCE * max(relative, recorded):
        return f"relative error is {relative:.6f}, the report says {recorded:.6f}"
    return ""


def library_decode(
    packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """float64 [rows, columns] as the compressed-tensors library reads the three tensors of a module."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows, columns = packed.shape[0], packed.shape[1] * 8
    codes: torch.Tensor = unpack_from_int32(packed, 4, torch.Size((rows, columns))).double()
    steps = scale.double().repeat_interleave(group_size, 1)
    if zero_point is None:
        return codes * steps
    zeros = unpack_from_int32(zero_point, 4, torch.Size((rows, scale.shape[1])), packed_dim=0)
    shifted: torch.Tensor = codes - zeros.double().repeat_interleave(group_size, 1)
    return shifted * steps
