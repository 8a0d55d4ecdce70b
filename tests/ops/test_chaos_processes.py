"""The judge of survival runs sees what it is there for: lost requests, tokens twice or missing, usage, leaks."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.fault_kinds import ProcessFault, Target
from ops.chaos import cli
from ops.chaos.processes import checks, report, storm
from ops.chaos.processes.campaign import Result
from ops.chaos.processes.forms import FORMS, Recovery, problems_of
from ops.chaos.processes.load import Answer

FORM = {form.name: form for form in FORMS}


def whole(name: str = "greedy") -> Answer:
    """A complete answer to that form."""
    form = FORM[name]
    tokens = {index: list(range(form.max_tokens)) for index in range(form.num_choices)}
    total = form.max_tokens * form.num_choices
    return Answer(
        form,
        ended="complete",
        status=200,
        prompt_ids=[1, 2, 3],
        ids=tokens,
        text=dict.fromkeys(tokens, "once upon a time"),
        finish=dict.fromkeys(tokens, "length"),
        usage={"prompt_tokens": 3, "completion_tokens": total},
        num_usages=1,
        done=True,
    )


@pytest.mark.parametrize("name", [form.name for form in FORMS])
def test_a_whole_answer_is_good(name: str) -> None:
    found = checks.judge([whole(name)], may_break=False)
    assert (found.complete, found.lost, found.token_faults, found.problems) == (1, 0, 0, [])
    assert found.tokens == FORM[name].max_tokens * FORM[name].num_choices


def spoiled(what: str) -> Answer:
    answer = whole("n = 2, seed")
    match what:
        case "a token twice":
            answer.ids[1].append(answer.ids[1][-1])
        case "a token missing":
            answer.ids[0].pop()
        case "tokens missing, usage agrees":
            answer.ids[0].pop()
            assert answer.usage is not None
            answer.usage["completion_tokens"] -= 1
        case "usage twice":
            answer.num_usages = 2
        case "no usage":
            answer.usage, answer.num_usages = None, 0
        case "the prompt counted twice":
            assert answer.usage is not None
            answer.usage["prompt_tokens"] *= 2
        case "more after the end":
            answer.after_end = 1
        case "a choice too few":
            del answer.finish[1]
        case "stopped without a reason":
            answer.finish[0] = "stop"
        case "aborted":
            answer.finish[0] = "abort"
    return answer


SPOILS = (
    "a token twice",
    "a token missing",
    "tokens missing, usage agrees",
    "usage twice",
    "no usage",
    "the prompt counted twice",
    "more after the end",
    "a choice too few",
    "stopped without a reason",
    "aborted",
)


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_wrong_with_an_answer_is_seen(what: str) -> None:
    found = checks.judge([whole(), spoiled(what)], may_break=False)
    assert found.token_faults == 1 and found.problems, what
    assert all(problem.startswith("n = 2, seed: ") for problem in found.problems)


GONE = "the decode replica of this request is gone after 3 tokens, and it cannot be continued exactly"


@pytest.mark.parametrize(
    ("name", "ended", "error", "may_break", "verdict"),
    [
        ("sampled, penalty, no seed", "error", GONE, False, "clear_errors"),
        ("JSON schema", "error", "another one did not reproduce its tokens", False, "clear_errors"),
        ("greedy", "error", GONE, False, "lost"),  # a form that can always go on must
        ("sampled, penalty, no seed", "error", "internal error", False, "lost"),  # not clear
        ("greedy", "broken", "", True, "broken"),
        ("greedy", "error 500", "Internal Server Error", True, "broken"),
        ("greedy", "error 500", "Internal Server Error", False, "lost"),
        ("greedy", "broken", "", False, "lost"),
        ("greedy", "hung", "", True, "lost"),
    ],
)
def test_a_request_that_does_not_end_whole(name: str, ended: str, error: str, may_break: bool, verdict: str) -> None:
    ended, _, status = ended.partition(" ")
    answer = replace(whole(name), ended=ended, error=error, status=int(status or 200))
    found = checks.judge([answer], may_break)
    counts = {each: getattr(found, each) for each in ("clear_errors", "broken", "lost")}
    assert counts == {each: int(each == verdict) for each in counts}
    assert bool(found.problems) == (verdict == "lost")


def test_stop_strings_and_schemas_are_looked_at() -> None:
    stop, schema = FORM["stop string"], FORM["JSON schema"]
    assert problems_of(stop, "a man who went", 10, "stop")
    assert not problems_of(stop, "a man", 10, "stop")
    assert not problems_of(schema, '{"name": "a", "colour": "red", "sizes": [1, 2, 3]}', 20, "stop")
    assert problems_of(schema, '{"name": "a", "colour": "red", "sizes": [1, 2, 3]}{"name"', 20, "stop")
    assert problems_of(schema, '{"name": "a", "colour": "red", "sizes": [1, 2]}', 20, "stop")


def status() -> dict[str, Any]:
    replica = {"replica_id": "d", "state": "ready", "blocks_held": 0, "blocks_quarantined": 0, "running": 0}
    return {
        "tickets": {"in_flight": 0, "by_state": {"decoding": 0}},
        "staging": {"bytes_held": 0, "leases": 0},
        "queue": {"waiting": 0},
        "pools": {"decode": {"replicas": [replica | {"waiting": 0}]}},
    }


def test_leftovers_are_seen_one_by_one() -> None:
    clean: dict[str, Any] = {"breaches": []}
    assert checks.leftovers(status(), clean) == []
    assert checks.leftovers(status(), {"breaches": ["free + held != total"]}) == ["breach: free + held != total"]
    for path in (("tickets", "in_flight"), ("staging", "bytes_held"), ("staging", "leases"), ("queue", "waiting")):
        held = copy.deepcopy(status())
        held[path[0]][path[1]] = 1
        assert len(checks.leftovers(held, clean)) == 1, path
    for name in ("blocks_held", "blocks_quarantined", "running", "waiting"):
        held = copy.deepcopy(status())
        held["pools"]["decode"]["replicas"][0][name] = 2
        assert checks.leftovers(held, clean) == [f"decode d (ready): {{'{name}': 2}}"]


def test_every_part_of_the_service_is_hurt_and_every_recovery_asked_for() -> None:
    assert {kind.target for kind in ProcessFault} == set(Target)
    assert {form.recovery for form in FORMS} == set(Recovery)


def test_the_table_adds_up() -> None:
    good = Result(
        "decode-kill", 1, {"decoding": 3}, "d", 9.0, 0.5, checks.Findings(requests=13, complete=13, tokens=500)
    )
    bad = Result("decode-kill", 2, {}, "d", 9.0, 1.5, checks.Findings(requests=13, complete=12, lost=1, problems=["x"]))
    assert good.good and not bad.good
    assert not replace(good, leaked=["staging"]).good
    lines = report.table([good.to_dict(), bad.to_dict()]).splitlines()
    assert lines[2] == "| decode-kill | 2 | 26 | 25 | 0 | 0 | 0 | 1 | 0 | 0 | 500 | 1.0 | 1/2 |"
    assert lines[3].startswith("| all | 2 | 26 |")
    assert "FAIL decode-kill seed 2: 13 requests, 12 complete, 1 lost" in report.line(bad.to_dict())


def test_one_command_has_all_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Path("ops/results/survival.jsonl")
    assert cli.main(["processes", "--table", str(runs)]) == 0
    assert "| decode-kill | 2 | 26 | 26 |" in capsys.readouterr().out
    done = tmp_path / "soak.json"
    done.write_text(json.dumps({"steps": 10, "alarms": 1, "outcomes": {}}))
    assert cli.main(["soak", "--steps", "10", "--file", str(done)]) == 1  # an alarm that was noted is a failure
    assert "FALSE ALARMS in 10 of 10 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start_s", "end_s", "lost"), [(90.0, 105.0, 0), (101.0, 101.5, 0), (50.0, 99.0, 1), (103.0, 110.0, 1)]
)
def test_in_a_storm_only_connections_of_the_killed_frontend_may_break(start_s: float, end_s: float, lost: int) -> None:
    broken = Answer(FORM["greedy"], ended="broken", status=200, start_s=start_s, end_s=end_s)
    found = storm.judge([whole(), broken], killed_at=100.0)
    assert (found.requests, found.complete, found.broken, found.lost) == (2, 1, 1 - lost, lost)
    assert bool(found.problems) == bool(lost)
