"""`pageferry compress --bench`: how fast and how small, on a synthetic checkpoint larger than the memory allowed.

Every rate is source bytes per second of wall time, process starts included. Beside it stand the limits of the machine
(reading the same files, copying the same bytes in memory), the packing kernel alone, and llm-compressor's data-free
path (`model_free_ptq`) on the same files. Runs alternate, so that a slow minute hits all of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cluster.json_output import print_json
from ops.compress.families import choose, family_of
from ops.compress.plan import Options, Plan, make_plan
from ops.compress.run import default_workers
from ops.compress.source import Checkpoint, open_checkpoint
from ops.compress.tensorfile import read_bytes

FORMS = ("bf16", "fp8")
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Sample:
    """One run of one way: seconds for `nbytes` of source; peak resident bytes, 0 where it is not measured."""

    form: str
    way: str
    nbytes: int
    seconds: float
    peak_bytes: int = 0

    @property
    def mb_per_s(self) -> float:
        return self.nbytes / 1e6 / self.seconds


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pageferry compress --bench", description=__doc__.splitlines()[0])
    top.add_argument("--form", choices=FORMS, action="append", help="of the source; default: both, one after the other")
    top.add_argument("--gib", type=float, default=3.0, help="size of the synthetic checkpoint (3)")
    top.add_argument("--max-memory", type=float, default=1.5, help="GiB allowed to our processes together (1.5)")
    top.add_argument("--rounds", type=int, default=3, help="runs of every way (3)")
    top.add_argument("--workers", type=int, default=0, help="the larger number of processes (one a core)")
    top.add_argument("--scratch", type=Path, default=None, help="where the checkpoints go; deleted afterwards")
    top.add_argument("--calibrator-site", type=Path, default=None, help="pip --target folder of llm-compressor")
    top.add_argument("--json", action="store_true", help="print one JSON object as well")
    return top


def _planned(path: Path) -> tuple[Checkpoint, Plan]:
    checkpoint = open_checkpoint(path)
    choice = choose(family_of(checkpoint.model_type), [], [], [])
    return checkpoint, make_plan(checkpoint, choice, Options())


def _timed(form: str, way: str, nbytes: int, work: Callable[[], int]) -> Sample:
    started = time.monotonic_ns()
    peak = work()
    return Sample(form, way, nbytes, (time.monotonic_ns() - started) / 1e9, peak)


def _ours(source: Path, scratch: Path, workers: int, max_memory_gib: float) -> int:
    """The command as a user runs it, the start of its interpreter included; its own measure of its peak."""
    destination = scratch / "int4"
    command = [sys.executable, "-m", "app.cli", "compress", str(source), str(destination), "--json",
               "--workers", str(workers), "--max-memory", str(max_memory_gib)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    shutil.rmtree(destination)
    return int(json.loads(done.stdout)["run"]["peak_bytes"])


def _drop(source: Path) -> None:
    """Takes the files out of the page cache, so that every way starts from the disk."""
    for file in source.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # a page that is not written yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read_all(source: Path) -> int:
    """Every byte once."""
    files = sorted(source.glob("*.safetensors"))
    buffer = np.empty(READ_BYTES, np.uint8)
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        size = file.stat().st_size
        for start in range(0, size, READ_BYTES):
            read_bytes(fd, start, min(READ_BYTES, size - start), buffer)
        os.close(fd)
    return 0


def _copy_all(nbytes: int) -> int:
    """As many bytes once through memory, by one core."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    for _ in range(nbytes // source.nbytes):
        np.copyto(target, source)
    return 0


