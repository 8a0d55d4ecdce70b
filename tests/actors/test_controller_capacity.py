"""KV blocks, sequence slots, staging bytes and prefill time run out: who waits, who is refused, who goes first."""

from __future__ import annotations

import heapq
import time
from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of

from actors import deadlines
from actors.controller.events import Tick
from actors.messages import Occupancy, Outcome, Overloaded, Role, Ticket
from cluster.spec import SpecError

WIDE = {"queue_max": 500, "queue_wait_s": 600, "stale_after_s": 30, "fence_after_s": 60}


def live(rig: ControllerDriver, ticket: Ticket) -> Any:
    return rig.machine.registry.tickets[ticket.ticket_id]


# -- sequence slots


def test_sequence_slots_are_capacity() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=2912, max_num_seqs=32)
    calls = [rig.ask(f"r{n}", prompt=64, most=32) for n in range(320)]
    placed = [call for call in calls if rig.answer(call) is not None]
    assert len(placed) == 32 and len(rig.machine.queue) == 288
    for call in placed[:5]:
        rig.end(rig.answer(call))
    assert sum(rig.answer(call) is not None for call in calls) == 37 and rig.audit() == []


def test_many_sequences_are_reserved_as_many_as_run_at_once() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=2912, max_num_seqs=32)
    many = rig.admit("many", prompt=64, most=512, num_sequences=400)
    assert live(rig, many).slots == 32 and live(rig, many).reserved == 2 + 16 + 31 * 16
    assert rig.answer(rig.ask("small", prompt=64, most=32)) is None, "every slot is taken"
    rig.end(many)
    assert rig.admit("next", prompt=64, most=32).decode == "d"


def test_the_replica_with_free_slots_is_preferred() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("few", blocks_total=100_000, max_num_seqs=4)
    rig.decode("many", blocks_total=100_000, max_num_seqs=64)
    placed = [rig.admit(f"r{n}", prompt=64, most=32).decode for n in range(60)]
    assert placed.count("few") == 4


# -- prefill and staging


def test_prompts_are_held_back_from_a_prefill_pool_that_is_busy() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p1", "p2")
    for _ in range(200):
        rig.machine.forecast.learn_prefill(4000, 2 * SECOND)
    running = [rig.admit(f"r{n}", prompt=4000) for n in range(4)]
    calls = [rig.ask(f"w{n}", prompt=4000) for n in range(20)]
    inflight = {name: rig.machine.registry.replicas[name].inflight_tokens for name in ("p1", "p2")}
    assert set(inflight.values()) == {8000}, "one is computed, one is next"
    assert all(rig.answer(call) is None for call in calls)
    rig.now += 2 * SECOND
    rig.seal(running[0])
    assert sum(isinstance(rig.answer(call), Ticket) for call in calls) == 1


def test_a_short_prompt_does_not_wait_behind_a_long_one_while_decode_is_idle() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    rig.machine.forecast.prompt_token_ns = SECOND / 300
    long = rig.admit("long", prompt=4056)
    assert long.prefill == "p"
    short = rig.admit("short", prompt=3)
    assert short.prefill is None and "less than its turn on prefill" in short.reason


def test_a_prompt_that_decode_computes_in_the_time_of_a_hand_over_is_not_moved() -> None:
    rig = ControllerDriver(spec_of(admission={"local_prefill_max_tokens": None}))
    rig.decode("d", blocks_total=1000)
    rig.prefill("p")
    forecast = rig.machine.forecast
    forecast.hand_over_ns, forecast.prompt_token_ns = 0.02 * SECOND, 0.0002 * SECOND  # 100 tokens
    short, long = rig.admit("short", prompt=100), rig.admit("long", prompt=201)
    assert short.prefill is None and long.prefill == "p"
    assert rig.admit("beside two", prompt=40).prefill == "p", "two streams would wait for it: a third of the tokens"
    forecast.prompt_token_ns *= 10
    rig.end(short)
    assert rig.admit("slow", prompt=30).prefill == "p", "decode computes as slowly as prefill does"


def test_the_time_of_a_hand_over_is_learnt() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=1000)
    rig.prefill("p")
    for number in range(60):
        ticket = rig.admit(f"r{number}")
        rig.hand_over(ticket)
        rig.seal(ticket)
        rig.now += SECOND // 10
        rig.open(ticket)
        rig.end(ticket)
    assert rig.machine.forecast.hand_over_ns == pytest.approx(0.1 * SECOND, rel=0.1)


