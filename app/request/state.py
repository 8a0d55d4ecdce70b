"""One request's way as a table: what to do next, given where it is and what happened. Pure.

The driver performs an action, turns what came of it into an event, and asks again. Actions are
raced against what happens outside (the client leaves, decode dies), so every phase answers those events too. A pair
that is not in the table changes nothing: a late answer of an attempt that was given up is absorbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from actors.messages import Outcome, Role, Ticket, Verdict
from app.request.events import (
    ENGINE_DEATH_ERROR,
    PAGE_INTEGRITY_ERROR,
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
    RequestError,
    Stream,
    Submit,
    Submitted,
    WaitForLeader,
)

MAX_LOSSES = 6  # replicas one request may lose, for whatever reason, before it fails
SHARED_DEATHS_MAX = 2  # engines that may die with a request in them; then it runs where no other request is


class Phase(StrEnum):
    ADMIT = "admit"
    PREFILL = "prefill"
    HAND_OVER = "hand_over"
    FOLLOW = "follow"  # a sibling (n > 1) carries the shared prompt to decode; ride its prefix cache
    SUBMIT = "submit"
    STREAM = "stream"
    RELOCATE = "relocate"
    ENDED = "ended"


class Recovery(StrEnum):
    """How a request that has emitted tokens goes on when its decode replica is gone."""

    RESUME = "resume"  # prompt + tokens so far become the prompt
    REPLAY = "replay"  # deterministic: run from the start, swallow the tokens that are out, compare each
    NONE = "none"  # neither would be exact: the request fails with a clear error


@dataclass(frozen=True, slots=True)
class RequestState:
    """Where a request is. `lost` is the role whose loss is being reported in RELOCATE.

    `retries_mismatch`: the policy for a page that was not the request's own: run it again elsewhere, once.
    """

    recovery: Recovery
    retries_mismatch: bool = False
    phase: Phase = Phase.ADMIT
    ticket: Ticket | None = None
    lost: Role | None = None
    losses: int = 0
    deaths: int = 0  # of engines that had this request
    mismatch: PageMismatch | None = None  # why it is in RELOCATE, when no replica was lost
    submitted: bool = False  # decode may know this request: it must be aborted when it ends early

    @property
    def alone(self) -> bool:
        """It may be what ends engines: it gets no place beside other requests."""
        return self.deaths >= SHARED_DEATHS_MAX


Step = tuple[RequestState, Action | None]


def begin(recovery: Recovery, retries_mismatch: bool = False) -> tuple[RequestState, Action]:
    return RequestState(recovery, retries_mismatch), Admit()


def step(state: RequestState, event: Event) -> Step:
    """The next state and the action to perform now; None: nothing changes, go on with what is running."""
    if state.phase is Phase.ENDED:
        return state, None
    for kind, handler in _ANYWHERE:
        if isinstance(event, kind):
            return handler(state, event)
    handle = _TABLE.get((state.phase, type(event)))
    return (state, None) if handle is None else handle(state, event)


def _end(state: RequestState, outcome: Outcome, fault: RequestError | None = None) -> Step:
    return replace(state, phase=Phase.ENDED), End(outcome, fault)


def _on_cancelled(state: RequestState, event: Cancelled) -> Step:
    return _end(state, Outcome.CANCELLED)


def _on_finished(state: RequestState, event: Finished) -> Step:
    return _end(state, event.outcome)


def _on_broken(state: RequestState, event: Broken) -> Step:
    outcome = Outcome.CANCELLED if event.status < 500 else Outcome.FAILED  # a client's mistake is no failure of ours
    return _end(state, outcome, RequestError(event.status, event.message))


def _on_admitted(state: RequestState, event: Admitted) -> Step:
    placed = replace(state, ticket=event.ticket, lost=None, mismatch=None, submitted=False)
    if not event.leader:
        return replace(placed, phase=Phase.FOLLOW), WaitForLeader(event.ticket)
    if event.ticket.prefill is None:
        return replace(placed, phase=Phase.SUBMIT, submitted=True), Submit(event.ticket, None)
    return replace(placed, phase=Phase.PREFILL), Prefill(event.ticket)


def _on_refused(state: RequestState, event: Refused) -> Step:
    busy = event.busy
    if state.mismatch is not None:
        return _mixed_up(state, state.mismatch, f"; there was no room to run it again: {busy.reason}")
    if state.lost is not None:
        message = f"the {state.lost} replica of this request is gone and it has no other place: {busy.reason}"
        return _end(state, Outcome.FAILED, RequestError(503, message, busy.retry_after_s))
    what = "rate limit reached" if busy.limit else "no room for this request"
    return _end(state, Outcome.FAILED, RequestError(429, f"{what}: {busy.reason}", busy.retry_after_s, kind=busy.limit))


def _decode_only(state: RequestState, event: Event | None = None) -> Step:
    assert state.ticket is not None
    return replace(state, phase=Phase.SUBMIT, lost=None, submitted=True), Submit(state.ticket, None)


def _on_prefilled(state: RequestState, event: Prefilled) -> Step:
    assert state.ticket is not None
    return replace(state, phase=Phase.HAND_OVER), AwaitHandOver(state.ticket)


def _on_no_hand_over(state: RequestState, event: NoHandOver) -> Step:
    if event.verdict is Verdict.MISSING:
        return _on_prefill_lost(state, PrefillLost("the seal of its pages did not come"))
    return _decode_only(state)


def _on_prefill_lost(state: RequestState, event: PrefillLost) -> Step:
    assert state.ticket is not None and state.ticket.prefill is not None
    if state.losses >= MAX_LOSSES:
        return _decode_only(state)
    deaths = state.deaths + event.died
    lost = replace(state, phase=Phase.RELOCATE, lost=Role.PREFILL, losses=state.losses + 1, deaths=deaths)
    return lost, ReportLost(state.ticket, Role.PREFILL, state.ticket.prefill, event.reason, 0, alone=lost.alone)


def _on_handed_over(state: RequestState, event: HandedOver) -> Step:
    assert state.ticket is not None
    return replace(state, phase=Phase.SUBMIT, submitted=True), Submit(state.ticket, event.hand_over)


def _on_submitted(state: RequestState, event: Submitted) -> Step:
    return replace(state, phase=Phase.STREAM), Stream()


def _on_decode_lost(state: RequestState, event: DecodeLost) -> Step:
    if state.ticket is None or event.replica_id != state.ticket.decode:
        return state, None
    if event.num_output_tokens and state.recovery is Recovery.NONE:
        message = (
            f"the decode replica of this request is gone after {event.num_output_tokens} tokens ({event.reason}), and "
            "this request's form cannot be continued exactly; send it again"
        )
        return _end(state, Outcome.FAILED, RequestError(503, message))
    died = event.died and state.submitted
    if died and state.ticket.alone:
        message = (
            f"{state.deaths + 1} engines ended while they had this request, the last one while it had no other; it is "
            "not tried again. What ended them is in the service's log"
        )
        return _end(state, Outcome.FAILED, RequestError(500, message, kind=ENGINE_DEATH_ERROR))
    if state.losses >= MAX_LOSSES:
        message = f"this request has lost {state.losses} replicas, the last one: {event.reason}"
        return _end(state, Outcome.FAILED, RequestError(503, message))
    lost = replace(
        state,
        phase=Phase.RELOCATE,
        lost=Role.DECODE,
        losses=state.losses + 1,
        deaths=state.deaths + died,
        submitted=False,
    )
    return lost, ReportLost(
        state.ticket, Role.DECODE, event.replica_id, event.reason, event.num_output_tokens, alone=lost.alone
    )


def _on_page_mismatch(state: RequestState, event: PageMismatch) -> Step:
    if state.ticket is None or event.replica_id != state.ticket.decode:
        return state, None
    if not state.retries_mismatch:
        return _mixed_up(state, event)
    if event.earlier:
        return _mixed_up(state, event, "; it had been run again elsewhere for the same reason before")
    if event.siblings_stay or (event.num_output_tokens and state.recovery is Recovery.NONE):
        return _mixed_up(state, event, "; this request's form cannot be continued exactly elsewhere")
    moved = replace(state, phase=Phase.RELOCATE, lost=Role.DECODE, mismatch=event, submitted=False)
    reason = "a page was not the request's own"
    return moved, ReportLost(
        state.ticket, Role.DECODE, event.replica_id, reason, event.num_output_tokens, True, state.alone
    )


def _mixed_up(state: RequestState, event: PageMismatch, more: str = "") -> Step:
    message = (
        f"request {event.request}: a page of its KV cache was not its own, so it was ended after "
        f"{event.num_output_tokens} tokens, before a token that had read the page could leave; these tokens are right "
        f"and no other request is affected{more}; send it again"
    )
    return _end(state, Outcome.FAILED, RequestError(500, message, kind=PAGE_INTEGRITY_ERROR))


_ANYWHERE: tuple[tuple[type, Callable[..., Step]], ...] = (
    (Cancelled, _on_cancelled),
    (Finished, _on_finished),
    (Broken, _on_broken),
)

P = Phase
_TABLE: dict[tuple[Phase, type], Callable[..., Step]] = {
    (P.ADMIT, Admitted): _on_admitted,
    (P.ADMIT, Refused): _on_refused,
    (P.PREFILL, Prefilled): _on_prefilled,
    (P.PREFILL, PrefillLost): _on_prefill_lost,
    (P.HAND_OVER, HandedOver): _on_handed_over,
    (P.HAND_OVER, NoHandOver): _on_no_hand_over,
    (P.HAND_OVER, PrefillLost): _on_prefill_lost,
    (P.FOLLOW, LeaderArrived): _decode_only,
    (P.SUBMIT, Submitted): _on_submitted,
    (P.SUBMIT, PageMismatch): _on_page_mismatch,
    (P.STREAM, PageMismatch): _on_page_mismatch,
    (P.RELOCATE, Admitted): _on_admitted,
    (P.RELOCATE, Refused): _on_refused,
    **{(phase, DecodeLost): _on_decode_lost for phase in (P.PREFILL, P.HAND_OVER, P.FOLLOW, P.SUBMIT, P.STREAM)},
}
