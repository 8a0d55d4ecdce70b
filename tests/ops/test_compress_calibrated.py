"""Calibrated methods: codes that llm-compressor chose are taken over as they are; the rest of the pipeline is the same.

llm-compressor itself runs only where it is installed (environment variable CALIBRATOR_SITE names its folder). Elsewhere
its result is stood for by a checkpoint of the same form, left in the work folder as a finished calibration is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_checkpoint import Geometry, make_checkpoint

from ops.compress.calibrated import RAW, Calibration, calibrate, check_calibrator
from ops.compress.cli import main
from ops.compress.families import choose, family_of
from ops.compress.plan import Options, Plan, make_plan
from ops.compress.run import Resources, compress
from ops.compress.source import Checkpoint, open_checkpoint
from ops.compress.verify import verify
from ops.compress.workfolder import WorkFolder

pytestmark = pytest.mark.compiles  # in the workers

OPTIONS = Options(group_size=64, symmetric=False)
RESOURCES = Resources(workers=1, max_memory_bytes=4 << 30)  # what the test process holds itself counts
NOTHING = Calibration((), None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "source"
    make_checkpoint(path, Geometry(layers=2, experts=2, vocab=256, mtp_layers=0), fp8=False)
    return path


@pytest.fixture(scope="module")
def other_codes(source: Path) -> Path:
    """Codes that our own rounding would not choose: plain rounding, no clipping search."""
    made = source.parent / "other"
    compress(*planned(source, replace(OPTIONS, clip_grid=(0.7,))), made, RESOURCES)
    return made


def planned(source: Path, options: Options) -> tuple[Checkpoint, Plan]:
    checkpoint = open_checkpoint(source)
    return checkpoint, make_plan(checkpoint, choose(family_of("deepseek_v3"), [], [], []), options)


def place(codes: Path, destination: Path, plan: Plan, change: dict[str, torch.Tensor] | None = None) -> None:
    """Leaves `codes` in the work folder of `destination`, as a calibration that was finished before a kill."""
    with WorkFolder(destination, plan.identity()) as folder:
        raw = folder.path / RAW
        raw.mkdir()
        tensors: dict[str, torch.Tensor] = {}
        for file in codes.glob("*.safetensors"):
            tensors.update(load_file(file))
        save_file({**tensors, **(change or {})}, raw / "model.safetensors")
        (raw / "config.json").write_text((codes / "config.json").read_text())


def test_codes_are_taken_over_and_errors_are_theirs(source: Path, other_codes: Path, tmp_path: Path) -> None:
    checkpoint, plan = planned(source, replace(OPTIONS, method="gptq", calibration="text"))
    place(other_codes, tmp_path / "int4", plan)
    compress(checkpoint, plan, tmp_path / "int4", RESOURCES, calibration=NOTHING)
    made = load_file(tmp_path / "int4" / "model.safetensors")
    given = load_file(other_codes / "model.safetensors")
    assert made.keys() == given.keys()
    assert all(torch.equal(made[name], given[name]) for name in made)
    report = json.loads((tmp_path / "int4" / "report.json").read_text())
    theirs = json.loads((other_codes / "report.json").read_text())
    assert report["options"]["method"] == "gptq"
    assert report["tensors"] == theirs["tensors"]
    assert verify(checkpoint, plan, tmp_path / "int4", workers=1).problems == []


def test_awq_takes_rescaled_norms_too_and_claims_no_error(source: Path, other_codes: Path, tmp_path: Path) -> None:
    norm = "model.layers.0.input_layernorm.weight"
    checkpoint, plan = planned(source, replace(OPTIONS, method="awq", calibration="text"))
    place(other_codes, tmp_path / "int4", plan, {norm: torch.full((512,), 0.5, dtype=torch.bfloat16)})
    compress(checkpoint, plan, tmp_path / "int4", RESOURCES, calibration=NOTHING)
    made = load_file(tmp_path / "int4" / "model.safetensors")
    assert made[norm].unique().tolist() == [0.5]
    report = json.loads((tmp_path / "int4" / "report.json").read_text())
    assert report["tensors"] == []
    assert "rescaled by calibration" in (tmp_path / "int4" / "report.md").read_text()
    assert verify(checkpoint, plan, tmp_path / "int4", workers=1).problems == []


def test_another_form_than_planned_is_refused(source: Path, other_codes: Path, tmp_path: Path) -> None:
    checkpoint, plan = planned(source, replace(OPTIONS, method="gptq", group_size=32))
    place(other_codes, tmp_path / "int4", plan)
    with pytest.raises(RuntimeError, match=r"llm-compressor made BF16 \[1536, 4\] for .*weight_scale, planned BF16"):
        compress(checkpoint, plan, tmp_path / "int4", RESOURCES, calibration=NOTHING)
    assert not (tmp_path / "int4").exists()


def test_what_cannot_be_calibrated_is_said_before_any_work(source: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "fp8", Geometry(layers=1, experts=1, vocab=256), fp8=True)
    with pytest.raises(ValueError, match="is FP8; calibrated methods need BF16"):
        check_calibrator(open_checkpoint(tmp_path / "fp8"), NOTHING)
    with pytest.raises(ValueError, match=r"pip install --no-deps --target SITE -r .*calibrator.txt"):
        check_calibrator(open_checkpoint(source), Calibration((), tmp_path))


def test_a_process_without_it_says_how_to_install(source: Path, tmp_path: Path) -> None:
    """Even when the folder looked right: the import decides."""
    (tmp_path / "site" / "llmcompressor").mkdir(parents=True)
    (tmp_path / "site" / "llmcompressor" / "__init__.py").write_text("raise ImportError('broken install')")
    checkpoint, plan = planned(source, replace(OPTIONS, method="gptq"))
    with pytest.raises(ValueError, match=r"calibrated methods need llm-compressor.*broken install"):
        calibrate(checkpoint, plan, Calibration([[1, 2, 3]], tmp_path / "site"), tmp_path)


@pytest.mark.skipif("CALIBRATOR_SITE" not in os.environ, reason="set CALIBRATOR_SITE to llm-compressor's folder")
def test_gptq_by_llm_compressor(tmp_path: Path) -> None:
    """The real thing on a tiny Llama: its codes differ from rounding and its result verifies."""
    from ops.tiny_models.build import build

    build("llama", tmp_path / "source", Path(".models/smollm2-135m-instruct"))
    base = [str(tmp_path / "source"), "--group-size", "64", "--workers", "1", "--verify"]
    calibrated = ["--method", "gptq", "--calibrate", "LICENSE", "--samples", "2", "--calibrator-site"]
    assert main([*base, str(tmp_path / "gptq"), *calibrated, os.environ["CALIBRATOR_SITE"]]) == 0
    assert main([*base, str(tmp_path / "rtn")]) == 0
    gptq, rtn = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", "rtn"))
    assert gptq.keys() == rtn.keys()
    name = "model.layers.1.mlp.up_proj.weight_packed"
    assert 0.01 < (gptq[name] != rtn[name]).float().mean() < 1.0
