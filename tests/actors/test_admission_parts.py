"""What admission is made of: the load index, the ring of sessions, the prefix index, forecasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.controller.affinity import LEVELS, HashRing, LoadIndex, PrefixIndex, landmarks
from actors.controller.forecast import Forecast, blocks_for, predict_occupancy
from actors.messages import AdmitRequest


def request(**facts: Any) -> AdmitRequest:
    values: dict[str, Any] = {"request_id": "r", "frontend_id": "f", "num_prompt_tokens": 100, "max_tokens": 64}
    return AdmitRequest(**(values | facts))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 2)), max_size=60))
def test_the_load_index_finds_the_least_loaded(moves: list[tuple[int, float]]) -> None:
    index = LoadIndex()
    model: dict[str, int] = {}
    for number, load in moves:
        if load > 1.5:
            index.drop(str(number))
            model.pop(str(number), None)
        else:
            index.put(str(number), load)
            model[str(number)] = min(int(load * (LEVELS - 1)), LEVELS - 1)
    found = list(index.least())
    assert sorted(found) == sorted(model) and [model[name] for name in found] == sorted(model.values())


def test_replicas_that_are_equally_loaded_take_turns() -> None:
    rig = ControllerDriver()
    rig.decode(*(f"d{n}" for n in range(6)), blocks_total=1_000_000)  # a request does not show in the load
    placed = [rig.admit(f"r{n}").decode for n in range(12)]
    assert all(placed.count(name) == 2 for name in set(placed)) and len(set(placed)) == 6


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 30), min_size=2, max_size=12), st.integers(31, 40))
def test_a_ring_moves_keys_only_to_a_newcomer(members: set[int], newcomer: int) -> None:
    ring = HashRing()
    for member in members:
        ring.add(f"d{member}")
    before = {key: next(ring.owners(str(key))) for key in range(50)}
    ring.add(f"d{newcomer}")
    for key in range(50):
        assert next(ring.owners(str(key))) in (before[key], f"d{newcomer}")
    ring.drop(f"d{newcomer}")
    assert {key: next(ring.owners(str(key))) for key in range(50)} == before
    assert len(set(ring.owners("k", most=len(members)))) == len(members)


@settings(max_examples=50)
@given(st.integers(0, 200), st.integers(0, 200))
def test_the_longest_known_prefix_is_found_to_the_landmark(known: int, asked: int) -> None:
    index = PrefixIndex()
    index.note(tuple(range(known)), "d")
    pages, holders = index.longest(tuple(range(asked)))
    both = set(landmarks(known)) & set(landmarks(asked))
    assert pages == max(both, default=0) and holders == (("d",) if pages else ())


def test_the_prefix_index_is_bounded_and_keeps_what_is_used() -> None:
    index = PrefixIndex(entries_max=20)
    index.note((1, 2, 3, 4), "d")
    for n in range(100):
        index.note((1_000 + n,), "e")
        index.note((1, 2, 3, 4), "d")
    assert len(index) <= 20 + 4 and index.longest((1, 2, 3, 4, 5)) == (4, ("d",))
    index.note((1, 2, 3, 4), "e")
    index.note((1, 2, 3, 4), "f")
    assert index.longest((1, 2, 3, 4)) == (4, ("f", "e")), "the latest two"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.integers(1, 40)), max_size=12),
    st.tuples(st.integers(1, 40), st.floats(0, 1), st.integers(1, 60)),
    st.integers(0, 20),
)
def test_the_forecast_is_what_a_dumb_simulation_finds(
    running: list[tuple[int, float, int]], new: tuple[int, float, int], overdue: int
) -> None:
    """Each request: blocks at its end, the share of them that it still has to grow, seconds left."""
    rig = ControllerDriver()
    rig.decode("d")
    replica = rig.machine.registry.replicas["d"]
    wish = rig.admit("x")
    some = rig.machine.registry.tickets[wish.ticket_id]
    rig.end(wish)
    tickets = {}
    for number, (reserved, share, left) in enumerate(running):
        growth = reserved * share / left
        tickets[number] = replace(some, reserved=reserved, growth=growth, ends_ns=left * SECOND)
    if overdue:
        tickets[99] = replace(some, reserved=overdue, growth=1.0, ends_ns=-1)
    replica.ends = sorted((live.ends_ns, n, live.reserved, live.growth, 1) for n, live in tickets.items())
    need, new_share, lasts = new
    growth = need * new_share / lasts

    def held(second: float) -> float:
        old = sum(r - r * share / left * (left - second) for r, share, left in running if left >= second)
        return overdue + old + need - growth * (lasts - second)

    peak, at_end = predict_occupancy(replica, 0, lasts * SECOND, need, growth)
    gone = sum(r for r, _, left in running if left == lasts)  # at its own end, these have just ended
    assert at_end == pytest.approx(held(lasts) - gone, abs=1.001)
    worst = max(held(float(s)) for s in {*(left for _, _, left in running if left <= lasts), lasts})
    assert peak == pytest.approx(worst, abs=1.001) and peak >= at_end


def test_forecasts_learn_lengths_by_size_class() -> None:
    forecast = Forecast()
    assert forecast.output_tokens(request(max_tokens=100)) == 100
    assert forecast.output_tokens(request(max_tokens=100_000)) == 512
    for _ in range(50):
        forecast.learn(request(max_tokens=4096), 200, SECOND)
    assert 190 <= forecast.output_tokens(request(max_tokens=4000)) <= 215
    assert forecast.output_tokens(request(max_tokens=4000, num_output_tokens=1000)) == 1501


def test_one_stalled_answer_of_few_tokens_does_not_change_the_pace_of_all() -> None:
    forecast = Forecast()
    for _ in range(50):
        forecast.learn(request(max_tokens=256), 100, 3 * SECOND)
    assert forecast.token_ns == pytest.approx(0.03 * SECOND, rel=0.01)
    forecast.learn(request(max_tokens=256), 3, 60 * SECOND)  # its engine died, or stood still
    assert forecast.token_ns < 0.07 * SECOND


def test_many_short_prompts_do_not_say_that_a_long_one_takes_minutes() -> None:
    """Each prompt costs 2 s and 10 ms a token, as on a slow machine; some wait a minute for something else."""
    forecast = Forecast()
    for number in range(1_000):
        tokens = 1800 if number % 20 == 0 else 20 + number % 7
        stalled = 60 * SECOND if number % 9 == 0 and tokens < 1000 else 0
        forecast.learn_prefill(tokens, 2 * SECOND + tokens * SECOND // 100 + stalled)
    assert forecast.prefill_ns(1800) == pytest.approx(20 * SECOND, rel=0.3)


def test_prompts_of_one_length_give_their_time_and_a_stall_changes_little() -> None:
    forecast = Forecast()
    for _ in range(200):
        forecast.learn_prefill(1000, 3 * SECOND)
    before = forecast.prefill_ns(1000)
    assert before == pytest.approx(3 * SECOND, rel=0.3)
    forecast.learn_prefill(1000, 300 * SECOND)
    assert forecast.prefill_ns(1000) < 1.3 * before


def test_blocks_of_a_request_count_the_prompt_once() -> None:
    assert blocks_for(request(num_prompt_tokens=100), 28, 32) == 4
    assert blocks_for(request(num_prompt_tokens=100, num_sequences=3), 60, 32) == 5 + 2 * 2
