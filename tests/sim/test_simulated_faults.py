"""Random clusters, loads and faults: every law holds. That the checkers can fail is in `test_planted_bugs`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.controller.registry import Registry
from actors.messages import Verdict
from actors.transfer.machine import TransferMachine
from ops.simulate import cli
from ops.simulate.checkers import Verdicts, check
from ops.simulate.cluster import ClusterSim
from ops.simulate.decode import DecodeSim
from ops.simulate.faults import Fault, FaultKind, parse_kinds, plan
from ops.simulate.scenario import Scenario, ScenarioError, load, random_scenario
from ops.simulate.story import missing, story
from ops.simulate.world import MS, SECOND

ALL = tuple(FaultKind)
SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))
assert SCENARIOS


def test_seeds_with_all_faults_hold_every_law() -> None:
    summary = cli.run_seeds(0, 40, ALL)
    assert summary["failing"] == []
    assert {summary[name] for name in ("violations", "lost", "duplicated", "leaked")} == {0}
    assert summary["requests"] > 400 and summary["faults_struck"] > 100
    assert summary["outcomes"]["done"] > 0.8 * summary["requests"]
    # What the campaign is there for did happen in it.
    for name in ("fetches", "replicas_lost", "resumed_or_replayed", "leases_lost"):
        assert summary[name] > 0, name
    assert summary["sequences"] > summary["requests"]


# Each broke a law once: a decode pool full of two prompts computed again in turn; a process that ends while its link is
# down; a prefill whose call is gone and whose link broke; a controller dead at the end; a call that got lost first;
# three broken streams (78).
@pytest.mark.parametrize("seed", [78, 228, 271, 590, 633, 2807])
def test_a_seed_that_broke_a_law_holds_it_now(seed: int) -> None:
    found, _ = cli.judge(random_scenario(seed, ALL))
    assert found.clean, found.violations


@pytest.mark.soak
def test_many_seeds_with_all_faults_hold_every_law() -> None:
    assert cli.run_seeds(1_000, 1_000, ALL)["failing"] == []


@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_alone(kind: FaultKind) -> None:
    summary = cli.run_seeds(10_000, 2, (kind,))
    assert summary["failing"] == [] and summary["faults_struck"] >= 2


def test_without_faults_every_request_is_done_or_refused_with_a_time_to_come_back() -> None:
    summary = cli.run_seeds(20_000, 8, ())
    assert summary["failing"] == [] and set(summary["outcomes"]) <= {"done", "busy"}


def test_a_seed_always_does_the_same() -> None:
    def run(seed: int) -> Any:
        cluster = ClusterSim(random_scenario(seed, ALL)).run()
        ends = [(r.request_id, r.outcome, r.end_ns, r.position) for r in cluster.records]
        cluster.close()
        return ends, cluster.world.events, cluster.net.counts, cluster.controller.log

    assert run(5) == run(5)
    assert run(5) != run(6)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """Runs that are worth reading, most of them because a law was broken once; `expect` is part of each file."""
    scenario = load(path)
    assert scenario.expect
    found, cluster = cli.judge(scenario)
    lines = story(cluster)
    assert found.clean and missing(lines, scenario.expect) == [], "\n".join([*found.violations, *lines])


def test_a_scenario_file_that_cannot_be_read_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.yaml"
    for text, problem in (
        ("requests: ['0.5 s, prompt 3, output 4']\nfaults: ['1 s, meteor']", "meteor"),
        ("requests: ['5 minutes, prompt 3, output 4']", "0.5 s"),
        ("requests: []\nfautls: []", "fautls"),
    ):
        path.write_text(text)
        with pytest.raises(ScenarioError, match=r"wrong\.yaml"):
            load(path)
        assert cli.main(["--scenario", str(path)]) == 2
        assert problem in capsys.readouterr().err


def test_the_command_prints_a_summary_and_a_story(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    assert cli.main(["--seeds", "2", "--seed", "40", "--json", "--markdown", str(table)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {"seeds", "violations", "requests", "lost", "duplicated", "leaked"} <= set(summary)
    assert summary["seeds"] == 2 and "| seeds | 40 .. 41 |" in table.read_text()
    assert cli.main(["--seed", "40", "--story"]) == 0
    shown = capsys.readouterr().out
    assert "r0 comes: " in shown and "r0 done with " in shown and "FAULT " in shown
    assert cli.main(["--faults", "meteor"]) == 2
    assert "known faults: crash_prefill" in capsys.readouterr().err


def test_a_plan_is_data() -> None:
    assert plan(random.Random(3), ALL, SECOND) == plan(random.Random(3), ALL, SECOND)
    assert plan(random.Random(3), (), SECOND) == ()
    assert parse_kinds("none") == () and parse_kinds("drop, cancel") == (FaultKind.DROP, FaultKind.CANCEL)


def test_pages_run_under_the_shipped_ledger() -> None:
    cluster = ClusterSim(random_scenario(7, ALL)).run()
    pools = [r.pages for r in cluster.replicas.values() if isinstance(r, DecodeSim)]
    assert check(cluster).clean and pools
    lives = [pool.ledger.summary()["lives"] for pool in pools if pool is not None]
    assert len(lives) == len(pools) and min(lives) > 0
    cluster.close()


@pytest.mark.parametrize(("owner", "method"), [(Registry, "open"), (TransferMachine, "step")])
def test_exceptions_inside_are_violations(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the controller undoes the step and goes on."""

    def broken(*_: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(owner, method, broken)
    found, _ = cli.judge(replace(random_scenario(1, ()), limit_s=5.0, settle_s=1.0))
    assert any("KeyError: 'gone'" in text for text in found.violations) and not found.clean


# -- one request, looked at closely


def one_request(*faults: Fault, output: int = 200, **form: Any) -> tuple[Verdicts, ClusterSim]:
    """Two replicas of each pool on two nodes, no scaling; a prompt of 1,000 tokens that is handed over."""
    base = random_scenario(1, ())
    spec: dict[str, Any] = json.loads(json.dumps(base.spec))
    for pool in ("prefill", "decode"):
        spec["pools"][pool] = {"replicas": 2, "min_replicas": 1, "max_replicas": 4}
    spec["admission"]["local_prefill_max_tokens"] = 0
    spec["scaling"]["mode"] = "off"
    spec["integrity"] = {"policy": form.pop("policy", "retry")}
    arrival = replace(base.arrivals[0], at_ns=0, prompt_tokens=1_000, output_tokens=output, max_tokens=2 * output)
    plain: dict[str, Any] = {"num_sequences": 1, "recovery": "resume", "ending": "eos"}
    arrival = replace(arrival, **(plain | form))
    shape = replace(base.shape, nodes=2, frontends=1, decode_blocks=256, staging_bytes=256 * 4096, max_seqs=16)
    shape = replace(shape, prefill_token_ns=100_000, open_page_ns=50_000, watched=False)
    return cli.judge(Scenario(seed=1, arrivals=(arrival,), faults=faults, spec=spec, shape=shape))


def seen(cluster: ClusterSim, name: str) -> float:
    return cluster.frontends[0].counted.get(f"pageferry_{name}_total", 0)


def at(kind: FaultKind, ms: int, target: int = 0) -> Fault:
    return Fault(kind, ms * MS, target=target, duration_ns=30 * SECOND, amount=0.5)


def test_a_straight_run_moves_pages_and_recomputes_nothing() -> None:
    found, cluster = one_request()
    assert found.clean and seen(cluster, "replicas_lost") == 0
    assert cluster.findings.verdicts == {Verdict.OK: 1}
    assert sum(node.machine.tokens_moved for node in cluster.nodes) == 1_000
    decode = [r for r in cluster.replicas.values() if isinstance(r, DecodeSim)]
    assert sum(r.recomputed_tokens for r in decode) <= 2, "the token that prefill sampled is read, no more"


def test_the_first_token_is_prefills_own_and_comes_before_decode_has_the_pages() -> None:
    first = [one_request(recovery=recovery)[1].records[0].first_token_ns for recovery in ("resume", "replay")]
    assert first[0] < first[1]


@pytest.mark.parametrize(
    ("kind", "at_ms", "losses"),
    [
        (FaultKind.CRASH_PREFILL, 50, 1),
        (FaultKind.CRASH_DECODE, 1_500, 1),
        (FaultKind.HANG_DECODE, 1_500, 1),
        (FaultKind.HANG_PREFILL, 50, 1),
        (FaultKind.CRASH_CONTROLLER, 50, 0),
        (FaultKind.CRASH_CONTROLLER, 1_500, 0),
        (FaultKind.CRASH_TRANSFER, 1_500, 0),
    ],
)
def test_who_dies_when_costs_at_most_one_more_attempt(kind: FaultKind, at_ms: int, losses: int) -> None:
    """Both replicas of a pool take turns as the victim, so the one that has the request is hit."""
    worst = 0.0
    for target in (0, 1):
        found, cluster = one_request(at(kind, at_ms, target))
        assert found.clean, found.violations
        assert cluster.records[0].outcome == "done" and cluster.records[0].position == 200
        worst = max(worst, seen(cluster, "replicas_lost"))
    assert worst == losses


@pytest.mark.parametrize(("recovery", "outcome"), [("resume", "done"), ("replay", "done"), ("none", "not_resumable")])
def test_a_decode_replica_that_dies_in_the_middle(recovery: str, outcome: str) -> None:
    outcomes = set()
    for target in (0, 1):
        found, cluster = one_request(at(FaultKind.CRASH_DECODE, 1_500, target), recovery=recovery)
        assert found.clean, found.violations
        outcomes.add(cluster.records[0].outcome)
    assert outcomes == {"done", outcome}


def test_three_sequences_of_one_prompt_survive_their_replica_together() -> None:
    for target in (0, 1):
        found, cluster = one_request(at(FaultKind.CRASH_DECODE, 1_500, target), num_sequences=3)
        assert found.clean, found.violations
        assert [sequence.position for sequence in cluster.records[0].sequences] == [200, 150, 100]
        assert cluster.controller.totals()["done"] == 1


@pytest.mark.parametrize(("policy", "outcome"), [("retry", "done"), ("fail", "page_integrity")])
def test_a_page_that_is_not_the_requests_own(policy: str, outcome: str) -> None:
    found, cluster = one_request(at(FaultKind.PAGE_MISMATCH, 1_500), policy=policy)
    assert found.clean and cluster.records[0].outcome == outcome
    assert seen(cluster, "page_integrity_retries") == (policy == "retry")


def test_a_client_that_leaves_in_a_long_prefill_stops_it_between_chunks() -> None:
    found, cluster = one_request(at(FaultKind.CANCEL, 60))
    assert found.clean and cluster.records[0].outcome == "cancelled"
    assert cluster.findings.verdicts == {} and not any(node.machine.staging.bytes_held for node in cluster.nodes)
    assert cluster.records[0].end_ns - cluster.records[0].arrival_ns < SECOND
