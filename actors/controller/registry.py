"""Who holds what: replicas, nodes, live tickets with their seals and leases, and the tagged pages of every request.

Pure bookkeeping. Every change goes through a method here, so that the conservation laws in `breaches` are about one
file. Nothing in here decides anything.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

from actors.controller.journal import RecentDict, Tracked, TrackedDict, TrackedList, TrackedSet
from actors.controller.page_book import PageBook
from actors.controller.ticket_state import HOLDS_LEASE, TicketEvent, TicketState, step
from actors.messages import (
    AdmitRequest,
    Announcement,
    FrontendCommand,
    HandOver,
    Occupancy,
    Outcome,
    ReplicaId,
    Role,
    StagingStatus,
    Ticket,
    TicketId,
)
from kernels.layout import PageLayout

EPOCH_SHIFT: Final = 32  # ticket_id = epoch << 32 | counter: unique over restarts, fits a signed 64-bit integer
ENDED_REMEMBERED: Final = 20_000
SLOTS_UNKNOWN: Final = 1 << 30
# States in which the ticket's pages are (being) taken on decode, so that its heartbeat counts them.
LANDED: Final = frozenset({TicketState.MOVING, TicketState.VERIFIED, TicketState.RECOMPUTING, TicketState.DECODING})
PREFILL_WORK: Final = frozenset({TicketState.ADMITTED, TicketState.PREFILLING})


def epoch_of(ticket_id: TicketId) -> int:
    return ticket_id >> EPOCH_SHIFT


@dataclass(slots=True)
class Replica(Tracked):
    announcement: Announcement
    joined_ns: int
    heard_ns: int
    occupancy: Occupancy
    ready_ns: int = 0  # its first heartbeat that showed it idle or working; 0: none yet
    draining_since_ns: int = 0
    leaves_by_ns: int = 0  # what still runs here then is taken elsewhere; 0: it may take its time
    fenced: bool = False
    stale: bool = False
    reserved: int = 0  # blocks of all tickets placed here (decode)
    landed: int = 0  # of these, blocks of tickets whose pages the heartbeat counts
    unexplained: int = 0  # blocks held that no ticket here explains, at the last heartbeat
    inflight_tokens: int = 0  # prompt tokens of tickets that prefill here
    tickets: TrackedSet[TicketId] = field(default_factory=TrackedSet)
    slots_taken: int = 0  # sequences of all tickets placed here (decode)
    variance: float = 0.0  # of `reserved`, blocks squared
    sealed_ns: int = 0  # when it had sealed a prompt last (prefill)
    # Expected ends of tickets that decode here, sorted: (end, ticket, blocks then, blocks a second until then, slots).
    ends: TrackedList[tuple[int, TicketId, int, float, int]] = field(default_factory=TrackedList)
    cancel: TrackedDict[tuple[TicketId, int], int] = field(default_factory=TrackedDict)  # to tell; how often still
    counters: TrackedDict[str, float] = field(default_factory=TrackedDict)
    book: PageBook = field(default_factory=PageBook)
    held_alone_ns: int = 0  # since when it holds blocks and has no ticket
    page_violations: tuple[str, ...] = ()  # of its last report
    _page_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one wire page of its layout and one rank; read from the layout once, not at every admission."""
        if not self._page_bytes:
            self._page_bytes = PageLayout.from_dict(self.announcement.layout).page_bytes
        return self._page_bytes

    @property
    def id(self) -> ReplicaId:
        return self.announcement.replica_id

    @property
    def role(self) -> Role:
        return self.announcement.role

    @property
    def usable(self) -> bool:
        return not (self.stale or self.fenced or self.draining_since_ns)

    @property
    def slots(self) -> int:
        """Sequences that its engine runs at once."""
        return self.announcement.max_num_seqs or SLOTS_UNKNOWN

    @property
    def committed(self) -> int:
        """Blocks that are spoken for: reservations, pages in doubt, and what only the replica knows of."""
        return self.reserved + self.occupancy.blocks_quarantined + self.unexplained


@dataclass(slots=True)
class Node(Tracked):
    """A node's transfer actor as last heard."""

    status: StagingStatus
    heard_ns: int
    release: TrackedDict[tuple[TicketId, int], None] = field(
        default_factory=TrackedDict
    )  # to tell with the next report
    stale: bool = False
    bytes_moved_before: int = 0  # by earlier lives of the transfer actor
    tokens_moved_before: int = 0


