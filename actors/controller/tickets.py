"""A ticket from its hand-over to its end: seals, what opening found, losses. Pure."""

from __future__ import annotations

from bisect import insort

import msgspec

from actors.controller.admission import ALONE_AFTER, CANCEL_REPEATS, Admission
from actors.controller.events import (
    CallId,
)
from actors.controller.forecast import SECOND
from actors.controller.journal import TrackedSet
from actors.controller.registry import LANDED, Node, TicketRecord
from actors.controller.ticket_state import HOLDS_LEASE, TicketEvent, TicketState
from actors.messages import (
    Ended,
    HandOver,
    LeaseLost,
    OpenedAt,
    Outcome,
    Overloaded,
    ReplicaLost,
    Role,
    Sealed,
    TicketId,
    TransferEvent,
    TransferReport,
    Verdict,
    WaitForHandOver,
)

ATTEMPTS_MAX = 8  # then the request fails with a clear reason


class Tickets(Admission):
    # -- hand-over

    def _wait_for_hand_over(self, event: WaitForHandOver, call_id: CallId, now_ns: int) -> None:
        self._advance_epoch((event.ticket_id,))
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            if not self._unclaimed(event.ticket_id, now_ns):
                self._reply(call_id, Verdict.STALE)
                return
            sealed = self._seals.get(event.ticket_id)
            if sealed is not None and sealed.seal.attempt == event.attempt:
                self._reply(call_id, self._hand_over(sealed, self._hand_over_ns))
                return
            if (former := self._early.get(event.ticket_id)) is not None:
                self._reply(former[0], Verdict.STALE)
            self._early[event.ticket_id] = (call_id, event.attempt)
        elif event.attempt != live.ticket.attempt or live.state in LANDED - {TicketState.MOVING}:
            self._reply(call_id, Verdict.STALE)
            return
        elif live.lost is not None and live.hand_over is None:
            self._reply(call_id, Verdict.MISSING)
            return
        else:
            if live.wanted_by:
                self._reply(live.wanted_by, Verdict.STALE)
            live.wanted_by = call_id
            if live.hand_over is not None:
                self._give_hand_over(live, now_ns)
                return
        insort(self._deadlines, (now_ns + int(event.timeout_s * SECOND), call_id, event.ticket_id))

    def _give_hand_over(self, live: TicketRecord, now_ns: int) -> None:
        assert live.hand_over is not None
        call_id, live.wanted_by = live.wanted_by, 0
        remaining = max(SECOND, live.deadline_ns - now_ns)
        self.registry.move(live, TicketEvent.MOVE, now_ns)
        self._reply(call_id, msgspec.structs.replace(live.hand_over, deadline_s=remaining / SECOND))

    @staticmethod
    def _hand_over(sealed: Sealed, remaining_ns: int) -> HandOver:
        seal, lease = sealed.seal, sealed.lease
        return HandOver(
            ticket_id=seal.ticket_id, attempt=seal.attempt, seal=seal, lease=lease, deadline_s=remaining_ns / SECOND
        )

    def _hand_over_late(self, call_id: CallId, ticket_id: TicketId) -> None:
        live = self.registry.tickets.get(ticket_id)
        if live is not None and live.wanted_by == call_id:
            live.wanted_by = 0
            self._add("hand_over_late")
            self._reply(call_id, Verdict.MISSING)
        elif self._early.get(ticket_id, (0, 0))[0] == call_id:
            del self._early[ticket_id]
            self._reply(call_id, Verdict.MISSING)

    # -- what transfer actors report

    def _transfer_report(self, event: TransferReport, call_id: CallId, now_ns: int) -> None:
        status = event.status
        node = self.registry.nodes.get(status.node_id)
        if node is None:
            node = self.registry.nodes[status.node_id] = Node(status, now_ns)
        elif node.status.incarnation != status.incarnation:
            self._node_lost(node, f"the transfer actor of {status.node_id} has restarted", now_ns)
            node.bytes_moved_before += node.status.bytes_moved
            node.tokens_moved_before += node.status.tokens_moved
        node.status, node.heard_ns, node.stale = status, now_ns, False
        for thing in event.events:
            self._attempt(self._transfer_event, thing, node, now_ns)
        dead = dict.fromkeys(node.release)
        dead |= {key: None for key in status.held if self._dead(key, now_ns)}
        node.release.clear()
        self._reply(call_id, list(dead))
        if event.events:  # prefill and staging may have room again
            self._drain_queue(now_ns)

    def _dead(self, key: tuple[TicketId, int], now_ns: int) -> bool:
        """The bytes of this ticket and attempt are not needed any more."""
        ticket_id, attempt = key
        live = self.registry.tickets.get(ticket_id)
        if live is None:
            return not self._unclaimed(ticket_id, now_ns)
        return attempt < live.ticket.attempt or live.state not in HOLDS_LEASE

    def _transfer_event(self, event: TransferEvent, node: Node, now_ns: int) -> None:
        if isinstance(event, Sealed):
            self._sealed(event, node, now_ns)
        elif isinstance(event, OpenedAt):
            self._opened(event, now_ns)
        else:
            self._lease_lost(event, now_ns)

    def _sealed(self, event: Sealed, node: Node, now_ns: int) -> None:
        seal = event.seal
        key = (seal.ticket_id, seal.attempt)
        live = self.registry.tickets.get(seal.ticket_id)
        if live is None and self._unclaimed(seal.ticket_id, now_ns):
            self._seals[seal.ticket_id] = event
            call_id, attempt = self._early.pop(seal.ticket_id, (0, 0))
            if call_id:
                self._reply(
                    call_id, self._hand_over(event, self._hand_over_ns) if attempt == seal.attempt else Verdict.STALE
                )
            return
        if live is None or live.ticket.attempt != seal.attempt or live.state not in HOLDS_LEASE:
            node.release[key] = None
            return
        if self.registry.move(live, TicketEvent.SEALED, now_ns):
            self._learn_prefill(live, now_ns)
            live.hand_over = self._hand_over(event, self._hand_over_ns)
            self._refresh_prefill(live)
            if live.wanted_by:
                self._give_hand_over(live, now_ns)

    def _learn_prefill(self, live: TicketRecord, now_ns: int) -> None:
        if (prefill := self.registry.replicas.get(live.ticket.prefill or "")) is not None:
            busy_since_ns = max(live.placed_ns, prefill.sealed_ns)
            self.forecast.learn_prefill(live.prefill_tokens, now_ns - busy_since_ns)
            prefill.sealed_ns = now_ns

    def _refresh_prefill(self, live: TicketRecord) -> None:
        prefill = self.registry.replicas.get(live.ticket.prefill or "")
        if prefill is not None:
            self.selector.refresh(prefill)

    def _opened(self, event: OpenedAt, now_ns: int) -> None:
        opened = event.opened
        live = self.registry.tickets.get(opened.ticket_id)
        if live is None or live.ticket.attempt != opened.attempt or live.opened:
            self._add("opened_absorbed")
            return
        live.opened = True
        if opened.ok and live.state is TicketState.MOVING:
            self.forecast.learn_hand_over(now_ns - live.changed_ns)
        for verdict, count in opened.verdicts.items():
            self._add(f"pages_{verdict}", count)
        self._add("opened")
        self._add("opened_seconds", opened.seconds)
        if not opened.ok:
            self._add("recomputed_tokens", opened.num_tokens)
        self.registry.move(live, TicketEvent.OPENED if opened.ok else TicketEvent.OPEN_FAILED, now_ns)

    def _lease_lost(self, event: LeaseLost, now_ns: int) -> None:
        self._add("leases_lost")
        live = self.registry.tickets.get(event.ticket_id)
        early = (TicketState.ADMITTED, TicketState.PREFILLING, TicketState.SEALED)
        if live is not None and live.ticket.attempt == event.attempt and live.state in early and live.lost is None:
            live.hand_over = None
            self._tell_lost(live, Role.PREFILL, live.ticket.prefill or "", event.reason, now_ns)

    def _node_lost(self, node: Node, reason: str, now_ns: int) -> None:
        """The node's staging is gone: whatever was sealed there and not opened is computed again."""
        for ticket_id in sorted(self.registry.tickets):
            live = self.registry.tickets[ticket_id]
            here = (
                live.hand_over.lease.node_id == node.status.node_id
                if live.hand_over
                else (live.prefill_at is not None and live.ticket.prefill_node == node.status.node_id)
            )
            if here and live.state is not TicketState.MOVING and live.lost is None:
                live.hand_over = None
                self._tell_lost(live, Role.PREFILL, live.ticket.prefill or "", reason, now_ns)

    # -- losses and ends

    def _lost(self, live: TicketRecord, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        if event.attempt < live.ticket.attempt or (live.decode_at is None and self._waits(live)):
            self._reply_placed_or_wait(live, call_id)  # sent twice
            return
        self._add("page_integrity_retries" if event.page_integrity else f"lost_{event.role}")
        suspect = self.registry.replicas.get(event.replica_id)
        if suspect is not None and not suspect.fenced and not event.page_integrity:
            suspect.stale = True  # counts as full until its next heartbeat
            self.selector.refresh(suspect)
        if live.ticket.attempt >= ATTEMPTS_MAX:
            self._close(live, Outcome.FAILED, now_ns)
            self._reply(
                call_id, Overloaded(reason=f"gave up after {ATTEMPTS_MAX} attempts: {event.reason}", retry_after_s=1)
            )
            return
        self._retry(live, event, call_id, now_ns)

    def _retry(self, live: TicketRecord, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        places = (live.decode_at, live.prefill_at)
        for place in places:
            if place is not None:
                place.cancel[(live.ticket.ticket_id, live.ticket.attempt)] = CANCEL_REPEATS
        self.registry.detach(live)
        self.registry.release_lease(live)
        self._orphaned_by_replica.get(live.ticket.decode, TrackedSet()).discard(live.ticket.ticket_id)
        for place in places:
            if place is not None and not place.fenced:
                self.selector.refresh(place)
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.STALE)
            live.wanted_by = 0
        kind = TicketEvent.PREFILL_LOST if event.role is Role.PREFILL else TicketEvent.DECODE_LOST
        if not self.registry.move(live, kind, now_ns):
            self.registry.move(live, TicketEvent.DECODE_LOST, now_ns)
        live.opened, live.lost = False, None
        live.num_output_tokens = max(live.num_output_tokens, event.num_output_tokens)
        alone = live.request.alone or (event.request is not None and event.request.alone)
        exclude = dict.fromkeys((*live.request.exclude, event.replica_id) if event.replica_id else live.request.exclude)
        live.request = msgspec.structs.replace(
            live.request,
            exclude=tuple(exclude),
            num_output_tokens=live.num_output_tokens,
            # It will read no page that was there before: no replica is better for what it has cached.
            prefix_hashes=() if event.page_integrity else live.request.prefix_hashes,
            disaggregate=live.request.disaggregate and live.ticket.attempt < ALONE_AFTER and not alone,
            alone=alone,
        )
        # The old attempt is void from here on, also while the ticket waits for its new place.
        live.ticket = msgspec.structs.replace(live.ticket, attempt=live.ticket.attempt + 1, epoch=self.epoch)
        self._wait_again(live, call_id, now_ns)

    def _ended(self, event: Ended, call_id: CallId, now_ns: int) -> None:
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            self._add("ended_absorbed")
            self.registry.ended.setdefault(event.ticket_id, event.outcome)
            return
        live.num_output_tokens = max(live.num_output_tokens, event.num_output_tokens)
        if event.outcome is Outcome.DONE:
            decode_ns = now_ns - live.changed_ns if live.state is TicketState.DECODING else 0
            self.forecast.learn(live.request, event.num_output_tokens, decode_ns)
            self.forecast.learn_stay(now_ns - live.placed_ns)
        self._close(live, event.outcome, now_ns)