def _kernel(form: str, nbytes: int) -> Sample:
    """The packing kernel alone on one core, rows already in memory."""
    import torch

    from ops.compress import codec

    torch.set_num_threads(1)
    values = torch.randn(2048, 4096) * 0.02
    rows = codec.plain_rows(values)
    if form == "fp8":
        rows = codec.Rows((values * 1000).to(torch.float8_e4m3fn), torch.full((16, 32), 1e-3))
    options = Options()
    codec.pack_rows(rows, options.group_size, True, options.clip_grid)
    repeats = max(1, nbytes // rows.values.nbytes // 8)
    started = time.monotonic_ns()
    for _ in range(repeats):
        codec.pack_rows(rows, options.group_size, True, options.clip_grid)
    seconds = (time.monotonic_ns() - started) / 1e9
    return Sample(form, "kernel alone, 1 core", repeats * rows.values.nbytes, seconds)


def _peer(form: str, source: Path, scratch: Path, site: Path | None, workers: int) -> Sample:
    """llm-compressor without data: plain rounding, no clipping search, whole files in memory. Its own clock, without
    its imports. RuntimeError when it fails."""
    checkpoint, plan = _planned(source)
    out = scratch / "peer"
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if site:
        environment["PYTHONPATH"] = os.pathsep.join([str(site), environment.get("PYTHONPATH", "")])
    ignore = json.dumps(list(plan.ignore))
    arguments = [str(source), str(out), ignore, form, str(workers)]
    command = [sys.executable, "-m", "ops.compress.bench_peer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(f"llm-compressor failed: {done.stderr[-2000:]}")
    seconds, peak = json.loads(done.stdout.strip().splitlines()[-1])
    return Sample(form, f"llm-compressor, {workers} workers", checkpoint.nbytes, seconds, peak)


def hardware_line() -> str:
    """CPU model, usable cores and memory of this machine."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory} GiB memory"


def _round(args: argparse.Namespace, form: str, source: Path, nbytes: int, scratch: Path) -> Iterator[Sample]:
    """Every way once."""
    counts = sorted({1, args.workers or default_workers()})
    _drop(source)
    yield _timed(form, "read the files", nbytes, lambda: _read_all(source))
    yield _timed(form, "copy in memory, 1 core", nbytes, lambda: _copy_all(nbytes))
    yield _kernel(form, nbytes)
    for count in counts:
        ours = functools.partial(_ours, source, scratch, count, args.max_memory)
        _drop(source)
        yield _timed(form, f"pageferry, {count} workers", nbytes, ours)
    for count in counts if args.calibrator_site else ():
        _drop(source)
        yield _peer(form, source, scratch, args.calibrator_site, count)


def run(args: argparse.Namespace, scratch: Path, say: Callable[[str], None]) -> list[Sample]:
    from ops.compress.synthetic import geometry_of_size, make_checkpoint

    samples: list[Sample] = []
    for form in args.form or FORMS:
        source = scratch / form
        nbytes = make_checkpoint(source, geometry_of_size(int(args.gib * 2**30), form == "fp8"), form == "fp8")
        say(f"{form}: {nbytes / 2**30:.2f} GiB, our processes may take {args.max_memory:g} GiB")
        for number in range(args.rounds):
            for sample in _round(args, form, source, nbytes, scratch):
                samples.append(sample)
                say(f"{form}: round {number + 1} of {args.rounds}: {sample.way}: {sample.mb_per_s:.0f} MB/s")
        shutil.rmtree(source)
    return samples


def table(samples: list[Sample]) -> str:
    """Median MB/s with the least and the most, share of the disk's rate, peak memory."""
    lines = ["| source | way | MB/s median | least .. most | of reading | peak MiB |", "|---|---|---|---|---|---|"]
    for form in dict.fromkeys(sample.form for sample in samples):
        mine = [sample for sample in samples if sample.form == form]
        disk = statistics.median(sample.mb_per_s for sample in mine if sample.way == "read the files")
        for way in dict.fromkeys(sample.way for sample in mine):
            rates = sorted(sample.mb_per_s for sample in mine if sample.way == way)
            peak = max(sample.peak_bytes for sample in mine if sample.way == way)
            median = statistics.median(rates)
            lines.append(
                f"| {form} | {way} | {median:.0f} | {rates[0]:.0f} .. {rates[-1]:.0f} | {median / disk:.2f} "
                f"| {peak >> 20 if peak else ''} |"
            )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="compress-bench-", dir=args.scratch) as folder:
            samples = run(args, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
    except (RuntimeError, OSError) as error:
        print(f"pageferry compress --bench: {error}", file=sys.stderr)
        return 1
    print(hardware_line())
    print(table(samples))
    if args.json:
        print_json({"hardware": hardware_line(), "samples": [asdict(sample) for sample in samples]})
    return 0
