"""Random clusters, loads and faults: every law holds; and planted bugs are seen, so the checkers can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.controller.machine import Machine
from actors.controller.registry import Registry
from actors.engine.integrity.ledger import Ledger, Released
from actors.messages import Verdict
from actors.transfer.staging import Region, Staging
from ops.simulate import cli
from ops.simulate.checkers import check
from ops.simulate.cluster import ClusterSim
from ops.simulate.engines import DecodeSim, PagePool
from ops.simulate.faults import Fault, FaultKind, parse_kinds, plan
from ops.simulate.frontend import FrontendSim, Story
from ops.simulate.scenario import Scenario, random_scenario, without_faults
from ops.simulate.world import SECOND

ALL = tuple(FaultKind)
SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.json"))
assert SCENARIOS


def test_two_hundred_seeds_with_all_faults_hold_every_law(tmp_path: Path) -> None:
    told = cli.run_seeds(0, 200, ALL, tmp_path)
    assert told["failing"] == []
    assert {told[name] for name in ("violations", "lost", "duplicated", "leaked")} == {0}
    assert told["requests"] > 2000 and told["faults_struck"] > 400
    assert told["outcomes"]["done"] > 0.85 * told["requests"]


@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_alone(kind: FaultKind) -> None:
    told = cli.run_seeds(10_000, 12, (kind,), None)
    assert told["failing"] == [] and told["faults_struck"] >= 12


def test_without_faults_every_request_is_done_or_told_to_come_back() -> None:
    told = cli.run_seeds(20_000, 20, (), None)
    assert told["failing"] == [] and set(told["outcomes"]) <= {"done", "busy"}


def test_a_seed_always_does_the_same() -> None:
    def story(seed: int) -> Any:
        cluster = ClusterSim(random_scenario(seed, ALL)).run()
        ends = [(r.request_id, r.outcome, r.end_ns, r.next_position) for r in cluster.records]
        return ends, cluster.world.events, cluster.net.counts, cluster.controller.log

    assert story(5) == story(5)
    assert story(5) != story(6)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_once_broke_a_law(path: Path) -> None:
    """Seeds that failed, as files; each is named for what happened in it."""
    assert cli.main(["--scenario", str(path), "--json"]) == 0


def test_a_scenario_file_does_the_same_as_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = random_scenario(11, ALL)
    path = scenario.save(tmp_path)
    again = Scenario.from_json(path.read_text())
    assert again == scenario
    first, second = ClusterSim(scenario).run(), ClusterSim(again).run()
    assert first.world.events == second.world.events
    assert cli.main(["--scenario", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == len(scenario.arrivals)


def test_the_command_prints_what_was_agreed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    argv = ["--seeds", "3", "--seed", "40", "--faults", "all", "--json", "--markdown", str(table)]
    assert cli.main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"seeds", "violations", "requests", "lost", "duplicated", "leaked"} <= set(told) and told["seeds"] == 3
    assert "| seeds | 40 .. 42 |" in table.read_text()
    assert cli.main(["--faults", "meteor"]) == 2
    assert "known faults: crash_prefill" in capsys.readouterr().err


def test_a_plan_is_data() -> None:
    import random

    assert plan(random.Random(3), ALL, SECOND) == plan(random.Random(3), ALL, SECOND)
    assert plan(random.Random(3), (), SECOND) == ()
    assert parse_kinds("none") == () and parse_kinds("drop, cancel") == (FaultKind.DROP, FaultKind.CANCEL)


# -- planted bugs


def violations(seeds: range, kinds: tuple[FaultKind, ...], folder: Path) -> list[str]:
    told = cli.run_seeds(seeds.start, len(seeds), kinds, folder)
    for failed in told["failing"]:
        assert Path(failed["scenario"]).is_file(), "a failing seed becomes a scenario file"
    return [text for failed in told["failing"] for text in failed["violations"]]


def late_writer() -> list[str]:
    """A prefill hangs in a chunk until its ticket is long elsewhere; another one uses what little staging there is.

    When it wakes it writes once more. The moment is swept over two arrivals' time in steps smaller than the time
    between a page's sealing chunk and its opening, so that some sweep hits pages that are written and not yet read.
    """
    base = random_scenario(0, ())
    arrivals = tuple(
        replace(base.arrivals[0], at_ns=n * 150_000_000, prompt_tokens=1_000, output_tokens=2) for n in range(60)
    )
    shape = replace(base.shape, nodes=1, staging_bytes=32 * 4096, frontends=1, decode_blocks=256, max_seqs=16)
    found = []
    for step in range(30):
        hang = Fault(FaultKind.HANG_PREFILL, 30_000_000, target=step % 2, duration_ns=8 * SECOND + step * 11_000_000)
        scenario = replace(base, arrivals=arrivals, faults=(hang,), spec=long_spec(base), shape=shape, settle_s=15.0)
        found += check(ClusterSim(scenario).run()).violations
    return found


def test_a_late_writer_hits_nobody() -> None:
    assert late_writer() == []


def test_bytes_given_back_under_a_writer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "in_use", property(lambda self: False))
    assert any("bytes of another ticket" in text for text in late_writer())


def test_tokens_of_an_attempt_that_was_given_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: FrontendSim, batch: list[Any]) -> None:
        for key, first, count, finished in batch:
            if (story := self.by_ticket.get(key[0])) is not None:
                story.tokens(first, count, finished)

    hangs = [Fault(FaultKind.HANG_DECODE, 1_500_000_000, target=n, duration_ns=8 * SECOND) for n in (0, 1)]
    assert all(check(one_request(hang, tokens=1_500)).clean for hang in hangs)
    monkeypatch.setattr(FrontendSim, "_tokens", careless)
    found = [text for hang in hangs for text in check(one_request(hang, tokens=1_500)).violations]
    assert any("came twice" in text for text in found)


def test_leases_that_nobody_releases_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Registry, "release_lease", lambda self, live: None)
    monkeypatch.setattr(Machine, "_dead", lambda self, key, now_ns: False)
    monkeypatch.setattr(Staging, "expire", lambda self, now_ns: [])
    assert any("staging bytes" in text for text in violations(range(60), (FaultKind.CANCEL,), tmp_path))


def test_a_controller_that_mistakes_its_own_pause_for_silence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Fault(FaultKind.HANG_CONTROLLER, 1_500_000_000, duration_ns=12 * SECOND)
    assert check(one_request(pause, tokens=1_500)).clean
    monkeypatch.setattr(Machine, "_shift_deadlines_after_stall", lambda self, now_ns: None)
    monkeypatch.setattr(Machine, "_suspect", lambda self, ticket: None)
    assert any("failed" in text for text in check(one_request(pause, tokens=1_500)).violations)


def test_orders_that_nobody_follows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Story, "order", lambda self, order: None)
    hangs = [Fault(FaultKind.HANG_DECODE, 1_500_000_000, target=n, duration_ns=900 * SECOND) for n in (0, 1)]
    found = [text for hang in hangs for text in check(one_request(hang, tokens=1_500)).violations]
    assert any("never ended" in text for text in found)


def test_blocks_that_do_not_come_back_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forgetful(self: DecodeSim, ticket_id: int, attempt: int) -> None:
        return

    monkeypatch.setattr(DecodeSim, "abort", forgetful)
    monkeypatch.setattr(DecodeSim, "_stepped", lambda self, keys, steps: setattr(self, "stepping", False))
    scenario = replace(random_scenario(3, ()), limit_s=5.0, settle_s=5.0)
    assert any("still holds" in text for text in check(ClusterSim(scenario).run()).violations)


def test_pages_run_under_the_real_ledger() -> None:
    cluster = ClusterSim(random_scenario(7, ALL)).run()
    pools = [r.pages for r in cluster.replicas.values() if isinstance(r, DecodeSim)]
    assert check(cluster).clean and pools
    lives = [pool.ledger.summary()["lives"] for pool in pools if pool is not None]
    assert len(lives) == len(pools) and min(lives) > 0


def test_a_page_that_is_freed_under_its_owner_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_back = PagePool.give_back

    def careless(self: PagePool, owner: str) -> None:
        others = [pages for name, pages in self.held.items() if name != owner and pages]
        if others:
            self.free.append(others[0][-1])
        give_back(self, owner)

    monkeypatch.setattr(PagePool, "give_back", careless)
    found = violations(range(5), ALL, tmp_path)
    assert any("is not to be handed out" in text or "is free with" in text for text in found)


def test_a_page_with_two_owners_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take = PagePool.take

    def careless(self: PagePool, owner: str, count: int) -> None:
        if count and (others := [pages for name, pages in self.held.items() if name != owner and pages]):
            mine = self.held.setdefault(owner, [])
            self.ledger.claim(owner, len(mine), others[0][:1])
            mine.append(others[0][0])
            count -= 1
        take(self, owner, count)

    monkeypatch.setattr(PagePool, "take", careless)
    assert any(text.split(": ")[1] == "sharing" for text in violations(range(5), ALL, tmp_path))


def test_claims_that_outlive_their_request_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Ledger, "release", lambda self, request_id: Released((), ()))
    found = violations(range(5), ALL, tmp_path)
    assert any("freed_while_held" in text or "still have claims" in text for text in found)


def test_exceptions_inside_are_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Machine, event: Any, now_ns: int) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(Machine, "_tick", broken)
    found, cluster = cli.judge(random_scenario(1, ()))
    assert cluster is None and found.violations == ["KeyError: 'gone'"] and not found.clean


# -- named scenarios


def long_spec(base: Scenario) -> dict[str, Any]:
    """Two of each, every prompt handed over, no scaling."""
    spec: dict[str, Any] = json.loads(json.dumps(base.spec))
    for pool in ("prefill", "decode"):
        spec["pools"][pool] = {"replicas": 2, "min_replicas": 1, "max_replicas": 4}
    spec["admission"]["local_prefill_max_tokens"] = 0
    spec["scaling"]["mode"] = "off"
    return spec


def one_request(*faults: Fault, tokens: int = 200) -> ClusterSim:
    base = without_faults(random_scenario(1, ()))
    arrival = replace(base.arrivals[0], at_ns=0, prompt_tokens=1_000, output_tokens=tokens, max_tokens=2 * tokens)
    shape = replace(base.shape, nodes=1, decode_blocks=256, staging_bytes=256 * 4096)
    return ClusterSim(replace(base, arrivals=(arrival,), faults=faults, spec=long_spec(base), shape=shape)).run()


def test_a_straight_run_moves_pages_and_recomputes_nothing() -> None:
    cluster = one_request()
    assert check(cluster).clean and cluster.records[0].attempts == 1
    assert cluster.findings.verdicts == {Verdict.OK: 1} and cluster.nodes[0].tokens_moved == 1_000
    decode = [r for r in cluster.replicas.values() if isinstance(r, DecodeSim)]
    assert sum(r.recomputed_tokens for r in decode) == 0


@pytest.mark.parametrize(
    ("kind", "at_ms", "attempts"),
    [
        (FaultKind.CRASH_PREFILL, 50, 2),
        (FaultKind.CRASH_DECODE, 1_500, 2),
        (FaultKind.HANG_DECODE, 1_500, 2),
        (FaultKind.HANG_PREFILL, 50, 2),
        (FaultKind.CRASH_CONTROLLER, 50, 1),
        (FaultKind.CRASH_CONTROLLER, 1_500, 1),
        (FaultKind.CRASH_TRANSFER, 1_500, 1),
    ],
)
def test_who_dies_when_costs_at_most_one_more_attempt(kind: FaultKind, at_ms: int, attempts: int) -> None:
    """Both replicas of a pool take turns as the victim, so the one that has the request is hit."""
    worst = 0
    for target in (0, 1):
        cluster = one_request(Fault(kind, at_ms * 1_000_000, target=target, duration_ns=30 * SECOND, amount=0.5))
        found = check(cluster)
        assert found.clean, found.violations
        record = cluster.records[0]
        assert record.outcome == "done" and record.next_position == 200 and record.duplicated == 0
        worst = max(worst, record.attempts)
    assert worst == attempts


def test_a_client_that_leaves_in_a_long_prefill_stops_it_between_chunks() -> None:
    cluster = one_request(Fault(FaultKind.CANCEL, 60_000_000))
    assert check(cluster).clean and cluster.records[0].outcome == "cancelled"
    assert cluster.findings.verdicts == {} and cluster.nodes[0].staging.bytes_held == 0
    assert cluster.records[0].end_ns - cluster.records[0].arrival_ns < SECOND