def test_staging_is_promised_once() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    page = rig.machine.registry.replicas["d"].page_bytes
    rig.bytes_max = page * 64
    rig.report()
    first = rig.admit("a", prompt=32 * 32)
    second = rig.admit("b", prompt=32 * 32)
    third = rig.ask("c", prompt=32 * 32)
    assert rig.answer(third) is None, "the staging of both nodes is spoken for"
    rig.seal(first)
    rig.hand_over(first)
    assert rig.answer(third) is None, "its bytes lie there until decode has them"
    rig.open(first)
    assert isinstance(rig.answer(third), Ticket) and rig.audit() == []
    rig.end(second, Outcome.CANCELLED)
    assert rig.admit("d", prompt=320).prefill == "p"


def test_a_nodes_own_report_says_which_prompts_its_staging_can_hold() -> None:
    """Not the configuration: the node may not have its size yet, or may have been made with another one."""
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    page = rig.machine.registry.replicas["d"].page_bytes
    rig.bytes_max = page * 8
    rig.report()
    alone = rig.admit("a", prompt=32 * 16)
    assert alone.prefill is None and f"staging_bytes_max is {page * 8}" in alone.reason
    rig.bytes_max = page * 64
    rig.report()
    assert rig.admit("b", prompt=32 * 16).prefill == "p"


def test_the_pace_of_prefill_does_not_count_the_time_in_its_queue() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    for _ in range(60):
        tickets = [rig.admit(f"r{rig.now}-{n}", prompt=1000) for n in range(4)]
        for ticket in tickets:  # one after the other, 0.2 s each
            rig.now += SECOND // 5
            rig.seal(ticket)
            rig.end(ticket)
    assert rig.machine.forecast.prompt_token_ns == pytest.approx(SECOND / 5000, rel=0.1)


# -- the queue's bound


def test_one_tenant_cannot_fill_the_queue() -> None:
    rig = ControllerDriver()  # queue_max 4, no replica
    greedy = [rig.ask(f"g{n}", tenant="greedy") for n in range(4)]
    modest = rig.ask("m", tenant="modest")
    assert rig.answer(modest) is None
    assert [isinstance(rig.answer(call), Overloaded) for call in greedy] == [False, False, False, True]
    assert isinstance(rig.answer(rig.ask("g5", tenant="greedy")), Overloaded), "its own newest is the worst of all"


def test_an_urgent_request_takes_the_place_of_one_that_is_not() -> None:
    rig = ControllerDriver()
    batch = [rig.ask(f"b{n}") for n in range(4)]
    urgent = rig.ask("urgent", priority=5)
    assert rig.answer(urgent) is None and isinstance(rig.answer(batch[3]), Overloaded)
    assert isinstance(rig.answer(rig.ask("late")), Overloaded)


def test_requests_that_no_replica_here_can_take_leave_the_others_their_places() -> None:
    rig = ControllerDriver()
    rig.decode("d", blocks_total=13)
    rig.admit("running", prompt=320, tokenizer="t")
    for n in range(4):
        assert rig.answer(rig.ask(f"new{n}", tokenizer="new-model", tenant=f"n{n}")) is None
    ours = [rig.ask(f"ours{n}", prompt=320, tokenizer="t") for n in range(4)]
    assert all(rig.answer(call) is None for call in ours)
    assert isinstance(rig.answer(rig.ask("fifth", tokenizer="new-model")), Overloaded)


# -- who may pass


def test_small_requests_pass_a_large_one_that_they_do_not_delay() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=3000, max_num_seqs=64)
    rig.machine.forecast.token_ns = SECOND / 100
    stream = rig.admit("stream", prompt=3200, most=3000)  # expected: 512 tokens, 5 s and more
    large = rig.ask("large", prompt=90_000, most=64)
    assert rig.answer(large) is None
    small = [
        rig.admit(f"s{n}", prompt=64, most=16) for n in range(8)
    ]  # the same tenant, gone in a fraction of a second
    long = rig.ask("long", prompt=5_000, most=4_000)
    assert rig.answer(long) is None, "it would still run when the large one could start"
    for ticket in (stream, *small):
        rig.end(ticket)
    assert isinstance(rig.answer(large), Ticket)


