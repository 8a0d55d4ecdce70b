"""The ticket's life: every pair of the table, and laws over all sequences."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.controller.ticket_state import (
    HOLDS_LEASE,
    LIVE,
    TERMINAL,
    TRANSITIONS,
    TicketEvent,
    TicketState,
    step,
)

S, E = TicketState, TicketEvent
EVENTS = st.lists(st.sampled_from(list(TicketEvent)), max_size=30)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TicketState, TicketEvent)))
def test_every_pair_is_either_in_the_table_or_absorbed(state: TicketState, event: TicketEvent) -> None:
    following, meant = step(state, event)
    assert meant == ((state, event) in TRANSITIONS)
    assert following is (TRANSITIONS[(state, event)] if meant else state)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(sorted(TERMINAL), TicketEvent)))
def test_terminal_states_absorb(state: TicketState, event: TicketEvent) -> None:
    assert step(state, event) == (state, False)


@pytest.mark.parametrize("state", sorted(LIVE))
def test_every_live_state_can_end_in_every_way_and_lose_its_decode_replica(state: TicketState) -> None:
    assert step(state, E.FINISH) == (S.DONE, True)
    assert step(state, E.CANCEL) == (S.CANCELLED, True)
    assert step(state, E.FAIL) == (S.FAILED, True)
    assert step(state, E.DECODE_LOST) == (S.ADMITTED, True)


def test_the_straight_way() -> None:
    state = S.ADMITTED
    for event in (E.PREFILL_STARTED, E.SEALED, E.MOVE, E.OPENED, E.DECODE_STARTED, E.FINISH):
        state, meant = step(state, event)
        assert meant
    assert state is S.DONE


def test_a_bad_page_is_recomputed_before_anything_is_decoded() -> None:
    assert step(S.MOVING, E.OPEN_FAILED) == (S.RECOMPUTING, True)
    assert step(S.RECOMPUTING, E.DECODE_STARTED) == (S.DECODING, True)


@given(EVENTS)
def test_a_ticket_ends_at_most_once(events: list[TicketEvent]) -> None:
    state, ends = S.ADMITTED, 0
    for event in events:
        following, _ = step(state, event)
        ends += following in TERMINAL and state not in TERMINAL
        state = following
    assert ends == (state in TERMINAL)


@given(EVENTS, st.sampled_from(list(TicketEvent)))
def test_an_event_sent_twice_in_a_row_means_something_once_or_loses_the_attempt_again(
    events: list[TicketEvent], event: TicketEvent
) -> None:
    state = S.ADMITTED
    for each in events:
        state, _ = step(state, each)
    once, _ = step(state, event)
    twice, _ = step(once, event)
    assert once is twice


@given(EVENTS)
def test_decoding_needs_no_staging_and_only_a_lost_replica_leads_back(events: list[TicketEvent]) -> None:
    state = S.ADMITTED
    for event in events:
        following, _ = step(state, event)
        if state not in HOLDS_LEASE and following in HOLDS_LEASE:
            assert event is E.DECODE_LOST
        state = following
