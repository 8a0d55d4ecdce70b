"""What goes into the controller's machine and what comes out, as values.

Inputs carry a `call_id` when somebody waits for an answer; the machine answers it with exactly one `Reply`, at once
or in a later step. Times are nanoseconds on the controller's own clock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors.messages import (
    AdmitRequest,
    Announcement,
    Claim,
    FrontendCommand,
    Heartbeat,
    Outcome,
    ReplicaId,
    Role,
    StagingStatus,
    TicketId,
    TransferEvent,
)
from cluster.spec import ClusterSpec

CallId = int


class IncompatibleReplica(ValueError):
    """A replica that cannot exchange pages with this cluster; the message shows both sides, field by field."""


class StepFailed(RuntimeError):
    """The controller could not handle a message; what the step had changed is undone. Its log has the reason."""


# -- inputs


class Join(msgspec.Struct, frozen=True):
    call_id: CallId
    announcement: Announcement


class ReplicaHeartbeat(msgspec.Struct, frozen=True):
    call_id: CallId
    heartbeat: Heartbeat


class Leaving(msgspec.Struct, frozen=True):
    """The router saw that Serve is stopping this replica: no new tickets."""

    replica_id: ReplicaId


class ReplicaLeft(msgspec.Struct, frozen=True):
    """A replica says goodbye, or the platform says that its process is gone."""

    replica_id: ReplicaId
    incarnation: int | None = None  # None: whichever
    why: str = "has left"


class FrontendGone(msgspec.Struct, frozen=True):
    """The platform says that this frontend's process is gone: nobody waits for its requests any more."""

    frontend_id: str


class FrontendHeartbeat(msgspec.Struct, frozen=True):
    call_id: CallId
    frontend_id: str
    live_tickets: tuple[TicketId, ...]
    stamp: int = 0  # of the last reply that the frontend had when it said this


class Adopt(msgspec.Struct, frozen=True):
    frontend_id: str
    claims: tuple[Claim, ...]


class Transfer(msgspec.Struct, frozen=True):
    call_id: CallId
    status: StagingStatus
    events: tuple[TransferEvent, ...] = ()


class Admit(msgspec.Struct, frozen=True):
    call_id: CallId
    request: AdmitRequest


class Withdraw(msgspec.Struct, frozen=True):
    """Whoever waited for this call is gone (client disconnected, caller died)."""

    call_id: CallId


class WantHandOver(msgspec.Struct, frozen=True):
    call_id: CallId
    ticket_id: TicketId
    attempt: int
    timeout_ns: int


class Lost(msgspec.Struct, frozen=True):
    call_id: CallId
    ticket_id: TicketId
    attempt: int
    role: Role
    replica_id: ReplicaId
    reason: str
    num_output_tokens: int = 0
    request: AdmitRequest | None = None
    page_integrity: bool = False  # the replica lives: it ended the request because a page was not its own


class Ended(msgspec.Struct, frozen=True):
    ticket_id: TicketId
    outcome: Outcome
    num_output_tokens: int = 0


class ReplicaStarting(msgspec.Struct, frozen=True):
    """A replica's process is there and loads its engine; said again every few seconds until it joins."""

    replica_id: ReplicaId
    pool: Role


class PlatformSize(msgspec.Struct, frozen=True):
    """The platform asks for a pool's size, and says what it holds. Answered with an int, or None: as it is."""

    call_id: CallId
    pool: Role
    current: int  # running replicas
    target: int


class SetTarget(msgspec.Struct, frozen=True):
    """A person sets a pool's size, in every mode. Answered with "", or why not."""

    call_id: CallId
    pool: Role
    target: int
    hold_s: float  # no decision about this pool for so long


class Configure(msgspec.Struct, frozen=True):
    """A rolling update has brought another configuration; what is decided from now on follows it."""

    spec: ClusterSpec
    deployment: int = 0  # of the application; a lower one than the last is of a replica that is being replaced


class Tick(msgspec.Struct, frozen=True):
    """Time passes: deadlines, silence, fencing, drains, scaling. A few times a second."""


Event = (
    Join
    | ReplicaHeartbeat
    | Leaving
    | ReplicaLeft
    | FrontendHeartbeat
    | FrontendGone
    | Adopt
    | Transfer
    | Admit
    | Withdraw
    | WantHandOver
    | Lost
    | Ended
    | ReplicaStarting
    | PlatformSize
    | SetTarget
    | Configure
    | Tick
)


# -- effects


class Reply(msgspec.Struct, frozen=True):
    """The answer to a call; an exception as `value` is raised at the caller."""

    call_id: CallId
    value: Any


class ToFrontend(msgspec.Struct, frozen=True):
    frontend_id: str
    order: FrontendCommand


class Replace(msgspec.Struct, frozen=True):
    """End this process, it hangs and may hold a GPU; the platform makes another one."""

    kind: Literal["replica", "transfer"]
    name: str  # replica id, node id


class Log(msgspec.Struct, frozen=True):
    text: str
    is_error: bool = False


Effect = Reply | ToFrontend | Replace | Log
