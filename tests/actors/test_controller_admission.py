"""Who gets which replicas, and who waits."""

from __future__ import annotations

from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of

from actors.controller.events import Tick
from actors.messages import AdmitRequest, Outcome, ReplicaEvent, ReplicaEventKind, Role


def request(**facts: Any) -> AdmitRequest:
    values: dict[str, Any] = {"request_id": "r", "frontend_id": "f", "num_prompt_tokens": 100, "max_tokens": 64}
    return AdmitRequest(**(values | facts))


# -- choice


def test_load_is_spread_by_predicted_occupancy() -> None:
    rig = ControllerDriver()
    rig.decode("small", blocks_total=50)
    rig.decode("big", blocks_total=200)
    placed = [rig.admit(f"r{n}").decode for n in range(10)]
    assert placed[:4] == ["big"] * 4 and 1 <= placed.count("small") <= 3


def test_prefill_goes_to_the_shortest_queue_of_prompt_tokens() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=1000)
    rig.prefill("p1", "p2")
    first = rig.admit("long", prompt=3000)
    second, third = rig.admit("a", prompt=100), rig.admit("b", prompt=100)
    assert second.prefill == third.prefill != first.prefill
    rig.seal(first)
    assert rig.admit("c", prompt=100).prefill == first.prefill, "its long prompt is done"


def test_no_request_is_placed_where_its_expected_end_does_not_fit() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=100)  # limit 0.95
    placed = [rig.answer(rig.ask(f"r{n}", prompt=640, most=320)) for n in range(4)]  # 30 blocks each at the end
    assert [bool(ticket) for ticket in placed] == [True, True, True, False]
    assert rig.machine.registry.replicas["d"].reserved == 90
    rig.end(placed[0])
    assert len(rig.machine.queue) == 0, "the fourth has come in"


def test_requests_that_end_soon_make_room_for_one_that_grows_late() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=100)
    for n in range(20):  # teaches that answers of this size class have about 1,000 tokens
        rig.end(rig.admit(f"t{n}", prompt=32, most=1024), tokens=1000)
    for n in range(2):
        rig.end(rig.admit(f"u{n}", prompt=32, most=8), tokens=8)
    rig.wait(1, beats=("d",))
    short = [rig.admit(f"s{n}", prompt=640, most=8) for n in range(3)]  # 63 blocks, and gone in half a second
    assert len(short) == 3
    long = rig.ask("long", prompt=32, most=1024)  # 33 blocks, but only at its end in half a minute
    another = rig.ask("another", prompt=32, most=1024)
    assert rig.answer(long) is not None and rig.answer(another) is not None
    assert rig.machine.registry.replicas["d"].reserved > 95, "more is promised than fits at once"


def test_a_request_larger_than_the_limit_gets_an_empty_replica() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=100)
    whole = rig.admit("whole", prompt=3150, most=64)
    assert whole.decode == "d" and rig.answer(rig.ask("next")) is None


def test_a_request_that_is_too_large_for_the_small_ones_waits_for_a_large_one() -> None:
    rig = ControllerDriver()
    rig.decode("s1", "s2", "s3", "s4", "s5", blocks_total=20)
    rig.decode("large", blocks_total=200)
    rig.beat("large", held=50)
    assert rig.admit("a", prompt=1600).decode == "large"
    assert rig.admit("b", prompt=64, most=8).decode != "large"


def test_a_replica_that_reports_more_than_we_know_of_is_that_much_fuller() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    rig.beat("d1", held=60)
    assert {rig.admit(f"r{n}").decode for n in range(3)} == {"d2"}
    rig.beat("d2", held=0, blocks_quarantined=0)
    rig.beat("d1", held=0)
    assert "d1" in {rig.admit(f"x{n}").decode for n in range(4)}


def test_what_outlives_its_forecast_is_reserved_more_room() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit("r", prompt=320, most=4000)
    before = rig.machine.registry.tickets[ticket.ticket_id].reserved
    rig.wait(120, beats=("d",))
    after = rig.machine.registry.tickets[ticket.ticket_id].reserved
    assert before < after <= 95 and rig.audit() == []


@pytest.mark.parametrize(
    ("facts", "limit", "alone"),
    [
        ({"prompt": 64}, 64, True),
        ({"prompt": 65}, 64, False),
        ({"prompt": 64}, 0, False),
        ({"prompt": 640, "disaggregate": False}, 0, True),
    ],
)
def test_short_prompts_and_forms_that_cannot_be_handed_over_go_straight_to_decode(
    facts: dict[str, Any], limit: int, alone: bool
) -> None:
    rig = ControllerDriver(spec_of(admission={"local_prefill_max_tokens": limit}))
    rig.decode("d")
    rig.prefill("p")
    ticket = rig.admit("r", **facts)
    assert (ticket.prefill is None) == alone
    assert rig.state(ticket) == ("decoding" if alone else "admitted")
    assert "decode computes the prompt" in ticket.reason if alone else "prompt tokens before" in ticket.reason


