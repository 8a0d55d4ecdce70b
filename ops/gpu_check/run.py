"""Runs stages, each in a process group of its own that is ended at its limit; every result is on disk when it is made.

`results.jsonl`: one line about the run, one a result, one a stage. `STAGE.log`: what the stage and its processes wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.gpu_check.plan import Options, Row, Stage

PRELOADED = ["torch", "triton"]
"""Imported once for all stages, before any of them touches the device: a fork would inherit a CUDA context."""
ENDED_S = 5.0


class Results:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: Row) -> None:
        """On disk when this returns: the machine may be gone in the next second."""
        with self.path.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _stage_process(stage: Stage, options: Options, path: Path) -> None:
    """In the stage's own process: exit status 0 when every result was ok."""
    os.setsid()  # what it starts ends with it
    log = os.open(options.folder / f"{stage.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(0 if run_stage(stage, options, Results(path)) else 1)


def run_stage(stage: Stage, options: Options, results: Results) -> bool:
    """Whether every result is ok. An error of the stage is a result."""
    good, number = True, 0
    try:
        for row in importlib.import_module(stage.module).run(options):
            results.add({"stage": stage.name, **row})
            good, number = good and row.get("ok", True), number + 1
    except Exception as error:
        traceback.print_exc()
        results.add({"stage": stage.name, "ok": False, "error": f"{type(error).__name__}: {error}"[:2000]})
        return False
    return good and number > 0


def reason_to_skip(stage: Stage, verdicts: dict[str, str]) -> str:
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    failed = [name for name in stage.after if verdicts.get(name, "passed") != "passed"]
    return f"{', '.join(failed)} did not pass" if failed else ""


def run_all(stages: Sequence[Stage], options: Options, about: Row) -> dict[str, str]:
    """The verdict of each stage: passed, failed, over its limit, died, or skipped."""
    options.folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder / "results.jsonl")
    results.path.write_text("")
    results.add(about)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    verdicts: dict[str, str] = {}
    for stage in stages:
        began = time.monotonic()
        reason = reason_to_skip(stage, verdicts)
        verdicts[stage.name] = "skipped" if reason else _supervise(context, stage, options, results.path)
        row: Row = {
            "stage": stage.name,
            "verdict": verdicts[stage.name],
            "seconds": round(time.monotonic() - began, 2),
            "limit_s": stage.seconds(options.dry),
        }
        results.add(row | ({"reason": reason} if reason else {}))
        print(
            f"{stage.name:14s}{verdicts[stage.name]:16s}{row['seconds']:7.1f} of {row['limit_s']} s  {reason}",
            flush=True,
        )
    return verdicts


def _supervise(context: Any, stage: Stage, options: Options, path: Path) -> str:
    process = context.Process(target=_stage_process, args=(stage, options, path))
    process.start()
    process.join(stage.seconds(options.dry))
    status = process.exitcode
    _end_group(process.pid)
    process.join(ENDED_S)
    if status is None:
        return "over its limit"
    if status < 0:
        return f"died of signal {-status}"
    return "passed" if status == 0 else "failed"


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def about(options: Options) -> Row:
    """Which commit ran with which command."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    command = "make gpu-check" + (" DRY=1" if options.dry else "")
    return {
        "command": command,
        "commit": found.stdout.strip() or os.environ.get("COMMIT", "unknown"),
        "dry": options.dry,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
