"""A ticket and its replicas, or a place in the queue, or a refusal that says when to come back. Pure."""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from actors import deadlines
from actors.controller.capacity import UNKNOWN_NS, Demand, Hold, Schedule, Short, prefill_ahead
from actors.controller.events import (
    CallId,
    StepFailed,
    Withdraw,
)
from actors.controller.forecast import SECOND, blocks_for
from actors.controller.queue import Waiting
from actors.controller.registry import EPOCH_SHIFT, TicketRecord
from actors.controller.selector import Choice
from actors.controller.state import FAILED, SCHEDULE_EVERY_NS, ControllerState, step_failed
from actors.controller.ticket_state import TicketEvent, TicketState
from actors.messages import (
    AdmitRequest,
    Outcome,
    Overloaded,
    Ticket,
    TicketId,
    Verdict,
)

LOOK_MAX = 64  # entries of the queue that one turn looks at
BACKFILL_MAX = 8  # of these, behind the first that has no room
ALONE_AFTER = 3  # attempts; from then on decode computes the prompt itself
LOOK_AGAIN_NS = SECOND // 10  # a full queue is looked at so often though nothing got freer: forecasts change with time
ALONE_WAIT_NS = 60 * SECOND  # that a request waits for a replica to itself, or a quarter of the longest wait
BACK_OFF_NS = SECOND // 4
CANCEL_REPEATS = 3  # heartbeat replies that carry a cancel: a lost reply loses nothing
OUTCOME_EVENT = {
    Outcome.DONE: TicketEvent.FINISH,
    Outcome.CANCELLED: TicketEvent.CANCEL,
    Outcome.FAILED: TicketEvent.FAIL,
}