def test_a_prompt_that_decode_has_cached_goes_straight_there() -> None:
    rig = ControllerDriver(spec_of(admission={"local_prefill_max_tokens": 64}))
    rig.decode("d1", "d2", blocks_total=1000)
    rig.prefill("p1", "p2")
    hashes = tuple(range(100, 120))  # 640 tokens
    first = rig.admit("a", prompt=650, prefix_hashes=hashes)
    assert first.prefill is not None
    second = rig.admit("b", prompt=650, prefix_hashes=hashes)
    assert second.decode == first.decode and second.prefill is None and "cached" in second.reason
    rig.seal(first)
    longer = rig.admit("c", prompt=1300, prefix_hashes=(*hashes, *range(500, 520)))
    assert longer.decode == first.decode and longer.prefill == first.prefill


def test_a_prefix_does_not_pull_everything_onto_a_full_replica() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2", blocks_total=200)
    hashes = tuple(range(10))
    placed = [rig.admit(f"r{n}", prompt=320, most=500, prefix_hashes=hashes).decode for n in range(10)]
    assert set(placed) == {"d1", "d2"} and placed[0] == placed[1]


def test_a_session_comes_back_to_its_replica_and_moves_little_when_replicas_come_and_go() -> None:
    rig = ControllerDriver()
    names = [f"d{n}" for n in range(8)]
    rig.decode(*names, blocks_total=10_000)
    sessions = [f"s{n}" for n in range(60)]

    def homes(turn: str) -> dict[str, str]:
        found = {}
        for session in sessions:
            ticket = rig.admit(f"{session}-{turn}", session=session)
            rig.end(ticket)
            found[session] = ticket.decode
        return found

    first = homes("a")
    assert homes("b") == first and len(set(first.values())) == 8
    rig.decode("d8", blocks_total=10_000)
    grown = homes("c")
    moved = [session for session in sessions if grown[session] != first[session]]
    assert 0 < len(moved) < 20 and {grown[session] for session in moved} == {"d8"}
    rig.leaving("d8")
    assert homes("d") == first


def test_a_full_home_does_not_hold_its_sessions() -> None:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    home = rig.admit("r0", session="s").decode
    rig.beat(home, held=80)
    assert rig.admit("r1", session="s").decode != home


# -- the queue


def test_the_queue_is_bounded_and_busy_says_when_to_come_back() -> None:
    rig = ControllerDriver()
    for n in range(4):
        assert rig.answer(rig.ask(f"r{n}")) is None
    refused = rig.busy("r4")
    assert refused.retry_after_s >= 1 and "4 requests wait" in refused.reason


def test_no_room_in_time_is_busy() -> None:
    rig = ControllerDriver()
    call = rig.ask("r")
    rig.wait(10.5)
    assert "no room on decode within 10 s" in rig.answer(call).reason
    assert len(rig.machine.queue) == 0


def test_asking_twice_while_waiting_waits_once_and_both_are_answered() -> None:
    rig = ControllerDriver()
    first, second = rig.ask("r"), rig.ask("r")
    assert len(rig.machine.queue) == 1
    rig.withdraw(first)
    assert len(rig.machine.queue) == 1, "another caller still waits for it"
    third = rig.ask("r")
    rig.decode("d")
    assert rig.answer(first) is None
    assert rig.answer(second) is not None and rig.answer(second) == rig.answer(third)


def test_tenants_take_turns_by_tokens() -> None:
    rig = ControllerDriver(spec_of(admission={"queue_max": 100}))
    for n in range(9):
        rig.ask(f"greedy{n}", tenant="greedy", prompt=320)
    for n in range(3):
        rig.ask(f"modest{n}", tenant="modest", prompt=320)
    rig.decode("d", blocks_total=38)  # three at a time
    order: list[str] = []
    while rig.machine.registry.tickets:
        live = min(rig.machine.registry.tickets.values(), key=lambda each: each.ticket.ticket_id)
        order.append(live.request.tenant)
        rig.end(live.ticket)
    assert order[:6].count("modest") == 3, order
    assert order.count("greedy") == 9


def test_priority_goes_first_within_a_tenant() -> None:
    rig = ControllerDriver()
    rig.ask("low")
    rig.ask("high", priority=5)
    rig.decode("d", blocks_total=13)
    assert [live.request.request_id for live in rig.machine.registry.tickets.values()] == ["high"]


def test_a_large_request_lets_others_pass_only_for_a_while() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=100)
    running = [rig.admit(f"r{n}", prompt=640, most=64) for n in range(4)]  # 88 of 95
    large = rig.ask("large", prompt=1600, most=64, tenant="big")
    assert rig.answer(rig.ask("small", prompt=64, most=32, tenant="small")) is not None
    rig.wait(3, beats=("d",))
    late = rig.ask("late", prompt=64, most=32, tenant="small")
    assert rig.answer(late) is None, "the large one has waited long enough: none passes it any more"
    for ticket in running:
        rig.end(ticket)
    assert rig.answer(large) is not None and rig.answer(late) is not None


