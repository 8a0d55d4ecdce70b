"""One request's story as a table: what to do next, given where it is and what happened. Pure.

The shell (`app.core_client`) performs an action, turns what came of it into an event, and asks again. Actions are
raced against what happens outside (the client leaves, decode dies), so every phase answers those events too. A pair
that is not in the table changes nothing: a late answer of an attempt that was given up is absorbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from actors.nouns import Busy, HandOver, Outcome, ReplicaId, Role, Ticket, Verdict

PAGE_INTEGRITY_ERROR = "page_integrity_error"  # the `type` of the error that a client gets
MAX_LOSSES = 6  # replicas one request may see die before it fails: more means that the request itself kills them


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


# -- events


@dataclass(frozen=True, slots=True)
class Admitted:
    """A ticket. `carrier` False: a sibling brings the prompt to decode for the whole family."""

    ticket: Ticket
    carrier: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    busy: Busy


@dataclass(frozen=True, slots=True)
class Prefilled:
    pass


@dataclass(frozen=True, slots=True)
class PrefillLost:
    reason: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    hand_over: HandOver


@dataclass(frozen=True, slots=True)
class NoHandOver:
    """There is no proof for this attempt. MISSING: its prefill is lost; else decode computes the prompt."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Carried:
    """The sibling that carried the prompt has its first token, or will never have one."""


@dataclass(frozen=True, slots=True)
class Submitted:
    pass


@dataclass(frozen=True, slots=True)
class DecodeLost:
    replica_id: ReplicaId
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PageMismatch:
    """Decode ended the request before a step's token left: its block table named a page that is not its own.

    `request` is the request's name for people. `earlier`: how often it has happened under its ticket before.
    `siblings_stay`: a sequence of the same ticket (n > 1) could not be continued elsewhere.
    """

    replica_id: ReplicaId
    request: str
    num_output_tokens: int
    earlier: int = 0
    siblings_stay: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last output of the request has been passed on, or a stop string ended it in the frontend."""

    outcome: Outcome = Outcome.DONE


@dataclass(frozen=True, slots=True)
class Cancelled:
    pass


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that no road foresees; the request fails, its ticket is released like any other."""

    message: str
    status: int = 500


Event = (
    Admitted
    | Refused
    | Prefilled
    | PrefillLost
    | HandedOver
    | NoHandOver
    | Carried
    | Submitted
    | DecodeLost
    | PageMismatch
    | Finished
    | Cancelled
    | Broken
)


# -- actions


@dataclass(frozen=True, slots=True)
class Admit:
    pass


@dataclass(frozen=True, slots=True)
class Prefill:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AwaitHandOver:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Follow:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Submit:
    ticket: Ticket
    hand_over: HandOver | None


@dataclass(frozen=True, slots=True)
class Stream:
    pass


@dataclass(frozen=True, slots=True)
class ReportLost:
    ticket: Ticket
    role: Role
    replica_id: ReplicaId
    reason: str
    num_output_tokens: int
    page_integrity: bool = False  # the replica is not lost, it has ended the request for a `PageMismatch`


@dataclass(frozen=True, slots=True)
class Fault:
    """What the client is told. `status` is the HTTP status; `retry_after_s` above 0 becomes a Retry-After header.

    `kind` is the `type` of the error in the answer; "": what vLLM's server calls that status.
    """

    status: int
    message: str
    retry_after_s: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome
    fault: Fault | None = None


Action = Admit | Prefill | AwaitHandOver | Follow | Submit | Stream | ReportLost | End


@dataclass(frozen=True, slots=True)
class Story:
    """Where a request is. `lost` is the role whose loss is being reported in RELOCATE.

    `retries_mismatch`: the policy for a page that was not the request's own: run it again elsewhere, once.
    """

    recovery: Recovery
    retries_mismatch: bool = False
    phase: Phase = Phase.ADMIT
    ticket: Ticket | None = None
    lost: Role | None = None
    losses: int = 0
    mismatch: PageMismatch | None = None  # why it is in RELOCATE, when no replica was lost
    submitted: bool = False  # decode may know this request: it must be told when it ends early


Step = tuple[Story, Action | None]


def begin(recovery: Recovery, retries_mismatch: bool = False) -> tuple[Story, Action]:
    return Story(recovery, retries_mismatch), Admit()


def step(story: Story, event: Event) -> Step:
    """The next story and the action to perform now; None: nothing changes, go on with what is running."""
    if story.phase is Phase.ENDED:
        return story, None
    for kind, handler in _ANYWHERE:
        if isinstance(event, kind):
            return handler(story, event)
    handle = _TABLE.get((story.phase, type(event)))
    return (story, None) if handle is None else handle(story, event)


def _end(story: Story, outcome: Outcome, fault: Fault | None = None) -> Step:
    return replace(story, phase=Phase.ENDED), End(outcome, fault)


def _on_cancelled(story: Story, event: Cancelled) -> Step:
    return _end(story, Outcome.CANCELLED)


def _on_finished(story: Story, event: Finished) -> Step:
    return _end(story, event.outcome)


def _on_broken(story: Story, event: Broken) -> Step:
    return _end(story, Outcome.FAILED, Fault(event.status, event.message))