def test_no_other_takes_prefill_from_the_request_that_waits_for_it() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    rig.machine.forecast.prompt_token_ns = SECOND / 1000
    rig.admit("a", prompt=3000)
    first = rig.ask("first", prompt=3000)
    second = rig.ask("second", prompt=2900, tenant="z")
    assert rig.answer(first) is None and rig.answer(second) is None


# -- the forecast decides


def test_a_request_that_would_wait_too_long_is_refused_at_once_and_may_come_back_when_it_would_not() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE | {"queue_wait_s": 45}))
    rig.decode("d", blocks_total=100)
    rig.machine.forecast.token_ns = SECOND / 10
    rig.admit("running", prompt=2000, most=300)  # 72 blocks for 30 s
    soon = rig.ask("soon", prompt=2000, most=300)  # starts after about 30 s
    late = rig.ask("late", prompt=2000, most=300)  # after 60
    assert rig.answer(soon) is None
    refused = rig.answer(late)
    assert isinstance(refused, Overloaded) and "it would wait for" in refused.reason
    assert 12 <= refused.retry_after_s <= 20


def test_a_client_that_gives_up_sooner_is_refused_sooner() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100)
    rig.machine.forecast.token_ns = SECOND / 10
    rig.admit("running", prompt=2000, most=300)
    assert isinstance(rig.answer(rig.ask("hasty", prompt=2000, most=300, patience_s=5.0)), Overloaded)
    assert rig.answer(rig.ask("patient", prompt=2000, most=300)) is None


def test_what_one_replica_has_promised_too_much_takes_no_room_from_another() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE | {"queue_wait_s": 45}))
    rig.decode("large", blocks_total=1000)
    rig.machine.forecast.token_ns = SECOND
    rig.admit("long", prompt=6000, most=300)  # 197 blocks for 300 s
    rig.machine.forecast.token_ns = SECOND / 10
    pages = {"blocks_quarantined": 900, "blocks_total": 1000, "blocks_free": 100, "blocks_held": 0}
    rig.machine.registry.replicas["large"].occupancy = Occupancy(**pages)
    rig.decode("small", blocks_total=100)
    assert rig.admit("running", prompt=2000, most=300).decode == "small"  # 72 blocks for 30 s
    assert rig.answer(rig.ask("soon", prompt=2000, most=300)) is None, "it gets its place after 30 s, so it may wait"
    assert rig.machine.expected_wait_s(rig.now) == pytest.approx(30, rel=0.1)


def test_a_request_larger_than_any_replica_is_expected_when_one_is_empty() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE | {"queue_wait_s": 45}))
    rig.decode("d", blocks_total=100)
    rig.machine.forecast.token_ns = SECOND / 10
    rig.admit("running", prompt=2000, most=300)
    rig.ask("whole", prompt=3150, most=64)
    assert rig.machine.expected_wait_s(rig.now) == pytest.approx(30, rel=0.1)


def test_the_status_says_how_long_the_queue_is() -> None:
    from actors.controller.status import status

    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=100)
    rig.machine.forecast.token_ns = SECOND / 10
    rig.admit("running", prompt=2000, most=300)
    rig.ask("next", prompt=2000, most=300)
    assert status(rig.machine, rig.now)["queue"]["expected_wait_s"] == pytest.approx(30, abs=2)


def test_lengths_that_are_only_expected_leave_a_reserve() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d", blocks_total=1000)
    for n in range(40):  # answers of 100 to 700 tokens, 400 in the mean
        rig.end(rig.admit(f"t{n}", prompt=32, most=4000), tokens=100 if n % 2 else 700)
    placed = 0
    while isinstance(rig.answer(rig.ask(f"r{placed}", prompt=32, most=4000)), Ticket):
        placed += 1
    mean = 950 / (1 + 400 / 32)
    assert 0.75 * mean < placed < 0.95 * mean, "not as many as fit on average, many more than of the longest"


