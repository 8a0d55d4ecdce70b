"""What a request does next. Invariants first:

1. From any state, `Cancelled` ends the request, and nothing moves it afterwards.
2. A request has at most one replica loss in flight, and no more than MAX_LOSSES in all.
3. Once it has been submitted to a decode replica, only an answer about that very replica moves it elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.messages import HandOver, Lease, Outcome, Overloaded, Role, Seal, Ticket, Verdict
from app.request import state
from app.request.events import (
    ENGINE_DEATH_ERROR,
    Action,
    Admit,
    Admitted,
    AwaitHandOver,
    Broken,
    Cancelled,
    DecodeLost,
    End,
    Event,
    Finished,
    HandedOver,
    LeaderArrived,
    NoHandOver,
    PageMismatch,
    Prefill,
    Prefilled,
    PrefillLost,
    Refused,
    ReportLost,
    Stream,
    Submit,
    Submitted,
    WaitForLeader,
)
from app.request.state import Phase, Recovery, RequestState

FULL = Overloaded(reason="decode is full", retry_after_s=2.5)


def ticket(attempt: int = 1, *, prefill: str | None = "p1", decode: str = "d1") -> Ticket:
    return Ticket(
        ticket_id=7, attempt=attempt, request_id="r", frontend_id="f", epoch=1, decode=decode, prefill=prefill
    )


def hand_over(attempt: int = 1) -> HandOver:
    seal = Seal(ticket_id=7, attempt=attempt, layout_fingerprint="l", num_tokens=40, digests=((1, 2),))
    lease = Lease(ticket_id=7, attempt=attempt, node_id="n", segment="s", offset=0, num_bytes=64)
    return HandOver(ticket_id=7, attempt=attempt, seal=seal, lease=lease, deadline_s=5.0)


def tell(
    *events: Event, recovery: Recovery = Recovery.RESUME, retries: bool = False
) -> tuple[RequestState, list[Action]]:
    now, action = state.begin(recovery, retries)
    actions: list[Action] = [action]
    for event in events:
        now, following = state.step(now, event)
        if following is not None:
            actions.append(following)
    return now, actions


def test_a_request_goes_over_both_pools() -> None:
    now, actions = tell(Admitted(ticket()), Prefilled(), HandedOver(hand_over()), Submitted(), Finished())
    assert [type(action) for action in actions] == [Admit, Prefill, AwaitHandOver, Submit, Stream, End]
    assert actions[3] == Submit(ticket(), hand_over())
    assert actions[-1] == End(Outcome.DONE)
    assert now.phase is Phase.ENDED


def test_a_ticket_without_prefill_goes_straight_to_decode() -> None:
    _, actions = tell(Admitted(ticket(prefill=None)), Submitted())
    assert actions[1] == Submit(ticket(prefill=None), None)


def test_no_room_is_429_with_the_time_to_come_back() -> None:
    _, actions = tell(Refused(FULL))
    end = actions[-1]
    assert isinstance(end, End) and end.fault is not None
    assert (end.fault.status, end.fault.retry_after_s) == (429, 2.5)
    assert "decode is full" in end.fault.message


def test_a_lost_prefill_goes_elsewhere_or_to_decode_alone() -> None:
    _, actions = tell(
        Admitted(ticket()),
        PrefillLost("died"),
        Admitted(ticket(2, prefill="p2")),
        PrefillLost("died too"),
        Admitted(ticket(3, prefill=None)),
    )
    assert actions[2] == ReportLost(ticket(), Role.PREFILL, "p1", "died", 0)
    assert actions[3] == Prefill(ticket(2, prefill="p2"))
    assert actions[4] == ReportLost(ticket(2, prefill="p2"), Role.PREFILL, "p2", "died too", 0)
    assert actions[5] == Submit(ticket(3, prefill=None), None)


@pytest.mark.parametrize("verdict", [Verdict.MISMATCH, Verdict.STALE, Verdict.WRONG_LAYOUT])
def test_decode_computes_a_prompt_whose_pages_have_no_proof(verdict: Verdict) -> None:
    _, actions = tell(Admitted(ticket()), Prefilled(), NoHandOver(verdict))
    assert actions[-1] == Submit(ticket(), None)


def test_a_seal_that_does_not_come_is_a_lost_prefill() -> None:
    _, actions = tell(Admitted(ticket()), Prefilled(), NoHandOver(Verdict.MISSING))
    assert isinstance(actions[-1], ReportLost) and actions[-1].role is Role.PREFILL


@pytest.mark.parametrize("recovery", [Recovery.RESUME, Recovery.REPLAY])
def test_a_lost_decode_is_resumed_elsewhere(recovery: Recovery) -> None:
    _, actions = tell(
        Admitted(ticket(prefill=None)),
        Submitted(),
        DecodeLost("d1", "killed", 5),
        Admitted(ticket(2, prefill="p1", decode="d2")),
        Prefilled(),
        HandedOver(hand_over(2)),
        recovery=recovery,
    )
    assert actions[3] == ReportLost(ticket(prefill=None), Role.DECODE, "d1", "killed", 5)
    assert actions[-1] == Submit(ticket(2, prefill="p1", decode="d2"), hand_over(2))


def test_what_cannot_be_continued_exactly_fails_clearly_once_tokens_are_out() -> None:
    events = (Admitted(ticket(prefill=None)), Submitted())
    _, actions = tell(*events, DecodeLost("d1", "killed", 5), recovery=Recovery.NONE)
    end = actions[-1]
    assert isinstance(end, End) and end.outcome is Outcome.FAILED and end.fault is not None
    assert end.fault.status == 503 and "after 5 tokens (killed)" in end.fault.message
    _, actions = tell(*events, DecodeLost("d1", "killed", 0), recovery=Recovery.NONE)
    assert isinstance(actions[-1], ReportLost)  # nothing was out: it just starts again


def test_no_other_decode_is_503() -> None:
    _, actions = tell(Admitted(ticket(prefill=None)), Submitted(), DecodeLost("d1", "killed", 5), Refused(FULL))
    end = actions[-1]
    assert isinstance(end, End) and end.fault is not None
    assert (end.fault.status, end.fault.retry_after_s) == (503, 2.5)


def test_decode_dying_during_prefill_reports_decode() -> None:
    _, actions = tell(Admitted(ticket()), DecodeLost("d1", "killed", 0))
    assert actions[-1] == ReportLost(ticket(), Role.DECODE, "d1", "killed", 0)


def test_the_death_of_another_replica_is_not_ours() -> None:
    now, actions = tell(Admitted(ticket(prefill=None)), Submitted(), DecodeLost("d9", "killed", 5))
    assert now.phase is Phase.STREAM and isinstance(actions[-1], Stream)


@pytest.mark.parametrize("answered", [False, True])
def test_a_page_mismatch_ends_the_request_with_an_error_of_its_own(answered: bool) -> None:
    """`answered` False: decode's verdict overtakes the answer to the call that submitted the request."""
    before: list[Any] = [Admitted(ticket(prefill=None)), *([Submitted()] if answered else [])]
    now, actions = tell(*before, PageMismatch("d1", "cmpl-1", 5))
    end = actions[-1]
    assert isinstance(end, End) and end.outcome is Outcome.FAILED and end.fault is not None
    assert (end.fault.status, end.fault.kind, end.fault.retry_after_s) == (500, "page_integrity_error", 0.0)
    assert "cmpl-1" in end.fault.message and "after 5 tokens" in end.fault.message
    assert now.phase is Phase.ENDED


