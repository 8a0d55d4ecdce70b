"""`make gpu-check` without a GPU: the plan's limits, a dry run of the stages that need no engine, and how stages end.

The other stages run dry in tests/engine/test_gpu_check_stages.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.gpu_check import __main__ as command
from ops.gpu_check import plan, run

ROOT = Path(__file__).parents[2]
WITHOUT_ENGINES = [stage.name for stage in plan.STAGES if "vllm" not in stage.needs]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_the_limits_fit_into_what_is_lent() -> None:
    assert sum(stage.limit_s for stage in plan.STAGES) <= plan.SLOT_S - 60
    assert sum(stage.limit_s for stage in plan.STAGES[:-1]) <= plan.CALL_S - 30
    names = [stage.name for stage in plan.STAGES]
    assert len(set(names)) == len(names)
    for i, stage in enumerate(plan.STAGES):
        assert set(stage.after) <= set(names[:i]), f"{stage.name} waits for a stage that comes later"


@pytest.mark.timeout(900)
def test_a_dry_run_of_every_stage_without_engines(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    arguments = ["--dry", "--out", str(tmp_path), "--stages", " ".join(WITHOUT_ENGINES)]
    done = subprocess.run(
        [sys.executable, "-m", "ops.gpu_check", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(tmp_path)
    assert found[0]["dry"] is True and found[0]["command"] == "make gpu-check DRY=1"
    verdicts = {line["stage"]: line["verdict"] for line in found if "verdict" in line}
    assert verdicts == dict.fromkeys(WITHOUT_ENGINES, "passed")
    rows = {name: [line for line in found if line.get("stage") == name and "verdict" not in line] for name in verdicts}
    assert [row["check"] for row in rows["kernels"]] == ["strides", "far_blocks", "tags"]
    written = [(row["writer"], row["bytes"], row["differ"]) for row in rows["writers"]]
    assert written[:4] == [("reshape_and_cache_flash", 131072, 0)] * 4 and len(written) == 7
    assert [row["kind"] for row in rows["writers"][4:]] == ["fp8", "fp8", "fp8_ds_mla"]
    assert {row.get("memory") for row in rows["copies"]} == {"pageable", "memfd", None}
    assert sum("seal gqa" in str(row.get("case")) for row in rows["rates"]) == 2
    assert sum("pack_int4" in str(row.get("case")) for row in rows["rates"]) == 4 + 1
    assert not any("not_here" in row for row in rows["rates"]), "vLLM takes longer to be imported than all else"


def test_a_wrong_writer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.gpu_check import writers

    monkeypatch.setattr(
        writers,
        "_e4m3",
        lambda x: (x * 1.0001).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8),
    )
    rows = list(writers.run(plan.Options(tmp_path, dry=True)))
    assert not any(row["ok"] for row in rows) and all(row["differ"] for row in rows)


def test_no_writers_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    from ops.gpu_check import writers

    with pytest.raises(FileNotFoundError, match="--writers"):
        writers.cuda_writers(tmp_path / "none.so")


HEAD = "import os, subprocess, time\n\n\ndef run(options):\n    "
STAGES = {
    "sleeps": 'yield {"first": 1, "child": subprocess.Popen(["sleep", "600"]).pid}; time.sleep(600)',
    "dies": 'yield {"first": 1}; os.kill(os.getpid(), 9)',
    "fails": 'yield {"first": 1}; raise RuntimeError("no such device")',
}


def test_how_a_stage_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before a stage went over its limit, died or failed is kept, and the next stage runs."""
    for name, body in STAGES.items():
        (tmp_path / f"stage_{name}.py").write_text(HEAD + body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stages = [
        plan.Stage("sleeps", 8, "stage_sleeps", needs=()),
        plan.Stage("dies", 30, "stage_dies", needs=()),
        plan.Stage("fails", 30, "stage_fails", needs=()),
        plan.Stage("figures", 30, "stage_fails", needs=(), after=("fails",)),
        plan.Stage("elsewhere", 30, "stage_fails", needs=("no_such_package",)),
    ]
    verdicts = run.run_all(stages, plan.Options(tmp_path), {"command": "test"})
    assert verdicts == {
        "sleeps": "over its limit", "dies": "died of signal 9", "fails": "failed", "figures": "skipped",
        "elsewhere": "skipped",
    }  # fmt: skip
    found = lines(tmp_path)
    assert [line["stage"] for line in found if line.get("first")] == ["sleeps", "dies", "fails"]
    assert {line.get("reason") for line in found} >= {"fails did not pass", "not installed: no_such_package"}
    assert "no such device" in (tmp_path / "fails.log").read_text()
    child = next(line["child"] for line in found if "child" in line)
    assert not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()


def test_a_machine_without_a_device_and_a_stage_without_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--stages", "kernels gpus", "--out", str(tmp_path)])
    assert "stages gpus are unknown; there are environment, kernels" in capsys.readouterr().err
    if not Path("/dev/nvidiactl").exists():
        assert command.main(["--out", str(tmp_path)]) == 2
        assert "DRY=1" in capsys.readouterr().err


def test_the_stages_without_engines_need_torch_and_triton_only() -> None:
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('numba', 'llvmlite', 'vllm', 'ray', 'msgspec', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib, kernels.triton_backend\n"
        f"for module in {[stage.module for stage in plan.STAGES if 'vllm' not in stage.needs]!r}:\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
