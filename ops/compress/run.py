"""The parent process: hands out files to workers, keeps their records, watches memory, publishes the result.

It imports no torch, so that nearly all of the memory bound is left to the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ops.compress.calibrated import Calibration, calibrate
from ops.compress.output import config_json, index_json
from ops.compress.plan import Plan, Shard
from ops.compress.quality import UNJUDGED_FILES
from ops.compress.report import build_report, render_markdown
from ops.compress.source import INDEX_NAME, Checkpoint
from ops.compress.worker import Done, Failed, Progress, Ready, Setup, status_bytes
from ops.compress.worker import main as worker_main
from ops.compress.workfolder import WorkFolder, as_json

POLL_SECONDS = 0.1
PARENT_GROWTH_BYTES = 64 << 20  # records, progress bar, the report


@dataclass(frozen=True)
class Resources:
    """How much of the machine a run may take: changes its speed, never its bytes."""

    workers: int
    max_memory_bytes: int


@dataclass(frozen=True)
class RunFigures:
    """What a run took. `bytes_in` counts this run's share only; `peak_bytes` is the sum of every process's largest
    resident size, an upper bound that counts shared libraries once a process."""

    seconds: float
    bytes_in: int
    bytes_total: int
    peak_bytes: int
    max_memory_bytes: int
    workers: int
    resumed_files: int

    @property
    def mb_per_s(self) -> float:
        return self.bytes_in / 1e6 / self.seconds if self.seconds else 0.0


class MemoryExceeded(RuntimeError):
    """The processes together came to more than --max-memory; what is done stays done."""


class Workers:
    """The worker processes and what they are doing. Ends them all on leaving the context."""

    def __init__(self, setup: Setup, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._busy: dict[Connection, Shard | None] = {}
        self._processes: dict[Connection, BaseProcess] = {}
        for _ in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=worker_main, args=(setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        self.peaks: dict[Connection, int] = dict.fromkeys(self._processes, 0)
        for pipe, process in self._processes.items():
            answer = self._receive(pipe)
            if isinstance(answer, Failed):
                self.end()
                raise ValueError(answer.message.removeprefix("ValueError: "))
            assert isinstance(answer, Ready), (process.pid, answer)
            self._busy[pipe] = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.kill()
            process.join()

    @property
    def idle(self) -> list[Connection]:
        return [pipe for pipe, shard in self._busy.items() if shard is None]

    def give(self, pipe: Connection, shard: Shard) -> None:
        self._busy[pipe] = shard
        pipe.send(shard)

    def messages(self) -> list[Progress | Done]:
        """What arrived within one poll. RuntimeError when a worker failed or died."""
        found: list[Progress | Done] = []
        for pipe in wait(list(self._busy), POLL_SECONDS):
            assert isinstance(pipe, Connection)
            message = self._receive(pipe)
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            if isinstance(message, Done):
                self.peaks[pipe] = message.peak_bytes
                self._busy[pipe] = None
            found.append(message)
        return found

    def resident_bytes(self) -> int:
        total = 0
        for process in self._processes.values():
            try:
                total += status_bytes("VmRSS", process.pid or "self")
            except (OSError, ValueError):
                continue  # it has just died; its pipe says so
        return total

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            process = self._processes[pipe]
            process.join(5)
            raise RuntimeError(
                f"worker {process.pid} ended with code {process.exitcode} (-9: killed, often for want of memory); "
                "run the same command again to go on, with a lower --max-memory or fewer --workers"
            ) from None


def compress(
    checkpoint: Checkpoint,
    plan: Plan,
    destination: Path,
    resources: Resources,
    restart: bool = False,
    calibration: Calibration | None = None,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> RunFigures:
    """Writes `destination`, going on where an earlier run of the same plan ended. `on_progress` gets source bytes,
    those of the earlier run first. `calibration` goes with `options.method`. ValueError before any work when it cannot
    be done; RuntimeError when it fails later.
    """
    started = time.monotonic_ns()
    with WorkFolder(destination, plan.identity(), restart) as folder:
        done = {record["shard"] for record in folder.records}
        todo = deque(shard for shard in plan.shards if shard.index not in done)
        _check_space(folder, todo)
        skipped = plan.bytes_in - sum(shard.bytes_in for shard in todo)
        on_progress(skipped)
        raw = calibrate(checkpoint, plan, calibration, folder.path) if calibration else None
        peak = _work(checkpoint, plan, folder, todo, resources, on_progress, raw) if todo else 0
        records = sorted(folder.records, key=lambda record: int(record["shard"]))
        report = build_report(checkpoint, plan, records)
        folder.publish(
            [(checkpoint.path / name, str(name)) for name in checkpoint.other_files],
            {
                INDEX_NAME: index_json(plan),
                "report.json": as_json(report),
                "report.md": render_markdown(report).encode(),
                **UNJUDGED_FILES,
                "config.json": config_json(checkpoint, plan),
            },
        )
    return RunFigures(
        seconds=(time.monotonic_ns() - started) / 1e9,
        bytes_in=plan.bytes_in - skipped,
        bytes_total=plan.bytes_in,
        peak_bytes=peak,
        max_memory_bytes=resources.max_memory_bytes,
        workers=resources.workers,
        resumed_files=len(done),
    )


def _check_space(folder: WorkFolder, todo: deque[Shard]) -> None:
    needed = sum(task.bytes_out for shard in todo for task in shard.tasks)
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        raise ValueError(f"{folder.path} needs {needed >> 20} MiB more, its disk has {free >> 20} MiB free")


def _work(
    checkpoint: Checkpoint,
    plan: Plan,
    folder: WorkFolder,
    todo: deque[Shard],
    resources: Resources,
    on_progress: Callable[[int], None],
    calibrated: Path | None,
) -> int:
    """Runs every shard of `todo`; the largest resident size of all processes together."""
    count = min(resources.workers, len(todo))
    own = status_bytes("VmRSS") + PARENT_GROWTH_BYTES
    share = (resources.max_memory_bytes - own) // count
    setup = Setup(
        source=checkpoint.path,
        folder=folder.files,
        options=plan.options,
        share_bytes=share,
        widest_row=max(task.source.shape[-1] for task in plan.tasks if task.scale or len(task.outputs) > 1),
        calibrated=calibrated,
    )
    with Workers(setup, count) as workers:
        while todo or len(workers.idle) < count:
            for pipe in workers.idle:
                if todo:
                    workers.give(pipe, todo.popleft())
            for message in workers.messages():
                if isinstance(message, Progress):
                    on_progress(message.bytes_in)
                else:
                    folder.add(message.record)
            resident = status_bytes("VmRSS") + workers.resident_bytes()
            if resident > resources.max_memory_bytes:
                raise MemoryExceeded(
                    f"{resident >> 20} MiB resident, --max-memory is {resources.max_memory_bytes >> 20} MiB; "
                    "run the same command again with fewer --workers to go on"
                )
        return status_bytes("VmHWM") + sum(workers.peaks.values())


def default_workers() -> int:
    """One a core: a worker's kernels use one thread."""
    return len(os.sched_getaffinity(0))
