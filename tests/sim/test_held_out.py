"""The comparison on seeds that were not tuned on: pairs of the same arrivals, and what their differences show."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ops.bench.scaling import held_out
from ops.bench.scaling.autoscale import Outcome
from ops.bench.scaling.held_out import FLOORS, comparisons, ours, rivals, table


def outcome(policy: str, seed: int, slo: float, gpu_hours: float, flaps: int) -> Outcome:
    return Outcome(policy, "long bursts", seed, 100, slo, gpu_hours, flaps, 0, 1.0, 1.0, 0, 1)


def made(slo_more: float) -> list[Outcome]:
    rows = []
    for seed in (101, 102, 103):
        for floor in FLOORS:
            rows.append(outcome(ours(floor).name, seed, 0.9 + slo_more + seed / 1e6, 20.0, 1))
            rows += [outcome(rival.name, seed, 0.9, 20.0 + seed % 3, 1) for rival in rivals(floor)]
    return rows


def test_a_difference_is_of_a_pair_that_saw_the_same_arrivals() -> None:
    found = comparisons(made(0.05))
    assert len(found) == sum(len(rivals(floor)) for floor in FLOORS) and {each.seeds for each in found} == {3}
    first = found[0]
    assert (first.verdict("slo"), first.verdict("flaps"), first.verdict("gpu_hours")) == (
        "better",
        "equal",
        "not shown",
    )
    assert first.more["slo"].value == pytest.approx(5.0, abs=0.02) and first.more["gpu_hours"].value == -1.0
    assert comparisons(made(-0.05))[0].verdict("slo") == "worse"
    assert table(found).count("SLO: better; hours: not shown; flaps: equal") == len(found)


def test_a_run_in_the_record_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "runs.jsonl"
    monkeypatch.setattr(held_out, "TRACES", {"long bursts": lambda seconds, seed: [seconds, seed]})
    known = made(0.0)
    record.write_text("".join(json.dumps(asdict(row)) + "\n" for row in known))
    assert sorted(held_out.compare([101, 102, 103], record), key=str) == sorted(known, key=str)


def test_the_page_says_where_ours_is_not_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "compare", lambda seeds, record: made(0.05) if list(seeds) == [101, 102, 103] else [])
    file = tmp_path / "page.md"
    args = argparse.Namespace(repeats=3, seed=0, record=str(tmp_path / "runs.jsonl"), json=False, markdown=str(file))
    assert held_out.main(args) == 0
    text = file.read_text()
    assert "- long bursts, floor 1, Serve 2, default delays: slo better, gpu hours not shown, flaps equal." in text
    assert "Raw data: `runs.jsonl`" in text and "ours more" in text