class Admission(ControllerState):
    def _admit(self, event: AdmitRequest, call_id: CallId, now_ns: int) -> None:
        request = event
        self.frontends[request.frontend_id] = now_ns
        key = (request.frontend_id, request.request_id)
        if (ticket_id := self.registry.by_request.get(key)) is not None:  # asked twice
            self._reply_placed_or_wait(self.registry.tickets[ticket_id], call_id)
            return
        if key in self.registry.ended_requests:
            self._reply(call_id, Overloaded(reason=f"request {request.request_id} has ended already", retry_after_s=0))
            return
        twin = next(
            (w for w in self.queue if not w.ticket_id and (w.request.frontend_id, w.request.request_id) == key), None
        )
        if twin is not None:
            twin.also.append(call_id)
            return
        if (refusal := self._over_limit(request, now_ns)) is not None:
            self._reply(call_id, refusal)
            return
        output, block_tokens = self.forecast.output_tokens(request), self.spec.pools.decode.block_tokens
        self.forecast.asked(blocks_for(request, output, block_tokens))
        if not len(self.queue) and isinstance(choice := self.selector.choose(request, now_ns), Choice):
            self._reply(call_id, self._issue(request, choice, now_ns))
            return
        cost = request.num_prompt_tokens + output * request.num_sequences
        bound_ns = min(self._queue_ns, int(request.patience_s * SECOND) or self._queue_ns)
        waiting = Waiting(call_id, request, now_ns, now_ns + bound_ns, cost)
        self.queue.put(waiting)
        self._drain_queue(now_ns, waiting)
        if waiting in self.queue:
            self._bound_queue(waiting, now_ns)

    def _over_limit(self, request: AdmitRequest, now_ns: int) -> Overloaded | None:
        limits = self.spec.frontend.limits_of(request.tenant)
        if not limits.any:
            return None
        live = (record.request for record in self.registry.tickets.values())
        held = chain(live, (waiting.request for waiting in self.queue if not waiting.ticket_id))
        refusal = self.buckets.take(request, limits, held, now_ns)
        if refusal is not None:
            self._add(f"limited_{refusal.limit}")
        return refusal

    def _give_back(self, request: AdmitRequest, num_used: int, now_ns: int) -> None:
        self.buckets.give_back(request, self.spec.frontend.limits_of(request.tenant), num_used, now_ns)

    def _reply_placed_or_wait(self, live: TicketRecord, call_id: CallId) -> None:
        if live.decode_at is not None:
            self._reply(call_id, live.ticket)
            return
        waiting = next((w for w in self.queue if w.ticket_id == live.ticket.ticket_id), None)
        if waiting is None:  # its replica is gone and its frontend will say so
            self._reply(call_id, live.ticket)
            return
        waiting.also.append(call_id)

    def _withdraw(self, event: Withdraw, call_id: CallId, now_ns: int) -> None:
        waiting = self.queue.leave(event.call_id)
        if waiting is not None and waiting.ticket_id:
            self._close(self.registry.tickets[waiting.ticket_id], Outcome.CANCELLED, now_ns)
        elif waiting is not None:
            self._give_back(waiting.request, 0, now_ns)
            self._drain_queue(now_ns)

    # -- places

    def _issue(self, request: AdmitRequest, choice: Choice, now_ns: int) -> Ticket:
        self._issued += 1
        if self._issued >> EPOCH_SHIFT:
            self.epoch, self._issued = self.epoch + 1, 1
        ticket_id = self.epoch << EPOCH_SHIFT | self._issued
        ticket = self._ticket(ticket_id, 1, request, choice)
        limits = self.spec.frontend.limits_of(request.tenant)
        if (rates := self.buckets.rates(request.tenant, limits, now_ns)) is not None:
            ticket = msgspec.structs.replace(ticket, rates=rates)
        live = TicketRecord(ticket, request, TicketState.ADMITTED, now_ns, now_ns, now_ns)
        self.registry.open(live)
        self._add("admitted")
        self._place(live, choice, now_ns)
        return ticket

    def _ticket(self, ticket_id: TicketId, attempt: int, request: AdmitRequest, choice: Choice) -> Ticket:
        decode, prefill = choice.decode.announcement, choice.prefill and choice.prefill.announcement
        return Ticket(
            ticket_id=ticket_id,
            attempt=attempt,
            request_id=request.request_id,
            frontend_id=request.frontend_id,
            epoch=self.epoch,
            decode=decode.replica_id,
            prefill=prefill.replica_id if prefill else None,
            reason=choice.reason,
            wire_layout=decode.layout,
            prefill_node=prefill.node_id if prefill else "",
            decode_node=decode.node_id,
            num_prompt_tokens=request.num_prompt_tokens,
            deadline_s=self._deadline_s(choice),
            alone=request.alone and choice.slots >= choice.decode.slots,
            trace=request.trace,
        )

    def _deadline_s(self, choice: Choice) -> float:
        least_s, prefill = self.spec.transfer.hand_over_s, choice.prefill
        if prefill is None:
            return least_s
        tokens = prefill_ahead(prefill) + choice.prefill_tokens
        crosses = prefill.announcement.node_id != choice.decode.announcement.node_id
        num_bytes = choice.staging_bytes if crosses else 0
        return deadlines.hand_over_s(least_s, tokens, self.forecast.prompt_token_ns, num_bytes)

    def _place(self, live: TicketRecord, choice: Choice, now_ns: int) -> None:
        live.generation = choice.decode.announcement.generation
        live.reserved, live.growth, live.ends_ns = choice.reserved, choice.growth, choice.ends_ns
        live.slots, live.variance = choice.slots, choice.variance
        live.prefill_tokens = choice.prefill_tokens
        live.hit_pages, live.hit_used = choice.hit_pages, choice.hit_used
        live.placed_ns, live.deadline_ns = now_ns, now_ns + int(live.ticket.deadline_s * SECOND)
        live.lost = None
        self.registry.attach(live, choice.decode, choice.prefill)
        self.registry.stage(live, choice.staging_bytes)
        if choice.prefill is None:
            self.registry.move(live, TicketEvent.DECODE_ALONE, now_ns)
            self._add("decode_alone")
        self.selector.refresh(choice.decode)
        if choice.prefill is not None:
            self.selector.refresh(choice.prefill)

    def _drain_queue(self, now_ns: int, newest: Waiting | None = None) -> None:
        """Gives places to those who wait, in fair order. `newest`: has just come.

        The first for whom there is no room keeps the place that it will get first; behind it, only those get one who
        do not delay that.
        """
        if len(self.queue) and not self._still_full(now_ns, newest):
            shorts = self._serve_queue(now_ns)
            self._full_ns, self._full = now_ns, None if Short.STAGING in shorts else (shorts, *self._freed(shorts))

    def _freed(self, shorts: frozenset[Short]) -> tuple[int, int, int]:
        """Changes whenever a request that lacked `shorts` may find room."""
        prefill = self.selector.prefill_freed if Short.PREFILL in shorts else 0
        return self.queue.num_left, self.selector.decode_freed, prefill

    def _still_full(self, now_ns: int, newest: Waiting | None) -> bool:
        """Everybody whose turn it may be was looked at a moment ago, and nothing has got freer since."""
        full = self._full
        if full is None or now_ns - self._full_ns >= LOOK_AGAIN_NS or full[1:] != self._freed(full[0]):
            return False
        return newest is None or newest not in islice(self.queue.in_order(now_ns), BACKFILL_MAX + 1)

    def _serve_queue(self, now_ns: int) -> frozenset[Short]:
        """What those lack who got no place."""
        hold: Hold | None = None
        shorts: set[Short] = set()
        num_behind = 0
        for waiting in list(islice(self.queue.in_order(now_ns), LOOK_MAX)):
            if waiting not in self.queue:
                continue  # it has left meanwhile
            placed = self._attempt(self._serve_waiting, waiting, hold, now_ns)
            if isinstance(placed, Short):
                shorts.add(placed)
            if placed is FAILED:
                self._fail_waiting(waiting, now_ns)
            elif placed is not None and hold is not None:
                num_behind += 1
                if num_behind == BACKFILL_MAX:
                    break
            elif placed is not None and placed is not Short.REPLICA:  # what no replica here can take delays no other
                hold = self.selector.hold_for(waiting.request, placed, waiting.generation, now_ns)
        return frozenset(shorts)

    def _serve_waiting(self, waiting: Waiting, hold: Hold | None, now_ns: int) -> Short | None:
        choice = self._choose_for(waiting, hold, now_ns)
        if isinstance(choice, Short):
            return choice
        self.queue.serve(waiting)
        if waiting.ticket_id:
            ticket = self._again(self.registry.tickets[waiting.ticket_id], choice, now_ns)
        else:
            ticket = self._issue(waiting.request, choice, now_ns)
        self._answer(waiting, ticket)
        return None

    def _choose_for(self, waiting: Waiting, hold: Hold | None, now_ns: int) -> Choice | Short:
        choice = self.selector.choose(waiting.request, now_ns, waiting.generation, hold)
        if isinstance(choice, Short) and waiting.request.exclude:  # better one that failed before than none
            open_minded = msgspec.structs.replace(waiting.request, exclude=())
            choice = self.selector.choose(open_minded, now_ns, waiting.generation, hold)
        waited_ns, most_ns = now_ns - waiting.since_ns, min(ALONE_WAIT_NS, self._queue_ns // 4)
        if isinstance(choice, Short) and waiting.request.alone and waited_ns >= most_ns:
            # Better beside others than not at all: should the engine end with it once more, it fails.
            beside = msgspec.structs.replace(waiting.request, exclude=(), alone=False)
            choice = self.selector.choose(beside, now_ns, waiting.generation, hold)
        return choice

    def _fail_waiting(self, waiting: Waiting, now_ns: int) -> None:
        """A request whose turn cannot be computed leaves the queue, so that the others get theirs."""
        self.queue.drop(waiting.call_id)
        self._answer(waiting, step_failed(f"request {waiting.request.request_id}"))
        if waiting.ticket_id and (live := self.registry.tickets.get(waiting.ticket_id)) is not None:
            self._close(live, Outcome.FAILED, now_ns)

    def _answer(self, waiting: Waiting, value: Ticket | Overloaded | StepFailed) -> None:
        for call_id in (waiting.call_id, *waiting.also):
            self._reply(call_id, value)

    def _wait_again(self, live: TicketRecord, call_id: CallId, now_ns: int) -> None:
        generation = (live.generation or None) if live.num_output_tokens else None
        until_ns = now_ns + self._queue_ns
        waiting = Waiting(call_id, live.request, now_ns, until_ns, 0.0, live.ticket.ticket_id, generation)
        if live.ticket.attempt > ALONE_AFTER:  # what keeps failing is tried ever more slowly, to outlive a storm
            waiting.not_before_ns = now_ns + (BACK_OFF_NS << (live.ticket.attempt - ALONE_AFTER - 1))
        self.queue.put(waiting)
        self._drain_queue(now_ns, waiting)

    def _again(self, live: TicketRecord, choice: Choice, now_ns: int) -> Ticket:
        """A ticket that lost its replica has a new place."""
        live.ticket = self._ticket(live.ticket.ticket_id, live.ticket.attempt, live.request, choice)
        self._place(live, choice, now_ns)
        self._add("retried")
        return live.ticket

    def _close(self, live: TicketRecord, outcome: Outcome, now_ns: int) -> None:
        ticket = live.ticket
        places = (live.decode_at, live.prefill_at)
        if outcome is not Outcome.DONE:
            for place in places:
                if place is not None:
                    place.cancel[(ticket.ticket_id, ticket.attempt)] = CANCEL_REPEATS
        if live.wanted_by:
            self._reply(live.wanted_by, Verdict.STALE)
        for waiting in [w for w in self.queue if w.ticket_id == ticket.ticket_id] if live.decode_at is None else ():
            self.queue.drop(waiting.call_id)
            self._answer(waiting, Overloaded(reason="the request has ended", retry_after_s=0))
        self.registry.close(live, outcome, OUTCOME_EVENT[outcome], now_ns)
        self._add(str(outcome))
        self._give_back(live.request, live.request.num_prompt_tokens + live.num_output_tokens, now_ns)
        self._add("output_tokens", live.num_output_tokens)
        self._add("prompt_tokens", live.request.num_prompt_tokens)
        for place in places:
            if place is not None and not place.fenced:
                self.selector.refresh(place)
        self._drain_queue(now_ns)

    # -- the queue's bound and forecast

    def _bound_queue(self, newest: Waiting, now_ns: int) -> None:
        """Refuses now what has to leave for the newest, or cannot be served in time."""
        surplus = self.queue.surplus(newest, self.selector.has_pool)
        if surplus is not None:
            self._refuse(surplus, f"{len(self.queue) - 1} requests wait already", self._next_start_ns(now_ns), now_ns)
            if surplus is newest:
                return
        newest.expected_ns = self._expected_ns(newest, now_ns)
        if newest.until_ns < newest.expected_ns < UNKNOWN_NS:
            wait_s, bound_s = (newest.expected_ns - now_ns) / SECOND, (newest.until_ns - now_ns) / SECOND
            reason = f"it would wait for {wait_s:.0f} s, more than the {bound_s:.0f} s that it may"
            self._refuse(newest, reason, now_ns + newest.expected_ns - newest.until_ns, now_ns)

    def _refuse(self, waiting: Waiting, reason: str, again_ns: int, now_ns: int) -> None:
        """`again_ns`: when it would not be refused, as far as can be foreseen."""
        self.queue.drop(waiting.call_id)
        if not waiting.ticket_id:
            self._give_back(waiting.request, 0, now_ns)
        self._add("busy")
        self._answer(waiting, Overloaded(reason=reason, retry_after_s=self._retry_after_s(again_ns, now_ns)))

    def _give_up_waiting(self, waiting: Waiting, now_ns: int) -> None:
        waited_s = (waiting.until_ns - waiting.since_ns) / SECOND
        self._refuse(waiting, f"no room on decode within {waited_s:g} s", self._next_start_ns(now_ns), now_ns)
        if waiting.ticket_id and (live := self.registry.tickets.get(waiting.ticket_id)) is not None:
            self._close(live, Outcome.FAILED, now_ns)

    def _retry_after_s(self, again_ns: int, now_ns: int) -> float:
        return round(min(max(1.0, (again_ns - now_ns) / SECOND), max(1.0, self._queue_ns / SECOND)), 1)

    def _next_start_ns(self, now_ns: int) -> int:
        """When the first of those who wait gets its place."""
        self._reschedule(now_ns)
        return min((schedule.starts[0] for schedule in self._schedules.values() if schedule.starts), default=now_ns)

    def _expected_ns(self, waiting: Waiting, now_ns: int) -> int:
        if self._reschedule(now_ns):
            return waiting.expected_ns
        tokenizer = waiting.request.tokenizer
        starts = self._schedules[tokenizer].starts if tokenizer in self._schedules else []
        before = (each for each in self.queue.in_order(now_ns) if each.request.tokenizer == tokenizer)
        at = next((number for number, each in enumerate(before) if each is waiting), len(starts))
        return starts[at] if at < len(starts) else self._add_to_schedule(waiting, now_ns)

    def _reforecast(self, now_ns: int) -> None:
        if len(self.queue):
            self._reschedule(now_ns)

    def _reschedule(self, now_ns: int) -> bool:
        """Forecasts the queue anew where that is due: it takes time in proportion to all live tickets."""
        if now_ns - self._scheduled_ns < SCHEDULE_EVERY_NS:
            return False
        self._scheduled_ns = now_ns
        self._schedules = {}
        for waiting in self.queue.in_order(now_ns):
            waiting.expected_ns = self._add_to_schedule(waiting, now_ns)
        return True

    def expected_wait_s(self, now_ns: int) -> float:
        """Until the last of those who wait has its place; of those for whom it can be foreseen."""
        known = [waiting.expected_ns for waiting in self.queue if waiting.expected_ns < UNKNOWN_NS]
        return round(max(0.0, (max(known, default=0) - now_ns) / SECOND), 1)

    def _add_to_schedule(self, waiting: Waiting, now_ns: int) -> int:
        tokenizer, limit = waiting.request.tokenizer, self.spec.admission.occupancy_limit
        if tokenizer not in self._schedules:
            arriving = self.autoscaler.arriving(now_ns)
            self._schedules[tokenizer] = Schedule.of(self.registry, self.forecast, tokenizer, limit, arriving, now_ns)
        demand = Demand.of(waiting.request, self.forecast)
        block_tokens = self.spec.pools.decode.block_tokens
        return self._schedules[tokenizer].add(demand, block_tokens, self.forecast.prefill_ns(demand.prompt))
