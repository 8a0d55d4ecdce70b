"""What the campaigns against a real service count: streams while a replica leaves, and how long two sides differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ops.bench import belief, facts, flood, flood_report, growth, pages, side_by_side


def look(at_s: float, draining: int = 0, tickets: int = 0, target: int = 2) -> dict[str, Any]:
    pool = {"target": target, "draining": draining, "draining_tickets": tickets, "ready": 1, "blocks_held": 1}
    pool["blocks_reserved"] = 2
    return {"at_s": at_s, "queue": 0, "decode": pool | {"blocks_total": 4}, "prefill": pool | {"blocks_total": 0}}


def answer(start_s: float, end_s: float, error: str = "") -> dict[str, Any]:
    return {"start_s": start_s, "end_s": end_s, "error": error, "ttft_s": 0.5, "index": 0}


SAMPLES = [look(0), look(1), look(2, 1, 3), look(3, 1, 1), look(4, target=1), look(5, target=1)]


def test_streams_count_that_were_there_while_a_replica_left() -> None:
    answers = [answer(0, 0.5), answer(0, 2.5), answer(2.5, 9, "broken"), answer(3.5, 9, "late")]
    found = flood.leaving(SAMPLES, answers)
    assert found == {"scale_downs": 1, "tickets_on_leaving": 3, "streams_while_leaving": 2, "streams_cut": 1}


def test_a_repeat_becomes_a_row_and_a_picture(tmp_path: Path) -> None:
    row = {"number": 0, "seconds": 5, "requests": 1, "lost": 0, "problems": [], "samples": SAMPLES}
    row |= {"targets": {"decode": [1, 2, 1], "prefill": [0]}, "answers": [answer(0, 1)]}
    row |= flood.leaving(SAMPLES, [answer(0, 9)])
    assert "| 0 | 5 | 1 | 0 | 1 2 1 | 0 | 3 | 1 | 0 | 0.5 | 0.5 |" in flood_report.table([row])
    made = [{"pool": "decode", "current": 2, "target": 1, "reason": "quiet", "s_ago": ago} for ago in (2.0, 9.0)]
    decisions = flood.decided({"scaling": {"decisions": made}}, 6.0)
    assert [each["at_s"] for each in decisions] == [4.0]
    row["decisions"] = decisions
    flood_report.draw(row, tmp_path / "flood.png")
    assert (tmp_path / "flood.png").stat().st_size > 10_000


def test_a_disagreement_lasts_from_the_look_before_to_the_look_after() -> None:
    looks = [(0.0, 1, 1), (0.1, 1, 2), (0.2, 1, 2), (0.3, 2, 2), (0.4, None, 2), (0.9, 2, 2), (1.0, 2, 1)]
    assert belief.longest(looks, belief.differ) == pytest.approx(0.3)
    assert belief.longest(looks, belief.unknown) == pytest.approx(0.6)
    assert belief.longest(looks[:1], belief.differ) == 0.0


def test_figures_after_a_kill_are_paired_with_those_before_it() -> None:
    def phase(scale: float) -> dict[str, Any]:
        return {"requests": 3, "failed": 0, "ttft_s": scale, "tpot_s": scale, "tokens_per_s": scale}

    rows = [
        {"number": n, "before": phase(1.0), "after": phase(2.0), "a_back_s": 9.0, "b_same_controller": True}
        | {"b_scale_decisions": 0}
        for n in range(3)
    ]
    found = side_by_side.table(rows)
    assert "ttft_s: after / before 2.00 [2.00, 2.00] over 3 repeats" in found
    assert "b's controller or pools changed: none" in found


def test_a_page_names_command_commit_and_raw_file() -> None:
    rows = [{"commit": "a1b2c3d4e5f6", "load": load, "set": ["a.b=1"]} for load in (0.5, 3.25)]
    text = pages.page("A title", "python -m x --y", rows, Path("raw.jsonl"), "Why.", "| t |")
    assert "before each repeat: 0.5 to 3.2. Set over the topology's own: `a.b=1`." in text
    assert re.search(r"`python -m x --y`.* commit a1b2c3d4e5f6;.*Raw data: `raw.jsonl`", text)


def test_growth_is_shown_by_process_and_load(tmp_path: Path) -> None:
    def row(frontends: int, concurrency: int, number: int, cpu_ms: float, left: int = 0) -> dict[str, Any]:
        said = {"requests": 16, "errors": [], "seconds": 2.0, "ttft_s": [0.1, 0.3], "in_flight_most": concurrency}
        spent = {"replica Frontend": cpu_ms, "our controller": 1.0} | ({"raylet": 0.1} if number else {})
        return {
            "frontends": frontends,
            "concurrency": concurrency,
            "pass": number,
            "left": left,
            "foreign_cpu": 0.0,
        } | (said | {"cpu_ms_a_request": spent, "memory_mib": {"replica Frontend": 300.0}})

    rows = [row(n, c, p, 10.0 * n + p, left=c == 64) for n in (1, 3) for c in (1, 64) for p in range(2)]
    assert growth.series(rows, 1, "cpu_ms_a_request") == (
        [1, 64], {"replica Frontend": [10.5, 10.5], "our controller": [1.0, 1.0], "raylet": [0.05, 0.05]}
    )  # fmt: skip
    made = {"command": "c", "commit": "a1", "rows": rows, **facts.gather([])}
    growth.write(tmp_path / "growth.json", made)
    text = (tmp_path / "growth.md").read_text()
    assert "| 3 | 64 | 8.0 | 200 | 300 | 64 | 2 | 0 |" in text and "| replica Frontend | 30.5 | 30.5 |" in text
    assert (tmp_path / "growth.png").stat().st_size > 10_000 and "raylet" not in text
