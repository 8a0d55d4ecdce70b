"""What can happen to a request, and what it may do next. Plain data; `state.py` says which follows from which."""

from __future__ import annotations

from dataclasses import dataclass

from actors.messages import HandOver, Outcome, Overloaded, ReplicaId, Role, Ticket, Verdict

# The `type` of the error that a client gets.
PAGE_INTEGRITY_ERROR = "page_integrity_error"
ENGINE_DEATH_ERROR = "engine_death_error"


# -- events


@dataclass(frozen=True, slots=True)
class Admitted:
    """A ticket. `leader` False: a sibling brings the prompt to decode for the whole family."""

    ticket: Ticket
    leader: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    busy: Overloaded


@dataclass(frozen=True, slots=True)
class Prefilled:
    pass


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """`died`: the engine has ended with this request in it."""

    reason: str
    died: bool = False


@dataclass(frozen=True, slots=True)
class HandedOver:
    hand_over: HandOver


@dataclass(frozen=True, slots=True)
class NoHandOver:
    """There is no proof for this attempt. MISSING: its prefill is lost; else decode computes the prompt."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LeaderArrived:
    """The sibling that carried the prompt has its first token, or will never have one."""


@dataclass(frozen=True, slots=True)
class Submitted:
    pass


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """`died`: the engine has ended, with this request in it if it had been submitted."""

    replica_id: ReplicaId
    reason: str
    num_output_tokens: int
    died: bool = False


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
    """Something that ends the request with an error; its ticket is released like any other."""

    message: str
    status: int = 500


Event = (
    Admitted
    | Refused
    | Prefilled
    | PrefillLost
    | HandedOver
    | NoHandOver
    | LeaderArrived
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
class WaitForLeader:
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
    alone: bool = False  # the next replica must have no other request: this one may be what ends engines


@dataclass(frozen=True, slots=True)
class RequestError:
    """The client's error. `status` is the HTTP status; `retry_after_s` above 0 becomes a Retry-After header.

    `kind` is the `type` of the error in the answer; "": what vLLM's server calls that status.
    """

    status: int
    message: str
    retry_after_s: float = 0.0
    kind: str = ""


def internal_error(request_id: str) -> RequestError:
    """The client's error for a fault inside that it can do nothing about: no word of what happened."""
    return RequestError(500, f"internal error; what happened is in the service's log under request {request_id}")


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome
    fault: RequestError | None = None


Action = Admit | Prefill | AwaitHandOver | WaitForLeader | Submit | Stream | ReportLost | End
