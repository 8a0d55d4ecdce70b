"""The stages of `make gpu-check` that need vLLM, on a CPU: dry as they are, and `engines` on the shared engine pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.engine.integrity import tracker
from actors.engine.integrity.tag_check import TagCheck
from ops.engine_pair import EnginePair
from ops.gpu_check import engines, plan, run, tag_check, worker_halves


@pytest.mark.parametrize("name", [stage.name for stage in plan.STAGES if "vllm" in stage.needs])
def test_a_dry_run(name: str, tmp_path: Path) -> None:
    [stage] = plan.chosen(name)
    results = run.Results(tmp_path / "results.jsonl")
    good = run.run_stage(stage, plan.Options(tmp_path, dry=True), results)
    rows = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert good, rows
    assert sum("ok" in row for row in rows) >= 2


def test_a_check_that_sees_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tag_check, "self_test", lambda device: None)
    monkeypatch.setattr(TagCheck, "_check", lambda check, view: tracker.Proof(0, 0))
    rows = list(tag_check.run(plan.Options(tmp_path, dry=True)))
    [found] = [row for row in rows if "planted" in row]
    assert found["ok"] is False and found["found"] == 0 and found["replays_that_read_a_wrong_row"] == found["planted"]


def test_a_conversion_that_differs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_halves, "encode_e4m3", lambda values, *_: values.to(torch.uint8))
    rows = list(worker_halves.run(plan.Options(tmp_path, dry=True)))
    assert [row["ok"] for row in rows if "differ" in row] == [False, False]


async def test_real_engines_are_measured(pair: EnginePair) -> None:
    rows = await engines.measure(pair, (40, 300), max_tokens=4)
    assert [row["ok"] for row in rows if "ok" in row] == [True, True, True], rows
    assert [row["verdicts"] for row in rows if "verdicts" in row] == [{"ok": 2}, {"ok": 10}]
    assert {row["role"] for row in rows if "engine" in row} == {"prefill", "decode"}