MIXED_UP = (Admitted(ticket(prefill=None)), Submitted(), PageMismatch("d1", "cmpl-1", 5))


@pytest.mark.parametrize("recovery", [Recovery.RESUME, Recovery.REPLAY])
def test_by_policy_a_page_mismatch_is_run_again_elsewhere(recovery: Recovery) -> None:
    now, actions = tell(
        *MIXED_UP,
        Admitted(ticket(2, prefill="p1", decode="d2")),
        Prefilled(),
        HandedOver(hand_over(2)),
        Submitted(),
        Finished(),
        recovery=recovery,
        retries=True,
    )
    [report] = [action for action in actions if isinstance(action, ReportLost)]
    assert report == ReportLost(ticket(prefill=None), Role.DECODE, "d1", report.reason, 5, page_integrity=True)
    assert actions[-1] == End(Outcome.DONE) and now.losses == 0, "no replica was lost"


def test_a_page_mismatch_is_run_again_once() -> None:
    again = (Admitted(ticket(2, prefill=None, decode="d2")), Submitted(), PageMismatch("d2", "cmpl-1", 8, earlier=1))
    _, actions = tell(*MIXED_UP, *again, retries=True)
    end = actions[-1]
    assert [type(action) for action in actions].count(ReportLost) == 1
    assert isinstance(end, End) and end.fault is not None and end.fault.kind == "page_integrity_error"
    assert "same reason before" in end.fault.message