def test_a_flood_on_one_replica_is_answered_whole() -> None:
    """60 requests, 200 tokens in and 500 out, on one decode replica of 600 blocks: as a single engine would do."""
    rig = ControllerDriver(
        spec_of(admission={"stale_after_s": 600, "fence_after_s": 700, "queue_max": 256, "queue_wait_s": 600})
    )
    rig.decode("d", blocks_total=600, max_num_seqs=32)
    rig.prefill("p")
    waiting = {rig.ask(f"r{n}", prompt=200, most=500) for n in range(60)}
    ends: list[tuple[int, int]] = []
    answered = longest = 0
    while waiting or ends:
        for call in [call for call in waiting if rig.answer(call) is not None]:
            waiting.discard(call)
            ticket = rig.answer(call)
            assert isinstance(ticket, Ticket), ticket
            if ticket.prefill:
                rig.seal(ticket)
                rig.hand_over(ticket)
                rig.open(ticket)
            heapq.heappush(ends, (rig.now + 50 * SECOND, call))
            assert rig.machine.registry.replicas["d"].reserved <= 600 and len(ends) <= 32
        rig.now += SECOND // 2
        rig.frontend_beat("f")
        rig.step(Tick())
        while ends and ends[0][0] <= rig.now:
            rig.end(rig.answer(heapq.heappop(ends)[1]), tokens=500)
            answered += 1
        longest = max(longest, len(rig.machine.queue))
        assert rig.now < 2_000 * SECOND
    assert answered == 60 and longest >= 30 and rig.audit() == []


def test_a_decision_takes_less_than_a_millisecond_with_many_waiting() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode(*(f"d{n}" for n in range(8)), blocks_total=2000, max_num_seqs=64)
    for n in range(900):
        rig.ask(f"r{n}", prompt=640, most=500, tenant=f"t{n % 5}")
    assert len(rig.machine.queue) > 200
    taken = []
    for n in range(100):
        began = time.thread_time_ns()
        rig.beat(f"d{n % 8}")
        taken.append(time.thread_time_ns() - began)
    assert sorted(taken)[50] < 2_000_000, sorted(taken)[50]  # a slow machine gets twice the time


def test_lost_requests_come_before_those_that_wait() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE))
    rig.decode("d1", "d2", blocks_total=100)
    lost = rig.admit("lost", prompt=2000, most=64)
    other = rig.admit("other", prompt=2000, most=64)
    waits = rig.ask("waits", prompt=2000, most=64)
    again = rig.lost(lost, Role.DECODE)
    rig.beat(lost.decode)
    assert rig.answer(again).attempt == 2 and rig.answer(waits) is None
    rig.end(other)


# -- deadlines


def test_a_long_prompt_and_a_busy_prefill_get_more_time_for_the_hand_over() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE, transfer={"hand_over_s": 8}))
    rig.decode("d", blocks_total=100_000)
    rig.prefill("p")
    for _ in range(200):
        rig.machine.forecast.learn_prefill(1000, SECOND)  # 1,000 tokens a second
    first = rig.admit("first", prompt=1000)
    second = rig.admit("second", prompt=30_000)
    assert first.deadline_s == pytest.approx(8 + 3, rel=0.1)
    assert second.deadline_s == pytest.approx(8 + 3 * 31, rel=0.1), "it waits for the first, and is long itself"
    rig.wait(60, beats=("d", "p"))
    assert rig.state(second) == "admitted", "30 s of prefill are no loss"
    rig.seal(second)
    call = rig.hand_over(second)
    assert rig.answer(call).deadline_s == pytest.approx(8 + 3 * 31 - 60, rel=0.1)


def test_bytes_that_cross_between_nodes_get_more_time() -> None:
    rig = ControllerDriver(spec_of(admission=WIDE, transfer={"hand_over_s": 8, "staging_bytes_max": 1 << 40}))
    rig.bytes_max = 1 << 40
    rig.decode("near", blocks_total=10**6)
    rig.prefill("p")
    near = rig.admit("near", prompt=10_000)
    rig.left("near")
    rig.decode("far", blocks_total=10**6, node_id="another")
    far = rig.admit("far", prompt=10_000)
    num_bytes = 313 * rig.machine.registry.replicas["far"].page_bytes
    assert far.deadline_s - near.deadline_s >= num_bytes / deadlines.BYTES_PER_S
    assert deadlines.read_s(8 << 30, same_node=False, rest_s=500) == pytest.approx(6 + 86, abs=1)
    assert deadlines.read_s(8 << 30, same_node=True, rest_s=500) == 6 and deadlines.read_s(1, True, rest_s=2) == 2


def test_a_lease_that_ends_before_the_hand_over_may_is_refused() -> None:
    with pytest.raises(SpecError, match=r"lease_s 20 is below hand_over_s 30.*raise lease_s"):
        spec_of(transfer={"lease_s": 20, "hand_over_s": 30})
