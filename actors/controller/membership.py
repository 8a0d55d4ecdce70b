"""Replicas, nodes and frontends that come, report, fall silent and go. Pure."""

from __future__ import annotations

from actors.controller import compatibility
from actors.controller.admission import CANCEL_REPEATS
from actors.controller.events import (
    CallId,
    FrontendGone,
    IncompatibleReplica,
    Log,
    NodesDraining,
    Replace,
    ToFrontend,
)
from actors.controller.forecast import SECOND, blocks_for
from actors.controller.journal import TrackedDict
from actors.controller.page_book import KEPT_NS, PageBook, TagMismatch
from actors.controller.recovery import Recovery
from actors.controller.registry import Node, Replica
from actors.controller.ticket_state import TicketEvent
from actors.controller.tickets import ATTEMPTS_MAX
from actors.messages import (
    CommandKind,
    FrontendCommand,
    FrontendHeartbeat,
    FrontendReply,
    HeartbeatReply,
    Join,
    Occupancy,
    Outcome,
    Overloaded,
    PageDelta,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaHeartbeat,
    ReplicaId,
    ReplicaLeaving,
    ReplicaLeft,
    ReplicaStarting,
    Role,
    TicketId,
)

FORGET_FENCED_NS = 300 * SECOND
NODE_MARGIN_NS = 10 * SECOND  # before a node goes: time for a stream to go on elsewhere