@dataclass(slots=True)
class TicketRecord(Tracked):
    """A ticket that has not ended."""

    ticket: Ticket
    request: AdmitRequest
    state: TicketState
    admitted_ns: int
    changed_ns: int
    deadline_ns: int  # of the hand-over
    generation: str = ""
    placed_ns: int = 0
    reserved: int = 0  # blocks on decode at the expected end
    growth: float = 0.0  # blocks a second while it decodes
    slots: int = 1  # sequences on decode
    variance: float = 0.0  # of `reserved`, blocks squared
    staging_bytes: int = 0  # counted on its prefill's node until decode has opened its pages
    ends_ns: int = 0  # expected end
    prefill_tokens: int = 0  # counted on its prefill replica while it has that work
    hit_pages: int = 0  # see `Choice`
    hit_used: int = 0
    num_output_tokens: int = 0  # of all sequences
    hand_over: HandOver | None = None
    wanted_by: int = 0  # call that waits for the hand-over; 0: none
    decode_at: Replica | None = None  # None while it waits for a (new) decode replica
    prefill_at: Replica | None = None  # only while prefill has work for it
    lost: FrontendCommand | None = None  # its frontend was asked to call `lost` for this attempt
    opened: bool = False  # decode has reported on this attempt's pages


class Registry(Tracked):
    def __init__(self) -> None:
        self.replicas: TrackedDict[ReplicaId, Replica] = TrackedDict()
        self.nodes: TrackedDict[str, Node] = TrackedDict()
        self.tickets: TrackedDict[TicketId, TicketRecord] = TrackedDict()
        self.by_request: TrackedDict[tuple[str, str], TicketId] = TrackedDict()  # (frontend, request) -> ticket
        self.by_frontend: TrackedDict[str, TrackedSet[TicketId]] = TrackedDict()
        # Replicas that calls from a frontend find; a frontend that is not in here has not said it.
        self.reachable: TrackedDict[str, frozenset[ReplicaId]] = TrackedDict()
        self.staged: TrackedDict[str, int] = TrackedDict()  # bytes that live tickets have or will have, by node
        self.by_state: TrackedDict[TicketState, int] = TrackedDict(dict.fromkeys(TicketState, 0))
        self.ended: RecentDict[TicketId, Outcome] = RecentDict(ENDED_REMEMBERED)
        self.ended_requests: RecentDict[tuple[str, str], TicketId] = RecentDict(ENDED_REMEMBERED)

    def can_use(self, request: AdmitRequest, replica_id: ReplicaId) -> bool:
        """Whether the request's frontend can call the replica, and it is none that the request avoids."""
        reachable = self.reachable.get(request.frontend_id)
        return replica_id not in request.exclude and (reachable is None or replica_id in reachable)

    # -- tickets

    def open(self, live: TicketRecord) -> None:
        """A new ticket, not placed yet."""
        ticket = live.ticket
        self.tickets[ticket.ticket_id] = live
        self.by_request[(ticket.frontend_id, ticket.request_id)] = ticket.ticket_id
        self.by_frontend.setdefault(ticket.frontend_id, TrackedSet()).add(ticket.ticket_id)
        self.by_state[live.state] += 1

    def attach(self, live: TicketRecord, decode: Replica | None, prefill: Replica | None) -> None:
        live.decode_at = None
        live.prefill_at = prefill if live.state in PREFILL_WORK else None
        ticket_id = live.ticket.ticket_id
        if live.prefill_at is not None:
            live.prefill_at.tickets.add(ticket_id)
            live.prefill_at.inflight_tokens += live.prefill_tokens
        if decode is not None:
            self.attach_decode(live, decode)

    def attach_decode(self, live: TicketRecord, decode: Replica) -> None:
        live.decode_at = decode
        decode.tickets.add(live.ticket.ticket_id)
        decode.reserved += live.reserved
        decode.slots_taken += live.slots
        decode.variance += live.variance
        decode.landed += live.reserved if live.state in LANDED else 0
        insort(decode.ends, (live.ends_ns, live.ticket.ticket_id, live.reserved, live.growth, live.slots))

    def detach(self, live: TicketRecord) -> None:
        """Takes the ticket off its replicas; it stays live and waits for a new place."""
        ticket_id = live.ticket.ticket_id
        self._leave_prefill(live)
        if (decode := live.decode_at) is not None:
            decode.tickets.discard(ticket_id)
            decode.reserved -= live.reserved
            decode.slots_taken -= live.slots
            decode.variance = max(0.0, decode.variance - live.variance) if len(decode.ends) > 1 else 0.0
            decode.landed -= live.reserved if live.state in LANDED else 0
            at = bisect_left(decode.ends, (live.ends_ns, ticket_id, -1, 0.0, 0))
            del decode.ends[at]
            live.decode_at = None

    def stage(self, live: TicketRecord, num_bytes: int) -> None:
        """Its pages will take so many bytes on its prefill's node until decode has opened them."""
        node = live.ticket.prefill_node
        live.staging_bytes = num_bytes
        if num_bytes:
            self.staged[node] = self.staged.get(node, 0) + num_bytes

    def _unstage(self, live: TicketRecord) -> None:
        if live.staging_bytes:
            node, num_bytes = live.ticket.prefill_node, live.staging_bytes
            live.staging_bytes = 0
            self.staged[node] -= num_bytes
            if not self.staged[node]:
                del self.staged[node]

    def _leave_prefill(self, live: TicketRecord) -> None:
        if (prefill := live.prefill_at) is not None:
            prefill.tickets.discard(live.ticket.ticket_id)
            prefill.inflight_tokens -= live.prefill_tokens
            live.prefill_at = None

    def move(self, live: TicketRecord, event: TicketEvent, now_ns: int) -> bool:
        """Takes the event through the ticket table; False when it is absorbed."""
        following, meant = step(live.state, event)
        if meant and following is not live.state:
            if live.decode_at is not None:
                live.decode_at.landed += live.reserved * ((following in LANDED) - (live.state in LANDED))
            self.by_state[live.state] -= 1
            self.by_state[following] += 1
            live.state, live.changed_ns = following, now_ns
            if following not in PREFILL_WORK:
                self._leave_prefill(live)
            if following not in HOLDS_LEASE:
                self.release_lease(live)
        return meant

    def release_lease(self, live: TicketRecord) -> None:
        """Tells the node that holds this attempt's bytes, if we know of one, that no process needs them any more."""
        self._unstage(live)
        if live.hand_over is not None:
            lease = live.hand_over.lease
            if (node := self.nodes.get(lease.node_id)) is not None:
                node.release[(lease.ticket_id, lease.attempt)] = None
            live.hand_over = None

    def close(self, live: TicketRecord, outcome: Outcome, event: TicketEvent, now_ns: int) -> None:
        self.detach(live)
        self.move(live, event, now_ns)
        ticket = live.ticket
        key = (ticket.frontend_id, ticket.request_id)
        self.by_state[live.state] -= 1  # ended tickets are counted by outcome, not kept
        del self.tickets[ticket.ticket_id]
        if self.by_request.get(key) == ticket.ticket_id:
            del self.by_request[key]
        owned = self.by_frontend[ticket.frontend_id]
        owned.discard(ticket.ticket_id)
        if not owned:
            del self.by_frontend[ticket.frontend_id]
        self.ended[ticket.ticket_id] = outcome
        self.ended_requests[key] = ticket.ticket_id

    def reopen(self, ticket_id: TicketId, request: tuple[str, str]) -> None:
        """Forgets that the ticket has ended: it was ended by mistake, and is claimed again."""
        self.ended.pop(ticket_id, None)
        self.ended_requests.pop(request, None)

    def forecast(self, live: TicketRecord, reserved: int, growth: float, ends_ns: int) -> None:
        """A ticket outgrew what was reserved for it, or outlived its expected end."""
        decode, prefill = live.decode_at, live.prefill_at
        self.detach(live)
        live.reserved, live.growth, live.ends_ns = reserved, growth, ends_ns
        self.attach(live, decode, prefill)

    # -- replicas

    def remove(self, replica_id: ReplicaId) -> tuple[list[TicketRecord], list[TicketRecord]]:
        """The replica is gone. Returns the live tickets it was decoding, and those it had prefill work for."""
        replica = self.replicas.pop(replica_id)
        decoding, prefilling = [], []
        for ticket_id in sorted(replica.tickets):
            live = self.tickets[ticket_id]
            if live.decode_at is replica:
                self.detach(live)
                decoding.append(live)
            else:
                self._leave_prefill(live)
                prefilling.append(live)
        return decoding, prefilling

    # -- laws

    def breaches(self) -> list[str]:
        """Broken conservation laws in plain words; empty when all hold."""
        broken: list[str] = []
        sums: dict[int, list[int]] = {id(replica): [0, 0, 0, 0] for replica in self.replicas.values()}
        placed: dict[int, set[TicketId]] = {id(replica): set() for replica in self.replicas.values()}
        states = dict.fromkeys(TicketState, 0)
        for ticket_id, live in self.tickets.items():
            ticket = live.ticket
            states[live.state] += 1
            if self.by_request.get((ticket.frontend_id, ticket.request_id)) != ticket_id:
                broken.append(f"ticket {ticket_id}: request {ticket.request_id!r} does not lead back to it")
            if ticket_id not in self.by_frontend.get(ticket.frontend_id, ()):
                broken.append(f"ticket {ticket_id}: frontend {ticket.frontend_id!r} does not own it")
            if live.hand_over is not None and live.state not in HOLDS_LEASE:
                broken.append(f"ticket {ticket_id} is {live.state} and still holds a lease")
            if live.hand_over is not None and live.hand_over.attempt != ticket.attempt:
                broken.append(
                    f"ticket {ticket_id} has a seal of attempt {live.hand_over.attempt}, not {ticket.attempt}"
                )
            if live.prefill_at is not None and live.state not in PREFILL_WORK:
                broken.append(f"ticket {ticket_id} is {live.state} and still counts as prefill work")
            broken += [
                f"ticket {ticket_id} is placed on {replica.id}, which is gone"
                for replica in (live.decode_at, live.prefill_at)
                if replica is not None and id(replica) not in sums
            ]
            if live.decode_at is not None and (mine := sums.get(id(live.decode_at))) is not None:
                mine[0] += live.reserved
                mine[1] += live.reserved if live.state in LANDED else 0
                mine[3] += live.slots
                placed[id(live.decode_at)].add(ticket_id)
            if live.prefill_at is not None and (mine := sums.get(id(live.prefill_at))) is not None:
                mine[2] += live.prefill_tokens
                placed[id(live.prefill_at)].add(ticket_id)
        for replica in self.replicas.values():
            broken += self._replica_breaches(replica, sums[id(replica)], placed[id(replica)])
        staged: dict[str, int] = {}
        for live in self.tickets.values():
            if live.staging_bytes:
                node = live.ticket.prefill_node
                staged[node] = staged.get(node, 0) + live.staging_bytes
        if staged != self.staged:
            broken.append(f"staging bytes {self.staged} by node, the live tickets add up to {staged}")
        if states != self.by_state:
            broken.append(f"tickets by state {states} are counted as {self.by_state}")
        if len(self.by_request) != len(self.tickets):
            broken.append(f"{len(self.by_request)} requests lead to {len(self.tickets)} tickets")
        return broken

    @staticmethod
    def _replica_breaches(replica: Replica, sums: list[int], placed: set[TicketId]) -> list[str]:
        name, seen = replica.id, replica.occupancy
        have = (replica.reserved, replica.landed, replica.inflight_tokens, replica.slots_taken)
        broken = [
            f"{name}: {what} {mine}, its tickets add up to {theirs}"
            for what, mine, theirs in zip(
                ("reserved blocks", "landed blocks", "in-flight prompt tokens", "sequence slots"),
                have,
                sums,
                strict=True,
            )
            if mine != theirs
        ]
        if replica.tickets != placed:
            broken.append(f"{name}: tickets {sorted(replica.tickets ^ placed)} are on one side only")
        if seen.blocks_free + seen.blocks_held + seen.blocks_quarantined != seen.blocks_total:
            broken.append(
                f"{name}: free {seen.blocks_free} + held {seen.blocks_held} + quarantined "
                f"{seen.blocks_quarantined} != total {seen.blocks_total}"
            )
        broken += [f"{name}: {text}" for text in replica.page_violations]
        return broken + replica.book.breaches(name, seen, replica.announcement.blocks_total)
