"""What happens to a node's transfer machine, and what it asks of the actor that carries it. Pure values.

`*_ns` durations are in nanoseconds. An engine is named "<replica id>#<rank>". A link is one connection of an engine,
with a number that the actor never uses twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.messages import HandOver, Lease, StagingStatus, TransferEvent, Verdict
from actors.transfer.channel import PagesOpened, PagesSealed, StagingMapped, WriterDone
from actors.transfer.staging import Key

# -- events: calls of replicas and of transfer actors on other nodes


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A prefill replica wants `num_bytes` that `engines` will write. Answered with a `Lease`, or None: no room.

    `keep_ns`: the lease ends when there is no progress for so long; 0: the configured lease time.
    """

    call_id: int
    key: Key
    num_bytes: int
    engines: tuple[str, ...]
    wait_ns: int
    keep_ns: int = 0


@dataclass(frozen=True, slots=True)
class WriterDropped:
    """These engines never began to write, or are dead, and the ticket needs the bytes no more.

    May come before the `LeaseAsked` that it takes back, which then gets nothing.
    """

    key: Key
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """A decode replica wants the hand-over's bytes on this node, for `engines` to read.

    Answered with a `Lease` of this node, or a `Verdict`: STALE (the ticket has ended) or MISSING (no bytes in time).
    """

    call_id: int
    hand_over: HandOver
    engines: tuple[str, ...]
    wait_ns: int


@dataclass(frozen=True, slots=True)
class ReaderDropped:
    """These engines never began to read, and the ticket needs the bytes no more."""

    key: Key
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The tickets need their bytes no more. Idempotent."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class PieceAsked:
    """Another node fetches a chunk of a lease of this node, from byte `first` on. Answered by `CopyOut`, or None."""

    call_id: int
    lease: Lease
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Configured:
    """The settings that the service wants. Another size takes effect as soon as no lease is left."""

    staging_bytes_max: int
    lease_ns: int


# -- events: engines


@dataclass(frozen=True, slots=True)
class EngineConnected:
    engine: str
    link: int


@dataclass(frozen=True, slots=True)
class EngineDetached:
    """The link has ended; the process may live and may still touch the bytes that it holds."""

    engine: str
    link: int


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The process has ended: it can touch nothing any more."""

    engine: str
    link: int


@dataclass(frozen=True, slots=True)
class FromEngine:
    engine: str
    message: PagesSealed | WriterDone | PagesOpened | StagingMapped


# -- events: what the actor was asked to do


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """The copy that `CopyOut` asked for touches the bytes no more, answered or not."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A fetch from node `node_id` that has ended; `way`: the last one it took. `reason`: what was wrong with it."""

    node_id: str
    way: str
    complete: bool
    num_bytes: int
    busy_ns: int
    asked_again: int = 0  # chunks
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Nothing of this fetch writes any more."""

    fetch_id: int
    measured: Measured


@dataclass(frozen=True, slots=True)
class LinkProbed:
    """The best way to a node, and what it carried. `num_bytes` 0: not measured, for `reason`."""

    node_id: str
    way: str
    round_trip_ns: int = 0
    num_bytes: int = 0
    busy_ns: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StagingMade:
    segment: str
    bytes_max: int


@dataclass(frozen=True, slots=True)
class StagingRefused:
    """The machine has no memory of that size; what there was before stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReportAnswered:
    """The controller has the report; the bytes of `dead` are not needed any more."""

    dead: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The controller is away, and may be a new one when it is back."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Every deadline is kept at the next one."""


Event = (
    LeaseAsked
    | WriterDropped
    | ReadAsked
    | ReaderDropped
    | Released
    | PieceAsked
    | Configured
    | EngineConnected
    | EngineDetached
    | EngineGone
    | FromEngine
    | CopiedOut
    | FetchEnded
    | LinkProbed
    | StagingMade
    | StagingRefused
    | ReportAnswered
    | ReportFailed
    | Tick
)

# -- effects


@dataclass(frozen=True, slots=True)
class Answer:
    """Ends the call. Every call is answered exactly once (a `PieceAsked` by `CopyOut` or by None)."""

    call_id: int
    value: Lease | Verdict | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Ends the call with a `StagingError`: this can never be had here."""

    call_id: int
    message: str


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copies these staging bytes and answers the call with them; then `CopiedOut`, whatever became of the call."""

    call_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StopCopy:
    """The copy is not wanted any more; `CopiedOut` still tells when it reads no more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Brings the bytes of `source` to `offset` of this node's staging; then `FetchEnded`."""

    fetch_id: int
    source: Lease
    offset: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """The fetch is not waited for any more; `FetchEnded` still says when it writes no more."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Gives the engine the staging memory's descriptor. It has to let go of `revoked`.

    Its answer is `StagingMapped`; it gets no bytes before."""

    engine: str
    link: int
    revoked: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class MakeStaging:
    """Replaces the staging memory, which is not in use, by one of this size; then `StagingMade` or `StagingRefused`."""

    bytes_max: int


@dataclass(frozen=True, slots=True)
class Report:
    """To the controller; then `ReportAnswered` or `ReportFailed`. One at a time."""

    status: StagingStatus
    events: tuple[TransferEvent, ...]


Effect = Answer | Refuse | CopyOut | StopCopy | StartFetch | StopFetch | Welcome | MakeStaging | Report
