"""Figures that are committed with raw data can be computed from it.

1. Ratios of the system benchmark, and of the time to first token, come out of the raw rounds and turns as printed.
2. The tables of survival and storm come out of the recorded runs as printed.
3. The accuracy page's gates, and the planner's orderings, are those of their files.
4. Every results page names its command and a commit, and either a raw file beside it or that none was kept.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ops.accuracy import gates
from ops.bench import belief, controller, flood, flood_report, side_by_side, stats
from ops.bench import report as bench_report
from ops.bench.integrity_cost.cli import text as cost_table
from ops.bench.integrity_cost.share import Burst, table
from ops.bench.scaling import held_out
from ops.bench.scaling.autoscale import Outcome
from ops.chaos import border
from ops.chaos.processes import report

RESULTS = Path(__file__).parents[2] / "ops" / "results"
COLUMNS = [("ttft_s", stats.p50), ("ttft_s", stats.p95), ("tpot_s", stats.p50), ("tpot_s", stats.p95)]


def raw(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def test_ratios_of_the_systems_are_those_of_the_rounds() -> None:
    page, report = (RESULTS / "bench-systems.md").read_text(), raw("bench-systems.json")

    def rounds(system: str, concurrency: str) -> list[dict[str, Any]]:
        visits = sorted((v for v in report["visits"] if v["system"] == system), key=lambda v: int(v["round"]))
        return [visit["waves"][concurrency] for visit in visits]

    rows = re.findall(r"\| (\d+) \| (\S+) / (\S+) \| (.*) \|", page)
    assert len(rows) == 12
    for concurrency, a, b, printed in rows:
        ours, theirs = rounds(a, concurrency), rounds(b, concurrency)
        found = [stats.paired_ratio([(x["tokens_per_s"], y["tokens_per_s"]) for x, y in zip(ours, theirs)])]
        for key, statistic in COLUMNS:
            found.append(stats.rounds_ratio([x[key] for x in ours], [y[key] for y in theirs], statistic))
        assert printed.split(" | ") == [interval.text() for interval in found], (a, b, concurrency)


def test_the_border_page_is_that_of_its_rounds() -> None:
    page, record = (RESULTS / "border.md").read_text(), raw("border.json")
    made = border.page(record | {"summary": border.summary(record["rows"])}, "border.json")
    assert len(record["rows"]) == 8 * len(border.ARMS) and [x for x in made.splitlines() if x not in page] == []


def test_every_alert_has_its_seconds_from_a_run() -> None:
    page, rules = (RESULTS / "alerts.md").read_text(), Path(__file__).parents[2] / "ops" / "prometheus" / "rules.yaml"
    runs = re.findall(r"^\| (\d) \| .*`(alerts/[\w-]+\.json)` \|$", page, re.M)
    of = {run: {each["alert"]: each for each in raw(file)["table"]} for run, file in runs}
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| ([\d.]+) s \| ([\d.]+) s \| (\d) \|$", page, re.M)
    for alert, what, fired, cleared, run in rows:
        found = of[run][alert]
        assert (found["what"], found["fired_after_s"], found["cleared_after_s"]) == (what, float(fired), float(cleared))
    assert sorted(row[0] for row in rows) == sorted(re.findall(r"alert: (\w+)", rules.read_text()))


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*overhead.json")), ids=lambda file: file.name)
def test_the_overhead_is_that_of_the_turns(file: Path) -> None:
    page, report = file.with_suffix(".md").read_text(), raw(file.name)
    ours = report["systems"]["pageferry"]["ttft_s"]
    for name in ("vllm-fp8", "vllm-bf16"):
        system = report["systems"][name]
        pairs = list(zip(ours, system["ttft_s"]))
        difference = stats.paired_difference(pairs)
        low, high = difference.low * 1e3, difference.high * 1e3
        row = f"| {system['title']} | {stats.paired_ratio(pairs).text(3)} | {difference.value * 1e3:.1f} "
        assert f"{row}[{low:.1f}, {high:.1f}] |" in page


def test_the_page_of_a_plan_is_that_of_its_requests() -> None:
    for file in RESULTS.glob("*.json"):
        made = json.loads(file.read_text())
        if isinstance(made, dict) and made.get("format") == bench_report.FORMAT:
            picture = f"![{made['name']}]({file.stem}.png)"
            assert file.with_suffix(".md").read_text().startswith(bench_report.markdown([made], [picture])), file.name


@pytest.mark.parametrize("name", ["survival", "storm", "poison"])
def test_the_table_of_a_campaign_is_that_of_its_runs(name: str) -> None:
    page = (RESULTS / f"{name}.md").read_text()
    rows = report.read(RESULTS / f"{name}.jsonl")
    assert report.table(rows) in page
    for row in rows:
        if "stall_s" in row.get("more", {}):
            assert f"| {row['more']['stall_s']:.3f} s |" in page


LIVE = {"flood": flood_report.table, "belief": belief.table, "side-by-side": side_by_side.table}


@pytest.mark.parametrize("name", [name for name in LIVE if (RESULTS / f"{name}.md").exists()])
def test_the_table_of_a_campaign_on_a_real_service_is_that_of_its_repeats(name: str) -> None:
    assert LIVE[name](flood.read(RESULTS / f"{name}.jsonl")) in (RESULTS / f"{name}.md").read_text()


def test_the_tables_of_controller_and_held_out_arrivals_are_those_of_their_runs() -> None:
    rows = raw("controller.json")["rows"]
    if "decision_p99_us" in rows[0]:  # an older record has fewer columns than its page's command gives now
        table_of_runs = controller.table([controller.Figures(**row) for row in rows])
        assert table_of_runs in (RESULTS / "controller.md").read_text()
    page, runs = RESULTS / "simulate-held-out.md", RESULTS / "simulate" / "held-out-runs.jsonl"
    if page.exists():
        found = held_out.comparisons([Outcome(**json.loads(line)) for line in runs.read_text().splitlines()])
        assert held_out.table(found) in page.read_text() and held_out.plainly(found) in page.read_text()


def test_the_times_to_ready_are_those_that_the_tests_printed() -> None:
    page = (RESULTS / "ready-times.md").read_text()
    for row in raw("ready-times.json")["rows"]:
        assert row["line"].endswith(f"ready after {row['seconds']} s")
        assert f"| {row['way']} | {row['what']} | {row['seconds']} | `{row['test']}` |" in page


def test_the_cost_of_the_tag_check_is_that_of_the_bursts() -> None:
    bursts = [Burst(**burst) for burst in raw("integrity-cost.json")["bursts"]]
    assert cost_table(table(bursts)) in (RESULTS / "integrity.md").read_text()


def test_the_gates_of_accuracy_are_those_of_the_positions() -> None:
    assert gates.tables(raw("accuracy-hand-over.json")) in (RESULTS / "accuracy-hand-over.md").read_text()


def test_the_planners_orderings_are_those_of_its_file() -> None:
    page = (RESULTS / "planner-check.md").read_text()
    for row in raw("planner-published.json")["orderings"]:
        figures = f"{row['published']:.3f} | {row['planned']:.3f} | {row['planned'] / row['published'] - 1:+.1%}"
        assert f"| {row['what']} | {figures.replace('%', ' %')} | {row['predicted']} |" in page


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_says_where_its_figures_come_from(page: Path) -> None:
    if page.name == "README.md":
        return
    text = page.read_text()
    assert re.search(r"`pageferry |`python -m |    pageferry |    python -m ", text), "no command"
    assert re.search(r"[Cc]ommits?:? [0-9a-f]{7}", text), "no commit"
    stored = {file.name for file in RESULTS.rglob("*") if file.suffix in (".json", ".jsonl")}
    named = [name for name in stored if name in text or (RESULTS / f"{page.stem}.json").name in stored]
    assert named or re.search(r"no raw file|were not kept|was not kept|not kept", text, re.IGNORECASE), "no raw file"
