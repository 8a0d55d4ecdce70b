"""Calibrated INT4: llm-compressor chooses the codes, the rest of the pipeline (files, report, verification, verdict) is
the same. For models that fit into memory whole; its work is not resumed half-way, but is kept once it is done."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.compress.calibrate_pass import EXIT_NOT_INSTALLED, INSTALL
from ops.compress.plan import Action, Plan
from ops.compress.source import Checkpoint, open_checkpoint
from ops.compress.workfolder import as_json, write_durably

METHODS = ("rtn", "gptq", "awq")
RAW = "calibrated"


@dataclass(frozen=True)
class Calibration:
    """`windows`: token ids to run through the model; `site`: folder that holds llm-compressor, None when installed."""

    windows: Sequence[Sequence[int]]
    site: Path | None


def check_calibrator(checkpoint: Checkpoint, calibration: Calibration) -> None:
    """ValueError, before any work, when llm-compressor is not there or cannot read such a source."""
    if any(ref.dtype == "F8_E4M3" for ref in checkpoint.tensors.values()):
        raise ValueError(f"{checkpoint.path} is FP8; calibrated methods need BF16 weights: use --method rtn")
    found = (
        (calibration.site / "llmcompressor").is_dir()
        if calibration.site
        else importlib.util.find_spec("llmcompressor") is not None
    )
    if not found:
        raise ValueError(INSTALL)


def calibrate(checkpoint: Checkpoint, plan: Plan, calibration: Calibration, work: Path) -> Path:
    """The folder with llm-compressor's result, made in `work` unless an earlier run left it there whole.

    RuntimeError with its last words when it fails, or when its tensors are not those of the plan.
    """
    raw = work / RAW
    if not raw.exists():
        partial = work / f"{RAW}.part"
        shutil.rmtree(partial, ignore_errors=True)
        _run(checkpoint, plan, calibration, work, partial)
        os.rename(partial, raw)
    _check(plan, raw)
    return raw


def _run(checkpoint: Checkpoint, plan: Plan, calibration: Calibration, work: Path, out: Path) -> None:
    options = plan.options
    spec = {
        "source": str(checkpoint.path),
        "out": str(out),
        "method": options.method,
        "symmetric": options.symmetric,
        "group_size": options.group_size,
        "ignore": list(plan.ignore),
        "windows": [list(window) for window in calibration.windows],
    }
    write_durably(work / "calibrate.json", as_json(spec))
    environment = dict(os.environ)
    if calibration.site:
        paths = [str(calibration.site), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "ops.compress.calibrate_pass", str(work / "calibrate.json")]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode == EXIT_NOT_INSTALLED:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"llm-compressor failed ({done.returncode}):\n{done.stderr[-3000:]}")


def _check(plan: Plan, raw: Path) -> None:
    """Exactly the planned modules must be packed, in the planned form."""
    made = open_checkpoint(raw).tensors
    wanted = {out.name: out for task in plan.tasks if task.action is Action.PACK for out in task.outputs}
    for name, output in wanted.items():
        ref = made.get(name)
        if ref is None or (ref.dtype, ref.shape) != (output.dtype, output.shape):
            found = f"{ref.dtype} {list(ref.shape)}" if ref else "nothing"
            raise RuntimeError(f"llm-compressor made {found} for {name}, planned {output.dtype} {list(output.shape)}")
    more = sorted(name for name in made if name.endswith(".weight_packed") and name not in wanted)
    if more:
        raise RuntimeError(f"llm-compressor packed {len(more)} tensors that should stay, {more[0]} among them")


def identity_of(windows: Sequence[Sequence[int]], text_sha256: str) -> str:
    """What of the calibration decides the bytes."""
    return json.dumps([text_sha256, len(windows), len(windows[0])])
