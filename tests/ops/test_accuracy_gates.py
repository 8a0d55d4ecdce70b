"""Gates, bounds and tool calls of an evaluation, on figures whose answer is known.

1. The exact binomial bound is Clopper and Pearson's; losses are never called impossible because none was seen.
2. A pair as good as its format passes; a worse one fails, and so does one that was seen too little.
3. A gate that the reference itself cannot do says so and does not pass.
4. Intervals cover a known mean at the stated rate, and a pair on the margin passes at most as often as stated.
5. Planted faults are found where all their interval is beyond the margin.
6. Tool calls: what is valid, what is right.
7. Tasks are drawn by seed, of the lengths that were asked; a needle stands once.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from ops.accuracy import gates, tasks
from ops.bench import stats

BEYOND = "kl beyond one FP8 engine"
CASE = tasks.ToolCase([], "get_temperature", {"city": "Oslo", "unit": "celsius"})


def evaluation(kl: float, spread: float = 0.3, seed: int = 1, needles: float = 1.0) -> dict[str, Any]:
    """Raw figures of a hand-over with this mean KL, beside one FP8 engine with 0.05."""
    rng = random.Random(seed)
    items = []
    for task, count in (("text", 40), ("turns", 10), ("needle", 48)):
        for number in range(count):
            noise, found = rng.gauss(1.0, spread), float(rng.random() < needles)
            rows = {
                "bf16": [[2.0, 0.0, 0.0, found]] * 16,
                "fp8": [[2.0, 0.05 * noise, 0.1, found]] * 16,
                "hand-over": [[2.0 + kl * 0.5, kl * noise, min(1.0, 2 * kl), found]] * 16,
            }
            where = {"context": float(tasks.EDGES[number % 4]), "turn": 1.0, "depth": 0.5}
            items.append({"task": task, "group": f"{task}-{number}", "where": where, "positions": rows})
    calls = {arm: [{"valid": True, "right": True}] * 48 for arm in ("bf16", "fp8", "hand-over")}
    same = [{"group": f"text-{n}", "positions": [[2.0, 0.001 * rng.random(), 0.0, 0.0]] * 8} for n in range(12)]
    spoiled = [{"group": f"text-{n}", "positions": [[3.0, 0.9 * rng.gauss(1.0, 0.1), 0.6, 0.0]] * 8} for n in range(12)]
    return {"items": items, "calls": calls, "controls": {gates.AGAIN: same, "bad-layer": spoiled}}


def red(raw: dict[str, Any]) -> set[str]:
    return {gate.name for gate in gates.build(raw) if not gate.passed}


@pytest.mark.parametrize(
    ("count", "num", "error", "low", "high"),
    [(0, 50, 0.025, 0.0, 0.0711), (1, 50, 0.025, 0.0005, 0.1065), (10, 20, 0.025, 0.2720, 0.7280)],
)
def test_the_binomial_bound_is_clopper_and_pearsons(
    count: int, num: int, error: float, low: float, high: float
) -> None:
    assert gates.binomial_bound(count, num, error, False) == pytest.approx(low, abs=1e-4)
    assert gates.binomial_bound(count, num, error, True) == pytest.approx(high, abs=1e-4)
    assert gates.binomial_bound(num, num, error, True) == 1.0


def test_nothing_lost_of_few_is_not_nothing_lost_for_certain() -> None:
    assert gates.lost([True] * 10, [True] * 10).high > 0.2
    found = gates.lost([True] * 40 + [False] * 8, [True] * 36 + [False] * 12)
    assert found.value == pytest.approx(4 / 48) and found.low < found.value < found.high


def test_a_pair_as_good_as_its_format_passes() -> None:
    assert red(evaluation(0.04)) == set()


def test_a_worse_pair_fails() -> None:
    worse = red(evaluation(0.2))
    assert {"kl", "perplexity", "kl, many turns", "kl beyond one FP8 engine"} <= worse


def test_a_pair_that_was_seen_too_little_does_not_pass() -> None:
    unsure = evaluation(0.04, spread=4.0)
    assert "kl" in red(unsure)


def test_a_reference_that_cannot_do_it_itself_shows_no_loss() -> None:
    found = {gate.name: gate for gate in gates.build(evaluation(0.04, needles=0.3))}
    assert not found["needles lost"].passed and "could not show" in found["needles lost"].reason


def test_a_pair_on_the_margin_passes_at_most_as_often_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper end of a 95 % interval is below the mean in 2.5 % of cases; more with few clusters."""
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    rng, passed, runs = random.Random(3), 0, 100
    for run in range(runs):
        clusters = [[rng.gauss(0.1, 0.05)] * 4 for _ in range(40)]
        passed += gates.gate("kl", stats.cluster_bootstrap(clusters, run), 0.1).passed
    assert passed <= 0.06 * runs