def test_what_cannot_be_continued_exactly_is_not_run_again() -> None:
    for recovery, tokens, stay in (
        (Recovery.NONE, 5, False),
        (Recovery.RESUME, 5, True),
        (Recovery.NONE, 0, True),
    ):
        mismatch = PageMismatch("d1", "cmpl-1", tokens, siblings_stay=stay)
        _, actions = tell(Admitted(ticket(prefill=None)), Submitted(), mismatch, recovery=recovery, retries=True)
        end = actions[-1]
        assert isinstance(end, End) and end.fault is not None
        assert end.fault.kind == "page_integrity_error" and "cannot be continued exactly" in end.fault.message
    mismatch = PageMismatch("d1", "cmpl-1", 0)
    _, actions = tell(Admitted(ticket(prefill=None)), Submitted(), mismatch, recovery=Recovery.NONE, retries=True)
    assert isinstance(actions[-1], ReportLost), "nothing was out: it just starts again"


def test_a_page_mismatch_without_room_elsewhere_keeps_its_type() -> None:
    _, actions = tell(*MIXED_UP, Refused(FULL), retries=True)
    end = actions[-1]
    assert isinstance(end, End) and end.fault is not None
    assert (end.fault.status, end.fault.kind) == (500, "page_integrity_error") and "decode is full" in end.fault.message
    # What happens later has nothing to do with it.
    _, actions = tell(
        *MIXED_UP,
        Admitted(ticket(2, prefill=None, decode="d2")),
        DecodeLost("d2", "killed", 5),
        Refused(FULL),
        retries=True,
    )
    end = actions[-1]
    assert isinstance(end, End) and end.fault is not None and (end.fault.status, end.fault.kind) == (503, "")


def test_a_request_that_kills_replicas_is_stopped() -> None:
    events: list[Event] = [Admitted(ticket(prefill=None, decode="d0")), Submitted()]
    for number in range(state.MAX_LOSSES + 1):
        events += [
            DecodeLost(f"d{number}", "killed", 1),
            Admitted(ticket(number + 2, prefill=None, decode=f"d{number + 1}")),
            Submitted(),
        ]
    now, actions = tell(*events)
    assert now.losses == state.MAX_LOSSES
    assert [type(a) for a in actions].count(ReportLost) == state.MAX_LOSSES
    assert isinstance(actions[-1], End) and actions[-1].outcome is Outcome.FAILED