def test_who_lost_a_replica_goes_before_new_requests_and_beyond_the_bound() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=13)
    ticket = rig.admit("old")
    for n in range(4):
        rig.ask(f"new{n}")
    again = rig.lost(ticket, Role.DECODE, tokens=3)
    assert len(rig.machine.queue) == 5 and rig.answer(again) is None
    rig.beat("d")
    assert rig.answer(again).attempt == 2


def test_retries_that_keep_failing_are_slowed_down() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    ticket = rig.admit()
    for _ in range(3):
        call = rig.lost(ticket, Role.DECODE)
        rig.beat("d")
        rig.step(Tick())
        ticket = rig.answer(call) or ticket
    assert ticket.attempt == 3, "the fourth attempt has to wait a moment"
    rig.now += SECOND
    rig.beat("d")
    assert rig.answer(call).attempt == 4


# -- what is learnt


def test_usage_is_learnt_from_requests_that_end_well_only() -> None:
    rig = ControllerDriver()
    rig.decode("d")
    rig.end(rig.admit("a"), Outcome.CANCELLED, 1)
    assert rig.machine.forecast.output.count == 0
    rig.end(rig.admit("b"), Outcome.DONE, 50)
    assert rig.machine.forecast.output.count == 1


def test_a_prompt_larger_than_staging_is_not_handed_over() -> None:
    admission = {"queue_max": 4, "queue_wait_s": 10, "stale_after_s": 2, "fence_after_s": 5}
    rig = ControllerDriver(spec_of(transfer={"staging_bytes_max": 1 << 20, "hand_over_s": 8}, admission=admission))
    rig.decode("d", blocks_total=10**6)
    rig.prefill("p1", "p2")
    ticket = rig.admit(prompt=400_000)
    assert ticket.prefill is None
    assert rig.admit("s", prompt=400).prefill


def test_answers_of_several_sequences_are_learnt_one_by_one() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=1000)
    before = rig.machine.forecast.token_ns
    for n in range(12):
        ticket = rig.admit(f"r{n}", prompt=64, most=2048, num_sequences=16)
        rig.beat("d", events=(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=ticket.ticket_id),))
        rig.now += 3 * SECOND
        rig.end(ticket, tokens=16 * 100)
    expected = rig.machine.forecast.output_tokens(request(max_tokens=2048))
    assert 95 <= expected <= 115, expected
    assert rig.machine.forecast.token_ns == pytest.approx(before, rel=0.1), "100 tokens in 3 s, each of 16 streams"
    again = rig.admit("again", prompt=64, most=2048, num_sequences=16)
    assert rig.machine.registry.tickets[again.ticket_id].reserved <= 2 + 16 * 4


def test_a_prefix_is_forgotten_when_the_replica_has_used_its_cache_for_others() -> None:
    rig = ControllerDriver(spec_of(admission={"local_prefill_max_tokens": 128}))
    rig.decode("d", blocks_total=300)
    rig.prefill("p", blocks_total=300)
    hashes = tuple(range(1, 196))  # 6,240 tokens
    rig.end(rig.admit("first", prompt=6240, most=8, prefix_hashes=hashes))
    soon = rig.admit("soon", prompt=6240, most=8, prefix_hashes=hashes)
    assert soon.prefill is None, "decode has it cached"
    rig.end(soon)
    for n in range(100):  # 20,000 pages through a cache of 300
        other = tuple(range(1_000 * (n + 1), 1_000 * (n + 1) + 200))
        rig.end(rig.admit(f"other{n}", prompt=6400, most=8, prefix_hashes=other))
    late = rig.admit("late", prompt=6240, most=8, prefix_hashes=hashes)
    assert late.prefill == "p" and rig.machine.registry.tickets[late.ticket_id].prefill_tokens == 6240


def test_what_an_engine_had_not_cached_after_all_is_forgotten_with_all_that_is_older() -> None:
    rig = ControllerDriver(spec_of(admission={"local_prefill_max_tokens": 128}))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    older, newer, newest = (tuple(range(n * 1_000, n * 1_000 + 20)) for n in (1, 2, 3))
    for name, hashes in (("older", older), ("newer", newer), ("newest", newest)):
        rig.end(rig.admit(name, prompt=650, most=8, prefix_hashes=hashes))
    alone = rig.admit("again", prompt=650, most=8, prefix_hashes=newer)
    assert alone.prefill is None
    rig.beat(
        "d", events=(ReplicaEvent(kind=ReplicaEventKind.PROMPT_COMPUTED, ticket_id=alone.ticket_id, num_tokens=0),)
    )
    rig.end(alone)
    assert rig.admit("o", prompt=650, most=8, prefix_hashes=older).prefill == "p"
    assert rig.admit("n", prompt=650, most=8, prefix_hashes=newest).prefill is None
    assert rig.admit("w", prompt=650, most=8, prefix_hashes=newer).prefill is None, "it has been computed there since"
