"""The values that cross processes. Frozen, typed, and checked when they are decoded.

Every message between a frontend, the controller, a replica and a transfer actor is built from these. They are
msgspec structs: over Ray they travel as Python objects, over a socket as MessagePack that is decoded against the
declared types, so bytes from a peer are never unpickled and never trusted for their shape.

Time is an integer in nanoseconds. `*_ns` values named `deadline` or `expires` are on the clock of the process that
made them and are compared only there; what crosses a process is a duration.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from cluster.spec import ClusterSpec

TicketId = int
ReplicaId = str
T = TypeVar("T")

# `stop_reason` of the last output of a request whose block table named a page that is not its own (`finish_reason`
# is ERROR), so that a frontend can tell it from every other error.
PAGE_INTEGRITY = "page_integrity"


class Request(msgspec.Struct, Generic[T], frozen=True):
    """A message to the controller, answered with a `T`. Each may be sent again when its answer was lost."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Verdict(StrEnum):
    """What opening one page found. Each has a counter of its own."""

    OK = "ok"
    MISMATCH = "mismatch"  # bytes and proof differ
    MISSING = "missing"  # bytes or proof never came
    STALE = "stale"  # of an older attempt, epoch, or a ticket that has ended
    WRONG_LAYOUT = "wrong_layout"  # sealed for another page layout


class Outcome(StrEnum):
    """How a request ended; exactly one a request."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What two replicas must share before one may read the other's pages.

    Names and weight formats are absent on purpose: an FP8 prefill and an INT4 decode of one model are a pair.
    `geometry` is human-readable so that a refusal can show both sides; `tokenizer` is a SHA-256 over the tokenizer
    files; `layout` is the wire layout's fingerprint as announced by decode (empty on prefill, which converts).
    """

    geometry: dict[str, Any]
    tokenizer: str


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load at one moment. `blocks_free + blocks_held + blocks_quarantined == blocks_total`."""

    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_quarantined: int = 0
    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0  # prompt tokens admitted to the engine and not computed yet
    tokens_per_s: float = 0.0


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself when it joins, and again to a controller that has come back."""

    replica_id: ReplicaId
    role: Role
    node_id: str
    incarnation: int  # unique to this life of the replica process; a restart announces another one
    fingerprint: Fingerprint
    layout: dict[str, Any]  # kernels.layout.PageLayout.to_dict() of this replica's KV cache
    block_tokens: int
    blocks_total: int
    max_model_len: int
    max_num_seqs: int = 0  # sequences that the engine runs at once; 0: not said
    engine: dict[str, Any] = {}  # facts for `status` and `plan --check`: kv_cache_bytes, weights_bytes, pid, ...
    generation: str = ""  # of the model's weights; pages move, and streams resume, only inside one generation
    tickets: tuple[TicketId, ...] = ()  # live here, for a controller that rebuilds its registry


class AdmitRequest(Request["Ticket | Overloaded"], frozen=True, kw_only=True):
    """Asks for a ticket; waits in the queue when there is no room. The same request asked twice gets the same ticket.

    It says what the controller needs to know of a request. No token ids: only sizes, hashes and wishes.
    """

    request_id: str
    frontend_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int = 1
    disaggregate: bool = True  # False: a form that decode must serve alone (prompt_logprobs, pooling, ...)
    prefix_hashes: tuple[int, ...] = ()  # chained hashes of the prompt's full pages, first page first
    session: str = ""
    tenant: str = ""
    priority: int = 0
    exclude: tuple[ReplicaId, ...] = ()  # replicas that this request has seen die or fail
    num_output_tokens: int = 0  # already emitted, when the request is resumed
    patience_s: float = 0.0  # the client gives up after this, from now on; 0: not known
    tokenizer: str = ""  # whose token ids these are, see `Fingerprint`; "": any
    alone: bool = False  # engines have ended with it: only on a replica that has no other request
    trace: str = ""  # W3C traceparent of its span; "": not sampled


