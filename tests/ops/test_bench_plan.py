"""Plans end to end: typed YAML, real processes behind real sockets, figures and pages out of the raw requests.

1. A plan that makes no sense is refused with field and way out; shipped plans are valid.
2. Rounds rotate, the warm-up is cut, every arm gets the same prompts, and no two rounds share one.
3. A slower arm is found slower, and an arm that is the same is not; a broken one gives breaches and no speed.
4. Each load does what it says: concurrency, times, ramp to the objective, turns that carry what was said.
5. A page opens in a real browser, has its plot inside and loads nothing from elsewhere.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.bench import drive, facts, figures, plan, report, rounds
from ops.bench.plan import Plan
from ops.bench.systems import SystemSpec

SERVER = Path(__file__).parents[1] / "support" / "tiny_server.py"
WORDS = list(range(10, 400))
CLOSED = {"kind": "closed", "concurrency": 2, "requests": 6, "output_tokens": 8, "prompts": {"tokens": 12}}
TREE: dict[str, Any] = {
    "name": "small",
    "question": "Is the slow server slower?",
    "changes": {"slow": {"system": "vllm"}},
    "arms": [[], ["slow"]],
    "again": True,
    "rounds": 4,
    "loads": [CLOSED],
    "machine_price": 3.6,
}


def made(**other: Any) -> Plan:
    return Plan.model_validate({**TREE, **other})


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(name: str, step_s: float = 0.004, fault: str = "") -> SystemSpec:
    at = port()
    argv = [sys.executable, str(SERVER), str(at), "0.02", str(step_s), fault]
    return SystemSpec(name, name, argv, {}, at, "m", ready_path="/health")


async def results(tmp_path: Path, of: Plan, specs: list[SystemSpec]) -> dict[str, Any]:
    kept: list[int] = []
    visits = await rounds.run(of, specs, WORDS, lambda text: None, tmp_path, keep=lambda made: kept.append(len(made)))
    assert kept and kept[-1] == len(visits) and len(kept) == len({visit.round for visit in visits})
    return report.results(of, facts.gather(["small"]), specs, visits, WORDS, "m")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three arms side by side: a server, one that takes fifteen times as long a token, and the first once more.

    The difference is that large because other tests run beside this one.
    """
    import asyncio

    specs = [server("baseline"), server("slow", 0.06), server("baseline-again")]
    folder = tmp_path_factory.mktemp("bench")
    found = asyncio.run(results(folder, made(together=True), specs))
    return dict(json.loads(json.dumps(found)))


def test_the_slow_arm_is_found_and_the_equal_one_is_not(raw: dict[str, Any]) -> None:
    assert raw["breaches"] == []
    rows = {(r["arm"], r["figure"]): r for r in figures.build(raw)["ratios"]}
    slow, again = rows["slow", "tpot_p50"], rows["baseline-again", "tokens_per_s"]
    assert slow["low"] > 1.2 and slow["says"] == "worse"
    assert rows["slow", "tokens_per_s"]["says"] == "worse"
    assert again["low"] < 1.15 and again["high"] > 0.87 and again["num"] == 4
    made_of = figures.build(raw)
    assert made_of["detectable"]["closed 2, 12 in"]["tokens_per_s"] > 0
    assert made_of["same_answers"] == {"slow": 1.0, "baseline-again": 1.0}
    row = made_of["arms"]["baseline"]["closed 2, 12 in"]
    assert row["errors"] == row["retries"] == 0 and row["kv_occupancy"] == 0.25 and row["preemptions"] >= 1
    assert 0 < row["gap_p50"] <= row["gap_p99"] and row["ttft_p50"] > 0.02 and row["memory_gib"] > 0.01
    seconds = sum(v["loads"]["closed 2, 12 in"]["seconds"] for v in raw["visits"] if v["arm"] == "baseline")
    assert row["cost_per_million_output"] == pytest.approx(3.6 * seconds / 3600 / (4 * 6 * 8) * 1e6)
    assert {p["arm"] for p in raw["calibration"]} == set(raw["arms"]) and raw["calibration"][0]["batch"] == 2


def test_rounds_rotate_and_prompts_are_shared_by_arms_only(raw: dict[str, Any]) -> None:
    assert [visit["round"] for visit in raw["visits"]] == [n for n in range(4) for _ in range(3)]
    texts = [[r["text"] for r in v["loads"]["closed 2, 12 in"]["requests"]] for v in raw["visits"]]
    assert texts[0] == texts[1] == texts[2] and texts[0] != texts[3]
    assert all(len(each) == 6 for each in texts), "the warm-up is not among them"