class Membership(Recovery):
    # -- replicas

    def _replica_starting(self, event: ReplicaStarting, call_id: CallId, now_ns: int) -> None:
        if event.replica_id not in self.registry.replicas:
            self.autoscaler.sizes.starting(event.pool, event.replica_id, now_ns)

    def _join(self, event: Join, call_id: CallId, now_ns: int) -> None:
        new = event.announcement
        self._advance_epoch(new.tickets)
        known = self.registry.replicas.get(new.replica_id)
        if (new.replica_id, new.incarnation) in self._left_lives:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=True, draining=True))
            return
        if known is not None and known.announcement.incarnation == new.incarnation:
            self._reply(call_id, self._heartbeat_reply(known))
            return
        try:
            # Pages never cross generations, so that a rolling change may bring another model in beside the old one.
            others = (r for r in self.registry.replicas.values() if not r.fenced and r is not known)
            members = [r.announcement for r in others if r.announcement.generation == new.generation]
            compatibility.check(new, members)
        except IncompatibleReplica as error:
            self._add("replicas_refused")
            self._out.append(Log(str(error)))
            self._reply(call_id, error)
            return
        if known is not None:
            self._drop_replica(known, f"{new.replica_id} has restarted", now_ns)
        idle = Occupancy(blocks_total=new.blocks_total, blocks_free=new.blocks_total, blocks_held=0)
        book = PageBook.of(new, tagged=self.spec.integrity.mode == "check")
        replica = Replica(new, now_ns, now_ns, idle, book=book)
        self.registry.replicas[new.replica_id] = replica
        for ticket_id in sorted(self._orphaned_by_replica.pop(new.replica_id, ())):
            live = self.registry.tickets.get(ticket_id)
            if live is not None and live.decode_at is None and live.lost is None:
                self.registry.attach_decode(live, replica)
        for ticket_id in new.tickets:
            if ticket_id not in self.registry.tickets and not self._unclaimed(ticket_id, now_ns):
                replica.cancel[(ticket_id, ATTEMPTS_MAX)] = CANCEL_REPEATS
        self._out.append(Log(f"{new.role} replica {new.replica_id} joined with {new.blocks_total} blocks"))
        self.autoscaler.sizes.joined(new.role, new.replica_id, now_ns)
        self._leave_going_node(replica, now_ns)
        self.selector.refresh(replica)
        self._reply(call_id, self._heartbeat_reply(replica))
        self._drain_queue(now_ns)

    def _replica_heartbeat(self, event: ReplicaHeartbeat, call_id: CallId, now_ns: int) -> None:
        beat, replica = event, self.registry.replicas.get(event.replica_id)
        if (beat.replica_id, beat.incarnation) in self._left_lives:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=True, draining=True))
            return
        if replica is None or replica.announcement.incarnation != beat.incarnation:
            self._reply(call_id, HeartbeatReply(epoch=self.epoch, known=False))
            return
        if replica.fenced:
            self._reply(call_id, self._heartbeat_reply(replica))
            return
        replica.heard_ns = now_ns
        replica.ready_ns = replica.ready_ns or now_ns
        replica.stale = False
        replica.occupancy = beat.occupancy
        replica.counters.update(beat.counters)
        released = {thing.ticket_id for thing in beat.events if thing.kind == ReplicaEventKind.RELEASED}
        for thing in beat.events:
            self._attempt(self._replica_event, replica, thing, thing.ticket_id in released, now_ns)
        if beat.pages_whole:
            replica.book = PageBook(replica.book.epoch)
        self._check_pages(replica, beat.pages, now_ns)
        replica.unexplained = max(0, beat.occupancy.blocks_held - replica.landed)
        self._extend_overdue(replica, now_ns)
        self.selector.refresh(replica)
        self._reply(call_id, self._heartbeat_reply(replica))
        self._drain_queue(now_ns)

    def _heartbeat_reply(self, replica: Replica) -> HeartbeatReply:
        cancel = tuple(replica.cancel)
        replica.cancel = TrackedDict({key: left - 1 for key, left in replica.cancel.items() if left > 1})
        return HeartbeatReply(
            epoch=self.epoch,
            known=True,
            draining=bool(replica.draining_since_ns),
            fenced=replica.fenced,
            cancel=cancel,
        )

    def _replica_event(self, replica: Replica, thing: ReplicaEvent, gone: bool, now_ns: int) -> None:
        """`gone`: the same report says that the replica has released the ticket."""
        if thing.kind == ReplicaEventKind.TAG_MISMATCH:
            self._tag_mismatch(replica, thing, now_ns)
            return
        if thing.kind in (ReplicaEventKind.RECOMPUTED, ReplicaEventKind.QUARANTINED):
            self._add(f"{thing.kind}_events")
            self._add(f"{thing.kind}_tokens", thing.num_tokens)
            return
        if thing.kind == ReplicaEventKind.PROMPT_COMPUTED:
            known = self.registry.tickets.get(thing.ticket_id)
            if known is not None and replica.id == (known.ticket.prefill or known.ticket.decode):
                self.selector.prompt_computed(replica, known.hit_pages, known.hit_used, thing.num_tokens)
            return
        if thing.kind not in (ReplicaEventKind.PREFILL_STARTED, ReplicaEventKind.DECODE_STARTED):
            return
        prefill = thing.kind == ReplicaEventKind.PREFILL_STARTED
        live = self.registry.tickets.get(thing.ticket_id)
        if live is None:
            if not gone and not self._unclaimed(thing.ticket_id, now_ns):
                # A call that came late or twice started it again, and no caller waits for it.
                replica.cancel[(thing.ticket_id, ATTEMPTS_MAX)] = CANCEL_REPEATS
        elif (live.prefill_at if prefill else live.decode_at) is replica:
            self.registry.move(live, TicketEvent.PREFILL_STARTED if prefill else TicketEvent.DECODE_STARTED, now_ns)
        elif not gone and (live.ticket.prefill if prefill else live.ticket.decode) != replica.id:
            replica.cancel[(thing.ticket_id, live.ticket.attempt - 1)] = CANCEL_REPEATS

    def _check_pages(self, replica: Replica, pages: tuple[PageDelta, ...], now_ns: int) -> None:
        """What the report says of pages, and what has not been reported for too long: logged once, kept for audits."""
        total = replica.announcement.blocks_total
        violations = [text for delta in pages for text in replica.book.apply(delta, total, self._prompt_hash)]
        violations += replica.book.look(lambda t: t in self.registry.tickets or self._unclaimed(t, now_ns), now_ns)
        held, tickets = replica.occupancy.blocks_held, replica.tickets
        replica.held_alone_ns = (replica.held_alone_ns or now_ns) if held and not tickets else 0
        if replica.held_alone_ns and now_ns - replica.held_alone_ns >= KEPT_NS:
            violations.append(f"{held} blocks are held and no ticket is there")
        for text in violations:
            if text not in replica.page_violations:
                self._add("page_book_violations")
                self._out.append(Log(f"{replica.id}: {text}", is_error=True))
        replica.page_violations = tuple(violations)

    def _prompt_hash(self, ticket_id: TicketId, position: int) -> int:
        """Of a live ticket's prompt up to the end of its page at `position`, as its frontend said; 0: not known."""
        live = self.registry.tickets.get(ticket_id)
        hashes = live.request.prefix_hashes if live is not None else ()
        return hashes[position] if position < len(hashes) else 0

    def _tag_mismatch(self, replica: Replica, thing: ReplicaEvent, now_ns: int) -> None:
        """The engine has ended the request already; here it is counted, and held against what the book knows."""
        self._add("tag_mismatch_events")
        known = replica.book.at(thing.request_id, thing.position)
        mismatch = TagMismatch(now_ns, replica.id, replica.role, thing.request_id, thing.ticket_id, thing.detail, known)
        self.mismatches.append(mismatch)
        self._out.append(Log(str(mismatch)))

    def _extend_overdue(self, replica: Replica, now_ns: int) -> None:
        """Tickets that outlived their expected end get a new one, half as long again, and more blocks to grow into."""
        limit = int(replica.announcement.blocks_total * self.spec.admission.occupancy_limit)
        while replica.ends and replica.ends[0][0] <= now_ns:
            live = self.registry.tickets[replica.ends[0][1]]
            longer = max(SECOND, (now_ns - live.admitted_ns) // 2)
            request = live.request
            most = blocks_for(
                request, request.max_tokens, replica.announcement.block_tokens, min(live.slots, request.num_sequences)
            )
            grown = live.reserved + int(live.growth * longer / SECOND) + 1
            reserved = max(live.reserved, min(grown, most, limit))
            growth = (reserved - live.reserved) * SECOND / longer  # from what it has now to what it may have then
            self.registry.forecast(live, reserved, growth, now_ns + longer)

    def _replica_leaving(self, event: ReplicaLeaving, call_id: CallId, now_ns: int) -> None:
        replica = self.registry.replicas.get(event.replica_id)
        if replica is not None:
            self._begin_leaving(replica, "is leaving", now_ns)

    def _begin_leaving(self, replica: Replica, why: str, now_ns: int) -> None:
        if not replica.draining_since_ns:
            replica.draining_since_ns = now_ns
            self.selector.refresh(replica)
            self._out.append(Log(f"{replica.id} {why} with {len(replica.tickets)} tickets"))

    def _nodes_draining(self, event: NodesDraining, call_id: CallId, now_ns: int) -> None:
        for node_id, seconds in event.seconds_left.items():
            by_ns = 0 if seconds is None else max(now_ns, now_ns + int(seconds * SECOND) - NODE_MARGIN_NS)
            self._going_nodes[node_id] = by_ns
        for replica in self.registry.replicas.values():
            self._leave_going_node(replica, now_ns)

    def _leave_going_node(self, replica: Replica, now_ns: int) -> None:
        """A replica on a node that is about to go gets no new tickets, also before the platform has another one."""
        by_ns = self._going_nodes.get(replica.announcement.node_id)
        if by_ns is not None and not replica.fenced:
            replica.leaves_by_ns = by_ns
            self._begin_leaving(replica, "is on a node that is about to go, and leaves", now_ns)

    def _replica_left(self, event: ReplicaLeft, call_id: CallId, now_ns: int) -> None:
        replica = self.registry.replicas.get(event.replica_id)
        if replica is not None and event.incarnation in (None, replica.announcement.incarnation):
            self._left_lives[(replica.id, replica.announcement.incarnation)] = None
            if event.lost and not replica.fenced:
                self._add(f"engines_{event.lost}_{replica.role}")
            self._drop_replica(replica, f"{replica.id} {event.why}", now_ns)

    def _drop_replica(self, replica: Replica, reason: str, now_ns: int, keep: bool = False) -> None:
        """Its tickets are lost there; `keep` leaves a fenced record behind, for its heartbeats and for `status`."""
        died = keep or not replica.draining_since_ns
        decoding, prefilling = self.registry.remove(replica.id)
        self.selector.forget(replica)
        for live in decoding:
            self._tell_lost(live, Role.DECODE, replica.id, reason, now_ns, died)
        for live in prefilling:
            self._tell_lost(live, Role.PREFILL, replica.id, reason, now_ns, died)
        if keep:
            self.registry.replicas[replica.id] = replica
        self._out.append(Log(f"{reason}: {len(decoding) + len(prefilling)} tickets go elsewhere"))

    def _watch(self, replica: Replica, now_ns: int) -> None:
        silent = now_ns - replica.heard_ns
        if replica.fenced:
            if silent >= FORGET_FENCED_NS:
                del self.registry.replicas[replica.id]
            return
        if silent >= self._fence_ns:
            replica.fenced = True
            self._add(f"engines_silent_{replica.role}")
            self._drop_replica(replica, f"{replica.id} has been silent for {silent / SECOND:.1f} s", now_ns, keep=True)
            self._out.append(Replace("replica", replica.id))
            return
        if silent >= self._stale_ns and not replica.stale:
            replica.stale = True
            self.selector.refresh(replica)
        since, by_ns = replica.draining_since_ns, replica.leaves_by_ns
        if since and ((by_ns and now_ns >= by_ns) or (self._drain_ns is not None and now_ns - since >= self._drain_ns)):
            for ticket_id in sorted(replica.tickets):
                live = self.registry.tickets[ticket_id]
                if live.lost is None:
                    self._order(CommandKind.MOVE, live, replica.role, replica.id, f"{replica.id} is leaving", now_ns)

    def _watch_node(self, node: Node, now_ns: int) -> None:
        if not node.stale and now_ns - node.heard_ns >= self._fence_ns:
            node.stale = True
            self._node_lost(node, f"the transfer actor of {node.status.node_id} is silent", now_ns)
            self._out.append(Replace("transfer", node.status.node_id))

    # -- frontends

    def _frontend_heartbeat(self, event: FrontendHeartbeat, call_id: CallId, now_ns: int) -> None:
        self.frontends[event.frontend_id] = now_ns
        is_news = self._note_reachable(event)
        self.stalls.note(event.frontend_id, event.stall_s, now_ns)
        known = True
        self._advance_epoch(event.live_tickets)
        for ticket_id in event.live_tickets:
            if ticket_id in self.registry.tickets:
                continue
            outcome = self.registry.ended.get(ticket_id)
            if self._unclaimed(ticket_id, now_ns):
                known = False
            elif (ticket := self._presumed_dead.get(ticket_id)) is not None:  # a false alarm: it may go on elsewhere
                reason = "no process claimed it for too long"
                order = FrontendCommand(
                    kind=CommandKind.LOST,
                    ticket_id=ticket_id,
                    attempt=ticket.attempt,
                    replica_id=ticket.decode,
                    reason=reason,
                )
                self._out.append(ToFrontend(event.frontend_id, order))
            elif outcome is not Outcome.DONE:  # a frontend that has finished it knows that by itself
                reason = f"the controller has {outcome} it" if outcome else "the controller does not know it"
                order = FrontendCommand(
                    kind=CommandKind.CANCELLED, ticket_id=ticket_id, attempt=ATTEMPTS_MAX, reason=reason
                )
                self._out.append(ToFrontend(event.frontend_id, order))
        for ticket_id in sorted(self.registry.by_frontend.get(event.frontend_id, set()).difference(event.live_tickets)):
            live = self.registry.tickets[ticket_id]
            # Said after a reply that was given long after the ticket was: it is unknown there, its grant lost.
            # (A heartbeat that was under way for long itself proves nothing.)
            if (
                now_ns >= event.stamp
                and event.stamp - max(live.admitted_ns, live.changed_ns) >= self._stale_ns
                and not self._waits(live)
            ):
                self._add("unclaimed_tickets")
                self._suspect(live.ticket)
                self._close(live, Outcome.CANCELLED, now_ns)
        self._reply(call_id, FrontendReply(epoch=self.epoch, known=known, stamp=now_ns))
        if is_news:
            self._full = None
            self._drain_queue(now_ns)

    def _note_reachable(self, event: FrontendHeartbeat) -> bool:
        """True: what its requests may use has changed. A replica joins before Serve tells the frontends of it."""
        before: frozenset[ReplicaId] | None = self.registry.reachable.pop(event.frontend_id, None)
        now = None if event.reachable is None else frozenset(event.reachable)
        if now is not None:
            self.registry.reachable[event.frontend_id] = now
        return now != before

    def _frontend_gone(self, event: FrontendGone, call_id: CallId, now_ns: int) -> None:
        self._frontend_silent(event.frontend_id, "is gone", now_ns)

    def _frontend_silent(self, frontend_id: str, why: str, now_ns: int) -> None:
        self.frontends.pop(frontend_id, None)
        self.registry.reachable.pop(frontend_id, None)
        self.stalls.forget(frontend_id)
        tickets = sorted(self.registry.by_frontend.get(frontend_id, ()))
        for waiting in [w for w in self.queue if w.request.frontend_id == frontend_id]:
            self.queue.drop(waiting.call_id)  # all of them first: a place given back now goes to another request
            self._answer(waiting, Overloaded(reason=f"frontend {frontend_id} {why}", retry_after_s=1))
        for ticket_id in tickets:
            live = self.registry.tickets[ticket_id]
            self._suspect(live.ticket)
            self._close(live, Outcome.CANCELLED, now_ns)
        self._out.append(Log(f"frontend {frontend_id} {why}: {len(tickets)} tickets cancelled"))
