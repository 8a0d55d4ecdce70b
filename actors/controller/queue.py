"""Who waits for a place, in which order, and who has to leave when too many wait. Pure."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from actors.controller.journal import Tracked, TrackedDict, TrackedList
from actors.messages import AdmitRequest, TicketId

Line = tuple[str, str]  # tenant and tokenizer


@dataclass(slots=True, eq=False)
class Waiting(Tracked):
    """A call that waits for a place on a replica. Times on the controller's clock."""

    call_id: int
    request: AdmitRequest
    since_ns: int
    until_ns: int
    cost: float  # what the request takes, for the fairness between tenants (tokens)
    ticket_id: TicketId = 0  # a live ticket that needs a new place; 0: a new request
    generation: str | None = None
    not_before_ns: int = 0
    also: TrackedList[int] = field(default_factory=TrackedList)  # further calls that wait for the same answer
    number: int = 0  # of its arrival
    expected_ns: int = 0  # when it will probably get its place; 0: not forecast yet

    @property
    def line(self) -> Line:
        return self.request.tenant, self.request.tokenizer

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts those of one line: higher priority first, then first come."""
        return -self.request.priority, self.number


class AdmissionQueue(Tracked):
    """Bounded queue, fair between tenants by tokens: the tenant that has had least goes first.

    Inside a tenant: higher priority first, then first come. A request that was already running and lost its replica
    goes before all of these and does not count against the bound. Requests in the tokens of different models wait in
    lines of their own.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._again: TrackedList[Waiting] = TrackedList()
        self._lines: TrackedDict[Line, TrackedList[tuple[tuple[int, int], Waiting]]] = TrackedDict()  # sorted
        self._served: TrackedDict[Line, float] = TrackedDict()  # virtual time of each line that waits
        self._clock = 0.0  # virtual time: of the line served last
        self._number = 0
        self.num_left = 0  # that were served or dropped
        self._waiting: TrackedDict[int, Waiting] = TrackedDict()  # by call

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def __contains__(self, waiting: Waiting) -> bool:
        return self._waiting.get(waiting.call_id) is waiting

    def put(self, waiting: Waiting) -> None:
        self._waiting[waiting.call_id] = waiting
        if waiting.ticket_id:
            self._again.append(waiting)
            return
        line = waiting.line
        if line not in self._lines:
            self._lines[line] = TrackedList()
            self._served[line] = max(self._served.get(line, 0.0), self._clock)
        self._number += 1
        waiting.number = self._number
        insort(self._lines[line], (waiting.urgency, waiting))

    def drop(self, call_id: int) -> Waiting | None:
        waiting: Waiting | None = self._waiting.pop(call_id, None)
        if waiting is None:
            return None
        self.num_left += 1
        if waiting.ticket_id:
            self._again.remove(waiting)
            return waiting
        line = self._lines[waiting.line]
        line.remove((waiting.urgency, waiting))
        if not line:
            del self._lines[waiting.line]
            if self._served[waiting.line] <= self._clock:
                del self._served[waiting.line]  # it would start from the clock anyway
        return waiting

    def leave(self, call_id: int) -> Waiting | None:
        """One caller waits no more; the entry that went with it, when no other caller waits for the same."""
        for waiting in self._waiting.values():
            if call_id in waiting.also:
                waiting.also.remove(call_id)
                return None
        found = self._waiting.get(call_id)
        if found is None or not found.also:
            return self.drop(call_id)
        del self._waiting[call_id]
        found.call_id = found.also.pop()
        self._waiting[found.call_id] = found
        return None

    def in_order(self, now_ns: int) -> Iterator[Waiting]:
        """From the one whose turn is next. The queue must not change while this is read."""
        for waiting in self._again:
            if now_ns >= waiting.not_before_ns:
                yield waiting
        turns = [(self._served[line], line, 0) for line in self._lines]
        heapq.heapify(turns)
        while turns:
            served, line, at = heapq.heappop(turns)
            _, waiting = self._lines[line][at]
            yield waiting
            if at + 1 < len(self._lines[line]):
                heapq.heappush(turns, (served + waiting.cost, line, at + 1))

    def serve(self, waiting: Waiting) -> None:
        """It got its place: leaves, and its line has had that much more."""
        line = waiting.line
        if not waiting.ticket_id:
            self._clock = max(self._clock, self._served.get(line, 0.0))
            self._served[line] = self._served.get(line, self._clock) + waiting.cost
        self.drop(waiting.call_id)

    def expired(self, now_ns: int) -> list[Waiting]:
        return [waiting for waiting in self._waiting.values() if now_ns >= waiting.until_ns]

    def surplus(self, newest: Waiting, has_pool: Callable[[AdmitRequest, str | None], bool]) -> Waiting | None:
        """Who has to leave because `newest` came; None when there is room.

        Requests that no replica here could ever take have a bound of their own. Of the tenant with most entries (the
        newcomer's own, among equals) leaves the one that would be served last.
        """
        served = has_pool(newest.request, None)
        lines = [line for line, queue in self._lines.items() if has_pool(queue[0][1].request, None) is served]
        if sum(len(self._lines[line]) for line in lines) <= self.size_max:
            return None
        by_tenant: dict[str, list[Line]] = {}
        for line in lines:
            by_tenant.setdefault(line[0], []).append(line)
        own = newest.request.tenant

        def rank(tenant: str) -> tuple[int, bool, str]:
            return sum(len(self._lines[line]) for line in by_tenant[tenant]), tenant == own, tenant

        return max((self._lines[line][-1] for line in by_tenant[max(by_tenant, key=rank)]), key=lambda last: last[0])[1]