def _on_admitted(story: Story, event: Admitted) -> Step:
    told = replace(story, ticket=event.ticket, lost=None, mismatch=None, submitted=False)
    if not event.carrier:
        return replace(told, phase=Phase.FOLLOW), Follow(event.ticket)
    if event.ticket.prefill is None:
        return replace(told, phase=Phase.SUBMIT, submitted=True), Submit(event.ticket, None)
    return replace(told, phase=Phase.PREFILL), Prefill(event.ticket)


def _on_refused(story: Story, event: Refused) -> Step:
    busy = event.busy
    if story.mismatch is not None:
        return _mixed_up(story, story.mismatch, f"; there was no room to run it again: {busy.reason}")
    if story.lost is not None:
        message = f"the {story.lost} replica of this request is gone and it has no other place: {busy.reason}"
        return _end(story, Outcome.FAILED, Fault(503, message, busy.retry_after_s))
    return _end(story, Outcome.FAILED, Fault(429, f"no room for this request: {busy.reason}", busy.retry_after_s))


def _alone(story: Story, event: Event | None = None) -> Step:
    assert story.ticket is not None
    return replace(story, phase=Phase.SUBMIT, lost=None, submitted=True), Submit(story.ticket, None)


def _on_prefilled(story: Story, event: Prefilled) -> Step:
    assert story.ticket is not None
    return replace(story, phase=Phase.HAND_OVER), AwaitHandOver(story.ticket)


def _on_no_hand_over(story: Story, event: NoHandOver) -> Step:
    if event.verdict is Verdict.MISSING:
        return _on_prefill_lost(story, PrefillLost("the seal of its pages did not come"))
    return _alone(story)


def _on_prefill_lost(story: Story, event: PrefillLost) -> Step:
    assert story.ticket is not None and story.ticket.prefill is not None
    if story.losses >= MAX_LOSSES:
        return _alone(story)
    lost = replace(story, phase=Phase.RELOCATE, lost=Role.PREFILL, losses=story.losses + 1)
    return lost, ReportLost(story.ticket, Role.PREFILL, story.ticket.prefill, event.reason, 0)


def _on_handed_over(story: Story, event: HandedOver) -> Step:
    assert story.ticket is not None
    return replace(story, phase=Phase.SUBMIT, submitted=True), Submit(story.ticket, event.hand_over)


def _on_submitted(story: Story, event: Submitted) -> Step:
    return replace(story, phase=Phase.STREAM), Stream()


def _on_decode_lost(story: Story, event: DecodeLost) -> Step:
    if story.ticket is None or event.replica_id != story.ticket.decode:
        return story, None
    if event.num_output_tokens and story.recovery is Recovery.NONE:
        message = (
            f"the decode replica of this request is gone after {event.num_output_tokens} tokens ({event.reason}), and "
            "random sampling with penalties or a grammar and no seed cannot be continued exactly; send it again"
        )
        return _end(story, Outcome.FAILED, Fault(503, message))
    if story.losses >= MAX_LOSSES:
        message = f"this request has lost {story.losses} replicas, the last one: {event.reason}"
        return _end(story, Outcome.FAILED, Fault(503, message))
    lost = replace(story, phase=Phase.RELOCATE, lost=Role.DECODE, losses=story.losses + 1, submitted=False)
    report = ReportLost(story.ticket, Role.DECODE, event.replica_id, event.reason, event.num_output_tokens)
    return lost, report


def _on_page_mismatch(story: Story, event: PageMismatch) -> Step:
    if story.ticket is None or event.replica_id != story.ticket.decode:
        return story, None
    if not story.retries_mismatch:
        return _mixed_up(story, event)
    if event.earlier:
        return _mixed_up(story, event, "; it had been run again elsewhere for the same reason before")
    if event.siblings_stay or (event.num_output_tokens and story.recovery is Recovery.NONE):
        why = "random sampling with penalties or a grammar and no seed cannot be continued exactly elsewhere"
        return _mixed_up(story, event, f"; {why}")
    moved = replace(story, phase=Phase.RELOCATE, lost=Role.DECODE, mismatch=event, submitted=False)
    reason = "a page was not the request's own"
    return moved, ReportLost(story.ticket, Role.DECODE, event.replica_id, reason, event.num_output_tokens, True)


def _mixed_up(story: Story, event: PageMismatch, more: str = "") -> Step:
    message = (
        f"request {event.request}: a page of its KV cache was not its own, so it was ended after "
        f"{event.num_output_tokens} tokens, before a token that had read the page could leave; these tokens are right "
        f"and no other request is affected{more}; send it again"
    )
    return _end(story, Outcome.FAILED, Fault(500, message, kind=PAGE_INTEGRITY_ERROR))


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
    (P.FOLLOW, Carried): _alone,
    (P.SUBMIT, Submitted): _on_submitted,
    (P.SUBMIT, PageMismatch): _on_page_mismatch,
    (P.STREAM, PageMismatch): _on_page_mismatch,
    (P.RELOCATE, Admitted): _on_admitted,
    (P.RELOCATE, Refused): _on_refused,
    **{(phase, DecodeLost): _on_decode_lost for phase in (P.PREFILL, P.HAND_OVER, P.FOLLOW, P.SUBMIT, P.STREAM)},
}