def test_planted_faults_are_found_beyond_the_margin_only() -> None:
    raw = evaluation(0.04)
    found = gates.controls(raw)
    assert [row["found"] for row in found] == [False, True] and gates.sees(found)
    assert not gates.sees(gates.controls(raw, gates.MARGINS | {BEYOND: 40.0})), "a fault within the margin"
    assert not gates.sees(gates.controls(raw, gates.MARGINS | {BEYOND: 0.0})), "an alarm where nothing was planted"


def test_every_arm_stands_in_the_tables() -> None:
    text = gates.tables(evaluation(0.04))
    assert all(arm in text for arm in gates.ARMS) and "| bad-layer |" in text


@pytest.mark.parametrize(
    ("text", "valid", "right"),
    [
        ('{"name": "get_temperature", "arguments": {"city": "Oslo", "unit": "celsius"}}<|im_end|>', True, True),
        ('Sure: {"name": "get_temperature", "arguments": {"city": "Oslo", "unit": "kelvin"}} more', True, False),
        ('{"name": "get_temperature", "arguments": {"city": "Oslo"}}', False, False),
        ('{"name": "get_temperature", "arguments": {"city": 3, "unit": "celsius"}}', False, False),
        ('{"name": "get_time", "arguments": {}}', False, False),
        ('{"name": "set_alarm", "arguments": {"hour": true, "minute": 3}}', False, False),
        ('{"name": "get_temperature", "argum', False, False),
        ("no call", False, False),
        ("{3}", False, False),
    ],
)
def test_a_call_is_judged(text: str, valid: bool, right: bool) -> None:
    assert tasks.judge_call(text, CASE) == (valid, right)


class Letters:
    """One token a character: enough of a tokenizer to draw tasks with."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        return json.dumps(messages)


def test_tasks_are_drawn_by_seed() -> None:
    text, size = [ord("a") + n % 26 for n in range(9000)], tasks.Size()

    def drawn(seed: int) -> list[tasks.Item]:
        return tasks.passages(text, size, random.Random(seed), 2100)

    made = drawn(1)
    assert drawn(1) == made != drawn(2)
    edges = [edge for edge in tasks.EDGES if edge <= 2100 - size.continuation]
    assert len(made) == size.passages * (len(edges) - 1)
    assert all(len(item.forced) == size.continuation and edges[0] <= len(item.prompt) < edges[-1] for item in made)
    for item in tasks.needles(Letters(), text, size, random.Random(1), 2100):
        assert len(item.prompt) == item.where["context"]
        said = Letters().decode(item.prompt)
        assert said.count(Letters().decode(item.forced)) == 1, "a needle stands once"
    turns = tasks.conversations(Letters(), text, size, random.Random(1))
    assert len(turns) == size.conversations * size.turns
    assert all(len(a.prompt) < len(b.prompt) for a, b in itertools.pairwise(turns) if a.group == b.group)
    with pytest.raises(ValueError, match="take a longer text"):
        tasks.passages(text[:100], size, random.Random(1), 2100)
