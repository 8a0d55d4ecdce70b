"""What goes on after one of these was away: this controller, a frontend, a lost message. Pure."""

from __future__ import annotations

import msgspec

from actors.controller.events import (
    CallId,
    Log,
    ToFrontend,
)
from actors.controller.forecast import SECOND, blocks_for
from actors.controller.journal import TrackedList, TrackedSet
from actors.controller.registry import TicketRecord, epoch_of
from actors.controller.ticket_state import TicketEvent, TicketState
from actors.controller.tickets import Tickets
from actors.messages import (
    Adopt,
    Claim,
    CommandKind,
    FrontendCommand,
    Overloaded,
    ReplicaLost,
    Role,
    Ticket,
    Verdict,
)

ORDER_AGAIN_NS = 2 * SECOND


class Recovery(Tickets):
    def _replica_lost(self, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        self._advance_epoch((event.ticket_id,))
        live = self.registry.tickets.get(event.ticket_id)
        if live is None:
            self._lost_unknown(event, call_id, now_ns)
        else:
            self._lost(live, event, call_id, now_ns)

    def _lost_unknown(self, event: ReplicaLost, call_id: CallId, now_ns: int) -> None:
        if event.request is not None and self._presumed_dead.pop(event.ticket_id, None) is not None:
            self._add("revived")
            self.registry.reopen(event.ticket_id, (event.request.frontend_id, event.request.request_id))
        outcome = self.registry.ended.get(event.ticket_id)
        if event.request is None or outcome is not None:
            ended = f"has ended as {outcome}" if outcome else "is not known here"
            self._reply(call_id, Overloaded(reason=f"ticket {event.ticket_id} {ended}", retry_after_s=0))
            return
        ticket = Ticket(
            ticket_id=event.ticket_id,
            attempt=event.attempt,
            request_id=event.request.request_id,
            frontend_id=event.request.frontend_id,
            epoch=epoch_of(event.ticket_id),
            decode=event.replica_id if event.role is Role.DECODE else "",
            num_prompt_tokens=event.request.num_prompt_tokens,
        )
        self._claim(Claim(ticket=ticket, request=event.request, num_output_tokens=event.num_output_tokens), now_ns)
        if event.ticket_id in self.registry.tickets:
            self._replica_lost(event, call_id, now_ns)
        else:
            self._reply(call_id, Overloaded(reason="the request has another ticket", retry_after_s=0))

    def _adopt(self, event: Adopt, call_id: CallId, now_ns: int) -> None:
        self.frontends[event.frontend_id] = now_ns
        for claim in event.claims:
            known = self.registry.tickets.get(claim.ticket.ticket_id)
            if known is None:
                self._attempt(self._claim, claim, now_ns)

    def _claim(self, claim: Claim, now_ns: int) -> None:
        """A live ticket of an older epoch comes back into the registry, in the state its frontend knows."""
        ticket, request = claim.ticket, claim.request
        ticket_id = ticket.ticket_id
        request = msgspec.structs.replace(request, num_output_tokens=claim.num_output_tokens)
        outcome = self.registry.ended.get(ticket_id)
        if outcome is not None or (ticket.frontend_id, ticket.request_id) in self.registry.by_request:
            reason = f"it has ended as {outcome}" if outcome else "its request has another ticket"
            order = FrontendCommand(
                kind=CommandKind.CANCELLED, ticket_id=ticket_id, attempt=ticket.attempt, reason=reason
            )
            self._out.append(ToFrontend(ticket.frontend_id, order))
            return
        live = TicketRecord(ticket, request, TicketState.ADMITTED, now_ns, now_ns, now_ns + self._hand_over_ns)
        live.num_output_tokens = claim.num_output_tokens
        decode = self.registry.replicas.get(ticket.decode)
        decode = decode if decode is not None and not decode.fenced else None
        output = self.forecast.output_tokens(request)
        block_tokens = decode.announcement.block_tokens if decode else self.spec.pools.decode.block_tokens
        sequences = min(request.num_sequences, decode.slots) if decode else request.num_sequences
        live.slots = decode.slots if decode and request.alone else sequences
        live.reserved = blocks_for(request, output, block_tokens, sequences)
        live.growth = sequences * SECOND / (self.forecast.token_ns * block_tokens)
        live.ends_ns = now_ns + int(self.forecast.token_ns * max(1, output - claim.num_output_tokens))
        live.prefill_tokens = ticket.num_prompt_tokens
        live.generation = decode.announcement.generation if decode else ""
        self._add("claimed")
        self.registry.open(live)
        if claim.decoding or ticket.prefill is None:
            self.registry.move(live, TicketEvent.DECODE_ALONE, now_ns)
        self.registry.attach(live, decode, self.registry.replicas.get(ticket.prefill or ""))
        if decode is None:
            self._orphaned_by_replica.setdefault(ticket.decode, TrackedSet()).add(ticket_id)
        else:
            self.selector.refresh(decode)
        sealed = self._seals.pop(ticket_id, None)
        call_id, attempt = self._early.pop(ticket_id, (0, 0))
        if call_id and attempt == ticket.attempt:
            live.wanted_by = call_id
        elif call_id:
            self._reply(call_id, Verdict.STALE)
        if sealed is not None:
            node = self.registry.nodes[sealed.lease.node_id]
            self._sealed(sealed, node, now_ns)

    def _resend_orders(self, now_ns: int) -> None:
        """Says again what a frontend has not acted on: an order may have been lost with a connection."""
        for ticket_id, sent_ns in list(self._order_sent_ns.items()):
            live = self.registry.tickets.get(ticket_id)
            if live is None or live.lost is None:
                del self._order_sent_ns[ticket_id]
            elif now_ns - sent_ns >= ORDER_AGAIN_NS and not self._waits(live):
                self._order_sent_ns[ticket_id] = now_ns
                self._out.append(ToFrontend(live.ticket.frontend_id, live.lost))

    def _end_rebuilding(self, now_ns: int) -> None:
        if now_ns < self.rebuilding_until_ns or not (self._seals or self._early or self._orphaned_by_replica):
            return
        for sealed in self._seals.values():
            if (node := self.registry.nodes.get(sealed.lease.node_id)) is not None:
                node.release[(sealed.seal.ticket_id, sealed.seal.attempt)] = None
        for call_id, _ in self._early.values():
            self._reply(call_id, Verdict.STALE)
        for replica_id, tickets in self._orphaned_by_replica.items():
            for ticket_id in sorted(tickets):
                live = self.registry.tickets.get(ticket_id)
                if live is not None and live.decode_at is None and live.lost is None:
                    self._tell_lost(live, Role.DECODE, replica_id, f"{replica_id} has not come back", now_ns)
        self._seals.clear()
        self._early.clear()
        self._orphaned_by_replica.clear()

    def _shift_deadlines_after_stall(self, now_ns: int) -> None:
        """When this process was away, no other process was silent: what they said meanwhile is still in the mail."""
        gap_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        if now_ns - gap_ns < self.rebuilding_until_ns:
            self._away_ns += gap_ns
        for replica in self.registry.replicas.values():
            replica.heard_ns = min(now_ns, replica.heard_ns + gap_ns)
        for node in self.registry.nodes.values():
            node.heard_ns = min(now_ns, node.heard_ns + gap_ns)
        self.autoscaler.sizes.shift(gap_ns)
        for frontend_id, heard_ns in self.frontends.items():
            self.frontends[frontend_id] = min(now_ns, heard_ns + gap_ns)
        for waiting in self.queue:
            waiting.until_ns += gap_ns
        self._deadlines = TrackedList(
            (when_ns + gap_ns, call, ticket_id) for when_ns, call, ticket_id in self._deadlines
        )
        self._add("own_pauses")
        self._out.append(Log(f"the controller itself was away for {gap_ns / SECOND:.1f} s"))