async def test_arms_that_start_anew_rotate(tmp_path: Path) -> None:
    of = made(rounds=2, again=False)
    found = await results(tmp_path, of, [server("baseline"), server("slow")])
    assert [visit["arm"] for visit in found["visits"]] == ["baseline", "slow", "slow", "baseline"]
    assert found["breaches"] == [] and all(visit["start_s"] > 0 for visit in found["visits"])


@pytest.mark.parametrize(("fault", "said"), [("usage", "usage says"), ("random", "different greedy answers")])
async def test_a_broken_arm_shows_no_speed(
    tmp_path: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of = made(arms=[[]], again=False, rounds=3)
    found = await results(tmp_path, of, [server("baseline", fault=fault)])
    assert len(found["visits"]) == 1 and said in found["breaches"][0]
    (tmp_path / "red.json").write_text(json.dumps(found))
    assert report.main([str(tmp_path / "red.json"), "--out", str(tmp_path / "page")]) == 1
    page = (tmp_path / "page.html").read_text()
    assert "A gate is red" in page and "<svg" not in page and "tok/s" not in capsys.readouterr().out


def test_a_terminated_run_leaves_no_system_behind(tmp_path: Path) -> None:
    code = f"""
import asyncio, test_bench_plan as t
from pathlib import Path
spec = t.server("baseline", step_s=0.5)
print(spec.port, flush=True)
of = t.made(arms=[[]], again=False, rounds=50)
asyncio.run(t.rounds.run(of, [spec], t.WORDS, lambda text: None, Path({str(tmp_path)!r})))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        at = int(run.stdout.readline())
        wait_for(at, open_=True)
        run.terminate()
        assert run.wait(60) != 0
    wait_for(at, open_=False)


def wait_for(at: int, open_: bool) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as probe:
            if (probe.connect_ex(("127.0.0.1", at)) == 0) is open_:
                return
        time.sleep(0.1)
    raise TimeoutError(f"port {at} is {'closed' if open_ else 'open'}")


@pytest.mark.parametrize(
    ("moved", "again", "said"), [(0.0, 0.0, "0 prompt tokens"), (9.0, 3.0, "computed 3"), (9.0, 0.0, "")]
)
def test_two_pools_must_hand_over(moved: float, again: float, said: str) -> None:
    visit = rounds.Visit("a", 0, loads={"x": {"tokens_moved": moved, "tokens_recomputed": again}})
    found = rounds.breaches([visit])
    assert [said in breach for breach in found] == [True] * bool(said)


async def test_refusals_are_counted_as_retries(tmp_path: Path) -> None:
    found = await results(tmp_path, made(arms=[[]], again=False, rounds=1), [server("baseline", fault="refuse")])
    assert found["breaches"] == [] and figures.build(found)["arms"]["baseline"]["closed 2, 12 in"]["retries"] > 0


LOADS = [
    {"kind": "poisson", "rate": 50.0, "requests": 6, "output_tokens": 2},
    {"kind": "ramp", "objective": {"ttft_s": 5.0, "tpot_s": 2.0}, "most": 4, "requests_per_slot": 1},
    {"kind": "ramp", "objective": {"ttft_s": 1e-6, "tpot_s": 2.0}, "most": 4, "output_tokens": 2},
    {**CLOSED, "requests": 2, "output_tokens": 3, "prompts": {"tokens": 9, "turns": 3, "turn_tokens": 4}},
    {"kind": "replay", "trace": "trace.jsonl", "speed": 10.0},
    {"kind": "beside", "concurrency": 2, "output_tokens": 100, "long_tokens": 50, "prompts": {"tokens": 9}},
]  # fmt: skip


async def test_every_load_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "BESIDE_AFTER_S", 0.05)
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 2}\n' * 2)
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump({**TREE, "arms": [[]], "again": False, "rounds": 1, "loads": LOADS}))
    of = plan.read(str(file))
    found = await results(tmp_path, of, [server("baseline")])
    assert found["breaches"] == []
    poisson, ramp, missed, chat, replay, streams, long = found["visits"][0]["loads"].values()
    assert [r["output_tokens"] for r in streams["requests"]] == [100] * 2 and streams["held"] == long["held"] == 7
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in long["requests"]} == {(50, 4)}
    assert len(long["requests"]) >= 2 and streams["seconds"] < long["seconds"] + 0.05, "one after another, to the end"
    assert len(poisson["requests"]) == 6 and len(replay["requests"]) == 2
    assert ramp["largest"] == 4 and ramp["goodput"] > 0 and len(ramp["requests"]) == 1 + 2 + 4
    assert (missed["largest"], missed["goodput"], len(missed["requests"])) == (0, 0.0, 4)
    assert [r["prompt_tokens"] for r in chat["requests"]] == [9, 9 + 3 + 4, 9 + 2 * (3 + 4)] * 2


def test_prompts_are_drawn_by_seed_round_and_group() -> None:
    of = made(loads=[{**CLOSED, "prompts": {"tokens": 20, "prefix_tokens": 16, "groups": 2}}]).loads[0]
    one, two = (drive.sessions(of, WORDS, 1, f"round {n}") for n in (0, 1))
    assert (
        one == drive.sessions(of, WORDS, 1, "round 0") and one != two and one != drive.sessions(of, WORDS, 2, "round 0")
    )
    assert one[0].turns[0][:16] == one[2].turns[0][:16] == two[0].turns[0][:16] != one[1].turns[0][:16]
    assert one[0].turns[0][16:] != one[2].turns[0][16:] and len(one[0].turns[0]) == 20


@pytest.mark.parametrize("name", sorted(file.stem for file in plan.PLANS.glob("*.yaml")))
def test_shipped_plans_are_valid_and_can_be_made_small(name: str) -> None:
    whole, small = plan.read(name), plan.read(name, small=True)
    assert whole.name == name and small.rounds <= 2 < whole.rounds
    assert {row.figure for row in whole.published} <= {figure.key for figure in figures.COMPARED}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": [["slow"]]}, "must be [] (the baseline)"),
        ({"arms": [[], ["fast"]]}, "no change 'fast'; there are slow"),
        ({"arms": [[], ["slow", "kv"]], "changes": {**TREE["changes"], "kv": {"set": ["a=b"]}}}, "needs an arm [slow]"),
        ({"loads": [{**CLOSED, "concurrent": 3}]}, "loads.0.closed.concurrent: Extra inputs"),
        ({"loads": [{**CLOSED, "prompts": {"tokens": 4, "prefix_tokens": 4}}]}, "prefix_tokens 4 must be below"),
        ({"loads": [{**CLOSED, "kind": "open"}]}, "'closed', 'poisson', 'ramp', 'replay'"),
        ({"loads": [CLOSED, CLOSED]}, "two loads are the same"),
        ({"loads": [{"kind": "replay", "trace": "none.jsonl"}]}, "no file"),
        ({"rounds": 0}, "rounds: Input should be greater than or equal to 1 (is 0)"),
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({**TREE, **change}))
    with pytest.raises(plan.PlanError) as refused:
        plan.read(str(tmp_path / "p.yaml"))
    assert said in str(refused.value) and "p.yaml" in str(refused.value)


def test_two_commits_are_compared_and_other_plans_are_not(
    tmp_path: Path, raw: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    raw, later = json.loads(json.dumps(raw)), json.loads(json.dumps(raw))
    for tree, seconds in ((raw, 1.0), (later, 2.0)):
        for visit in tree["visits"]:
            for row in visit["loads"].values():
                row["seconds"] = seconds + visit["round"] / 100
    for name, tree in (("aaa111", raw), ("bbb222", later)):
        tree = {**tree, "facts": {**tree["facts"], "commit": name}}
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    assert report.main(["--compare", "bbb", "aaa", "--store", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = next(r for r in rows if (r["arm"], r["figure"]) == ("baseline", "tokens_per_s"))
    assert found["ratio"]["value"] == pytest.approx(0.5, rel=0.02) and found["says"] == "worse"
    assert report.main(["--compare", "ccc", "aaa", "--store", str(tmp_path)]) == 2
    with pytest.raises(report.ReportError, match="plans differ"):
        report.compare(raw, {**later, "plan_sha256": "other"})


def test_the_page_opens_in_a_browser(tmp_path: Path, raw: dict[str, Any]) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    (tmp_path / "r.json").write_text(json.dumps(raw))
    assert report.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "page")]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [chromium, *flags, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "<svg" in shown and "Is the slow server slower?" in shown and "<td>slow</td>" in shown
    assert "worse" in shown and "pageferry bench small" in shown and "repetitions of" in shown
    assert "src=" not in shown and "<script" not in shown and (tmp_path / "page.md").read_text().startswith("# Report")