def test_a_request_that_two_engines_died_with_runs_alone_and_a_third_death_ends_it() -> None:
    events: list[Event] = [Admitted(ticket(decode="d0")), PrefillLost("died", died=True)]
    events += [Admitted(ticket(2, prefill=None, decode="d0")), DecodeLost("d0", "died", 0, died=True)]
    _, actions = tell(*events)
    reports = [action.alone for action in actions if isinstance(action, ReportLost)]
    assert reports == [False, True]
    beside = Admitted(ticket(3, prefill=None, decode="d1"))
    _, actions = tell(*events, beside, Submitted(), DecodeLost("d1", "killed", 3, died=True))
    assert isinstance(actions[-1], ReportLost) and actions[-1].alone, "another request may have ended that one"
    events += [Admitted(replace(beside.ticket, alone=True)), Submitted()]
    _, actions = tell(*events, DecodeLost("d1", "no answer", 3))
    assert isinstance(actions[-1], ReportLost) and actions[-1].alone, "not a death, so it may go on, alone as before"
    _, actions = tell(*events, DecodeLost("d1", "killed", 3, died=True))
    end = actions[-1]
    assert isinstance(end, End) and end.fault is not None
    assert (end.fault.status, end.fault.kind) == (500, ENGINE_DEATH_ERROR) and "3 engines" in end.fault.message


def test_a_death_of_an_engine_that_never_had_the_request_is_not_held_against_it() -> None:
    events: list[Event] = []
    for number in range(4):  # it dies while prefill has the prompt
        events += [Admitted(ticket(number + 1, decode=f"d{number}")), DecodeLost(f"d{number}", "killed", 0, died=True)]
    now, actions = tell(*events)
    assert now.deaths == 0 and not any(action.alone for action in actions if isinstance(action, ReportLost))


def test_a_sibling_follows_the_carrier() -> None:
    _, actions = tell(Admitted(ticket(), leader=False), LeaderArrived(), Submitted())
    assert [type(action) for action in actions] == [Admit, WaitForLeader, Submit, Stream]
    assert actions[2] == Submit(ticket(), None)


EVENTS = st.one_of(
    st.builds(
        lambda attempt, prefill, decode, leader: Admitted(ticket(attempt, prefill=prefill, decode=decode), leader),
        st.integers(1, 9),
        st.sampled_from([None, "p1"]),
        st.sampled_from(["d1", "d2"]),
        st.booleans(),
    ),
    st.just(Refused(FULL)),
    st.just(Prefilled()),
    st.just(PrefillLost("died")),
    st.just(HandedOver(hand_over())),
    st.sampled_from(Verdict).map(NoHandOver),
    st.just(LeaderArrived()),
    st.just(Submitted()),
    st.builds(DecodeLost, st.sampled_from(["d1", "d2"]), st.just("killed"), st.integers(0, 3)),
    st.builds(
        PageMismatch,
        st.sampled_from(["d1", "d2"]),
        st.just("cmpl-1"),
        st.integers(0, 3),
        st.integers(0, 1),
        st.booleans(),
    ),
    st.just(Finished()),
    st.just(Broken("bug")),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from(Recovery), st.booleans(), EVENTS)
def test_every_state_can_be_ended_and_stays_ended(
    events: list[Event], recovery: Recovery, retries: bool, late: Event
) -> None:
    now, _ = tell(*events, recovery=recovery, retries=retries)
    assert now.losses <= state.MAX_LOSSES
    before = now.phase
    now, action = state.step(now, Cancelled())
    assert now.phase is Phase.ENDED
    if before is not Phase.ENDED:
        assert action == End(Outcome.CANCELLED)
    assert state.step(now, late) == (now, None)


@given(st.lists(EVENTS, max_size=60), st.sampled_from(Recovery), st.booleans())
def test_a_story_only_submits_to_the_replica_of_its_ticket(
    events: list[Event], recovery: Recovery, retries: bool
) -> None:
    now, action = state.begin(recovery, retries)
    for event in events:
        now, following = state.step(now, event)
        if isinstance(following, Submit):
            assert following.ticket == now.ticket and now.submitted
        if isinstance(following, ReportLost) and following.role is Role.DECODE:
            assert isinstance(event, PageMismatch if following.page_integrity else DecodeLost)
            assert following.replica_id == event.replica_id == following.ticket.decode
        if following is not None:
            action = following
    assert isinstance(action, End) == (now.phase is Phase.ENDED)
