"""Calibration: constants are found again from times that a known roofline gave, and tests stay tests."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.plan.calibrate import Point, calibrate, read_points, split
from cluster.plan.cli import main
from cluster.plan.facts import PlanError
from cluster.plan.published import _line
from cluster.plan.roofline import Roofline

TRUE = {"layer_overhead_us": 60.0, "request_overhead_us": 4.0, "prefill_efficiency": 0.2}
LOADS = [(1, 3_000), (4, 12_000), (16, 48_000), (32, 96_000), (0, 512), (0, 2_048), (0, 8_192)]


def line() -> Roofline:
    return _line("kimi-k2.6", "int4", "bf16")


def points(noise: float = 0.0) -> list[Point]:
    true = replace(line(), constants=replace(line().constants, **TRUE))
    rng = random.Random(1)
    made = [Point(batch, tokens, 1.0) for batch, tokens in LOADS]
    return split([replace(p, seconds=p.predicted(true) * rng.uniform(1 - noise, 1 + noise)) for p in made])


def test_known_constants_are_found_again() -> None:
    made = calibrate(points(), line(), line())
    assert made.decode.layer_overhead_us == pytest.approx(60.0, rel=0.02)
    assert made.decode.request_overhead_us == pytest.approx(4.0, rel=0.05)
    assert made.prefill.prefill_efficiency == pytest.approx(0.2, rel=0.02)
    assert made.worst_predicted is not None and made.worst_predicted < 0.02


def test_the_middle_loads_are_predicted_and_a_wrong_one_shows() -> None:
    found = points(noise=0.03)
    assert [p.batch for p in found if p.batch and not p.fitted] == [4, 16]
    made = calibrate(found, line(), line())
    assert made.worst_predicted is not None and made.worst_predicted < 0.1
    slow = [replace(p, seconds=p.seconds * 2) if p.batch == 16 else p for p in found]
    worst = calibrate(slow, line(), line()).worst_predicted
    assert worst is not None and worst > 0.4


def test_a_results_file_is_read_by_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    rows = [{"arm": "ours", "batch": p.batch, "tokens": p.tokens, "seconds": p.seconds} for p in points()]
    file.write_text(json.dumps({"calibration": [*rows, {"arm": "other", "batch": 1, "tokens": 9, "seconds": 1.0}]}))
    assert len(read_points(file)) == len(LOADS) and len(read_points(file, "other")) == 1
    command = ["kimi-k2.6", "--tp", "8", "--weights", "int4", "--calibrate", str(file)]
    assert main([*command, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["settings"]["decode"]["layer_overhead_us"] == pytest.approx(60.0, rel=0.02)
    assert tree["worst_predicted"] < 0.02 and sum(not p["fitted"] for p in tree["points"]) == 3
    assert main(command) == 0
    assert "--set layer_overhead_us=" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", '{"calibration": []}', '{"calibration": [{"arm": "a", "batch": 1}]}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(PlanError, match=r"x\.json"):
        read_points(tmp_path / "x.json")