class Rate(msgspec.Struct, frozen=True):
    """One limit of a tenant: what is left of it now, and the seconds until it is whole again."""

    limit: int
    remaining: int
    reset_s: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's limits by the minute, for the headers of its answers; None: it has no such limit."""

    requests: Rate | None = None
    tokens: Rate | None = None


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-over as admitted. A retry has the same `ticket_id` and a higher `attempt`."""

    ticket_id: TicketId
    attempt: int
    request_id: str
    frontend_id: str
    epoch: int  # of the controller that issued it
    decode: ReplicaId
    prefill: ReplicaId | None = None  # None: decode computes the prompt itself
    reason: str = ""  # why these replicas, in plain words
    wire_layout: dict[str, Any] = {}  # decode's page layout: what prefill converts to
    prefill_node: str = ""
    decode_node: str = ""
    num_prompt_tokens: int = 0
    deadline_s: float = 0.0  # for the hand-over, from admission to pages opened
    alone: bool = False  # no other request is on that decode replica, as `AdmitRequest.alone` asks for
    trace: str = ""  # of `AdmitRequest`
    rates: Rates | None = None  # when it was issued


class Overloaded(msgspec.Struct, frozen=True, kw_only=True):
    """No room and the queue is full, or the wait ran out. The client gets 429 with Retry-After."""

    reason: str
    retry_after_s: float
    limit: str = ""  # of the tenant: requests, tokens or kv_tokens; "": the service has no room
    rates: Rates | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Staging bytes held for one ticket and attempt in the memory of one node."""

    ticket_id: TicketId
    attempt: int
    node_id: str
    segment: str  # which staging memory: another one in each life of the node's transfer actor, and after a resize
    offset: int
    num_bytes: int


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill promises for a ticket: for page `i` of the prompt the 64-bit digest `digests[shard][i]`.

    The digest covers all wire bytes of the page and is bound to ordinal, ticket, attempt and layout
    (kernels.reference has the formula). `num_tokens` may end inside the last page.
    """

    ticket_id: TicketId
    attempt: int
    layout_fingerprint: str
    num_tokens: int
    digests: tuple[tuple[int, ...], ...]  # one tuple a shard


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """What decode needs to open a ticket's pages: the proof from the registry and the place of the bytes."""

    ticket_id: TicketId
    attempt: int
    seal: Seal
    lease: Lease
    deadline_s: float


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What opening found, page verdicts counted; from decode's worker half."""

    ticket_id: TicketId
    attempt: int
    replica_id: ReplicaId
    num_pages: int
    num_bytes: int
    num_tokens: int
    verdicts: dict[Verdict, int]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(count == 0 or verdict is Verdict.OK for verdict, count in self.verdicts.items())


class ReplicaEventKind(StrEnum):
    PREFILL_STARTED = "prefill_started"
    DECODE_STARTED = "decode_started"
    PROMPT_COMPUTED = "prompt_computed"  # `num_tokens` of it were in the engine's prefix cache
    RELEASED = "released"
    RECOMPUTED = "recomputed"  # decode computed `num_tokens` whose pages it could not get
    QUARANTINED = "quarantined"
    TAG_MISMATCH = "tag_mismatch"


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a request in an engine; batched per tick to the controller."""

    kind: ReplicaEventKind
    ticket_id: TicketId = 0
    request_id: str = ""
    num_tokens: int = 0
    detail: str = ""
    position: int = -1  # tag_mismatch: the request's first wrong position in its block table


class PageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that a request took (`added`: page id -> tag, 0 without tags) or gave back, since the last report.

    `added` is in the order of the request's positions. A report says first who has given everything back.
    """

    request_id: str
    added: dict[int, int] = {}
    released: bool = False
    ticket_id: TicketId = 0  # 0: not known


class ReplicaHeartbeat(Request["HeartbeatReply"], frozen=True, kw_only=True):
    """A replica's load, and what has happened there since the last one. Several times a second."""

    replica_id: ReplicaId
    incarnation: int
    occupancy: Occupancy
    events: tuple[ReplicaEvent, ...] = ()
    pages: tuple[PageDelta, ...] = ()  # what does not fit comes with the next heartbeats
    pages_whole: bool = False  # `pages` begins the replica's whole page state anew
    counters: dict[str, float] = {}  # running totals: integrity rows and pages checked, bytes sealed, ...


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """`known` False asks the replica to announce itself again (the controller is new, or had fenced it)."""

    epoch: int
    known: bool
    draining: bool = False
    fenced: bool = False
    cancel: tuple[tuple[TicketId, int], ...] = ()  # (ticket_id, attempt): abort that and earlier attempts; idempotent


class CommandKind(StrEnum):
    LOST = "lost"  # that replica is gone for this attempt: send `ReplicaLost`
    MOVE = "move"  # the same, because the replica is leaving; what it has streamed is good
    CANCELLED = "cancelled"  # the controller has given the ticket up


class FrontendCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller asks of a frontend about one of its tickets."""

    kind: CommandKind
    ticket_id: TicketId
    attempt: int
    role: Role = Role.DECODE
    replica_id: ReplicaId = ""
    reason: str = ""
    died: bool = False  # that replica's engine has ended with the ticket's request in it


class FrontendReply(msgspec.Struct, frozen=True, kw_only=True):
    """`known` False asks for `Adopt` with a `Claim` for every live ticket: the controller is a new one."""

    epoch: int
    known: bool = True
    orders: tuple[FrontendCommand, ...] = ()
    stamp: int = 0  # of the controller; the next heartbeat gives it back, so that it says what came before what


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A live ticket as its frontend knows it, for a controller that has come back and rebuilds its registry."""

    ticket: Ticket
    request: AdmitRequest
    num_output_tokens: int = 0
    decoding: bool = False  # decode has it: its pages are open, or it computes the prompt itself


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    pool: Role
    current: int
    target: int
    reason: str
    hold_until_ns: int = 0


class Sealed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every page of a ticket is in staging under `lease`, and this is its proof. Transfer actor to controller."""

    seal: Seal
    lease: Lease


class OpenedAt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A decode worker half has opened (or refused) a ticket's pages. Transfer actor to controller."""

    opened: Opened


class LeaseLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A lease ended without its reader: expired, or the writing engine died before it sealed."""

    ticket_id: TicketId
    attempt: int
    reason: str


TransferEvent = Sealed | OpenedAt | LeaseLost


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill's answer for a ticket: the prompt is computed and every page is on its way to being sealed."""

    ticket_id: TicketId
    attempt: int
    num_tokens: int
    num_cached_tokens: int  # of the prompt, found in prefill's own prefix cache
    seconds: float
    # The token after the prompt, `EngineCoreOutputs` as MessagePack frames; ended only where the request ends with it.
    output: list[bytes] = []


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How bytes of node `node_id` come to the node that reports this."""

    node_id: str
    way: str  # direct or objects; "": none has worked yet
    bytes_per_s: int  # measured; 0: not yet
    round_trip_s: float
    queued_bytes: int  # wanted from there and not here yet
    fetches: int = 0
    failed: int = 0
    chunks_again: int = 0  # asked for a second time, after a stream had broken
    reason: str = ""  # of the latest failure


class StagingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer actor's report to the controller, with its events."""

    node_id: str
    incarnation: int
    bytes_held: int
    bytes_max: int
    leases: int
    held: tuple[tuple[TicketId, int], ...] = ()  # (ticket_id, attempt) of every lease not released yet
    bytes_moved: int = 0  # wire bytes opened by decode, running total
    tokens_moved: int = 0
    breaches: tuple[str, ...] = ()
    links: tuple[LinkStatus, ...] = ()


# -- to the controller, from replicas (see also `ReplicaHeartbeat`)


class Join(Request[HeartbeatReply], frozen=True):
    """A replica is there, or tells a controller that has come back. Raises `IncompatibleReplica` at the caller."""

    announcement: Announcement


class ReplicaStarting(Request[None], frozen=True):
    """A replica's process is there and loads its engine; said again every few seconds until it joins."""

    replica_id: ReplicaId
    pool: Role


class ReplicaLeft(Request[None], frozen=True):
    """A replica says goodbye, or the platform says that its process is gone.

    `lost`: its engine has "died" or "hung"; "": it leaves in order.
    """

    replica_id: ReplicaId
    incarnation: int | None = None  # None: whichever
    why: str = "has left"
    lost: str = ""


# -- to the controller, from transfer actors


class TransferReport(Request[list[tuple[TicketId, int]]], frozen=True):
    """A node's staging and what happened there. Answered with (ticket_id, attempt) of leases to release.

    At least once: a report that failed is repeated.
    """

    status: StagingStatus
    events: tuple[TransferEvent, ...] = ()


# -- to the controller, from frontends (see also `AdmitRequest`)


class FrontendHeartbeat(Request[FrontendReply], frozen=True):
    """Which tickets live there. `stamp`: of the last reply; with 0 a grant lost on its way is not noticed.

    `reachable`: replicas of both pools that calls from there find now; its requests get no others. None: not said.
    `stall_s`: the longest that its event loop stood still since the heartbeat before.
    """

    frontend_id: str
    live_tickets: tuple[TicketId, ...] = ()
    stamp: int = 0
    reachable: tuple[ReplicaId, ...] | None = None
    stall_s: float = 0.0


class Adopt(Request[None], frozen=True):
    frontend_id: str
    claims: tuple[Claim, ...]


class Configure(Request[None], frozen=True):
    """The configuration of a frontend; what is decided from now on follows it."""

    spec: ClusterSpec
    deployment: int = 0  # of the application; a lower one than the last is of a replica that is being replaced


class ReplicaLeaving(Request[None], frozen=True):
    """The router saw that Serve is stopping this replica: no new tickets."""

    replica_id: ReplicaId


class WaitForHandOver(Request[HandOver | Verdict], frozen=True):
    """Waits for the seal. MISSING: it did not come, send `ReplicaLost`. STALE: of an old attempt or an ended ticket."""

    ticket_id: TicketId
    attempt: int
    timeout_s: float


class ReplicaLost(Request[Ticket | Overloaded], frozen=True, kw_only=True):
    """Asks for the ticket's next attempt on other replicas. `Overloaded`: it has failed, tell the client why."""

    ticket_id: TicketId
    attempt: int
    role: Role
    replica_id: ReplicaId
    reason: str
    num_output_tokens: int = 0  # emitted so far, of all sequences
    request: AdmitRequest | None = None  # for a controller that has come back and does not know the ticket
    page_integrity: bool = False  # the replica lives: it ended the request because a page was not its own


class Ended(Request[None], frozen=True):
    ticket_id: TicketId
    outcome: Outcome
    num_output_tokens: int = 0  # of all sequences


# -- to the controller, from the platform and from people


class PlatformSize(Request[int | None], frozen=True):
    """The platform says what it holds of a pool. Answered with what it should hold, or None: as it is."""

    pool: Role
    current: int  # running replicas
    target: int


class SetTarget(Request[str], frozen=True):
    """A person sets a pool's size, in every mode. Answered with "", or why not."""

    pool: Role
    target: int
    hold_s: float = 0.0  # no decision about this pool for so long
