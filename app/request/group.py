"""The requests that share one ticket: the n sequences of one prompt. A single request is a group of one.

The first to get the ticket, the leader, brings the prompt to decode; the others follow when it is there and find its
pages in decode's own prefix cache, as they would in a single engine. The ticket ends when the last of them has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from actors.messages import AdmitRequest, Claim, Ended, Outcome, Overloaded, ReplicaLost, Ticket
from app.request.events import Admitted, Event, Refused, ReportLost, RequestError
from app.rpc.ports import ControllerGone, ControllerPort

logger = logging.getLogger("pageferry.frontend")

_WORST = (Outcome.DONE, Outcome.CANCELLED, Outcome.FAILED)


class Member(Protocol):
    """One sequence of a group; in the service a `RequestDriver`."""

    request_id: str

    @property
    def tokens(self) -> list[int]: ...

    @property
    def decoding(self) -> bool: ...

    @property
    def movable(self) -> bool:
        """Whether it can go on elsewhere exactly; if not it stays on a replica that is leaving, which waits for it."""
        ...

    def tell(self, event: Event) -> None: ...

    def left_behind(self, attempt: int) -> None:
        """A sibling has got the ticket's next attempt: this one and those before it are void."""
        ...

    def decode_lost(self, replica_id: str, reason: str, died: bool = False) -> None: ...


class SequenceGroup:
    """`close` says that no more members will join; it is idle when closed and all have left.

    `on_ticket(group)` is called when its ticket is a new one or names other replicas; `on_released(group)` when the
    ticket has been given back.
    """

    def __init__(
        self,
        num_sequences: int,
        controller: ControllerPort,
        on_ticket: Callable[[SequenceGroup], None] = lambda group: None,
        on_released: Callable[[SequenceGroup], None] = lambda group: None,
    ) -> None:
        self.num_sequences = num_sequences
        self._controller = controller
        self._on_ticket = on_ticket
        self._on_released = on_released
        self.request: AdmitRequest | None = None
        self.ticket: Ticket | None = None
        self.members: dict[str, Member] = {}
        self.closed = False
        self.released = False
        self.fault: RequestError | None = None  # of a sequence that has failed: it is the whole answer
        self._mismatched: set[int] = set()  # attempts in which a page of one of them was not its own
        self._answers: dict[
            int, asyncio.Task[Ticket | Overloaded]
        ] = {}  # by the attempt that it replaces; 0: admission
        self._leader: dict[int, str] = {}  # attempt -> request id
        self._leader_arrived: dict[int, asyncio.Event] = {}
        self._outcome = Outcome.DONE
        self._num_output_tokens = 0

    # -- members

    def join(self, run: Member) -> None:
        self.members[run.request_id] = run

    def leave(self, run: Member, outcome: Outcome) -> None:
        for attempt in self._leader:
            self.leader_arrived(attempt, run.request_id)
        self.members.pop(run.request_id, None)
        self._outcome = max(self._outcome, outcome, key=_WORST.index)
        self._num_output_tokens += len(run.tokens)

    @property
    def idle(self) -> bool:
        return self.closed and not self.members

    def tell(self, event: Event) -> None:
        for run in list(self.members.values()):
            run.tell(event)

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens + sum(len(run.tokens) for run in self.members.values())

    def claim(self) -> Claim | None:
        """What a controller that has come back must know of this ticket."""
        if self.ticket is None or self.request is None or self.released:
            return None
        decoding = any(run.decoding for run in self.members.values())
        return Claim(
            ticket=self.ticket, request=self.request, num_output_tokens=self.num_output_tokens, decoding=decoding
        )

    # -- getting a ticket

    async def admit(self, run: Member, request: AdmitRequest) -> Admitted | Refused:
        if not self._answers:
            self.request = request
            self._answers[0] = asyncio.ensure_future(self._controller.call(request))
        return await self._answer(run)

    async def lost(self, run: Member, report: ReportLost) -> Admitted | Refused:
        """Asks for another ticket; siblings that lost the same attempt share the answer."""
        assert self.request is not None
        attempt = report.ticket.attempt
        if report.alone:
            self.request = msgspec.structs.replace(self.request, alone=True)
        if attempt not in self._answers:
            lost = ReplicaLost(
                ticket_id=report.ticket.ticket_id,
                attempt=attempt,
                role=report.role,
                replica_id=report.replica_id,
                reason=report.reason,
                num_output_tokens=self.num_output_tokens,
                request=self.request,
                page_integrity=report.page_integrity,
            )
            self._answers[attempt] = asyncio.ensure_future(self._controller.call(lost))
        answer = await self._answer(run)
        # The old attempt is void for all: who still follows it, or decodes under it, must come here as well.
        for sibling in list(self.members.values()):
            if sibling is not run:
                sibling.left_behind(attempt)
        return answer

    async def _answer(self, run: Member) -> Admitted | Refused:
        """The newest answer, waited for when it is on its way: attempts before it are void for all."""
        while True:
            newest = max(self._answers)
            # A sibling that is cancelled while it waits must not take the others' answer with it.
            answer = await asyncio.shield(self._answers[newest])
            if newest == max(self._answers):
                break
        if isinstance(answer, Overloaded):
            return Refused(answer)
        if self.ticket is not answer:
            self.ticket = answer
            self._on_ticket(self)
        leader = self._leader.setdefault(answer.attempt, run.request_id)
        return Admitted(answer, leader == run.request_id)

    # -- pages that were not their own

    def mismatch(self, attempt: int) -> int:
        """A page was not its own; returns in how many attempts before this one that has happened already."""
        self._mismatched.add(attempt)
        return self.mismatches_before(attempt)

    def mismatches_before(self, attempt: int) -> int:
        return sum(earlier < attempt for earlier in self._mismatched)

    def mismatched(self, attempt: int) -> bool:
        return attempt in self._mismatched

    # -- the leader brings the prompt

    def leader_arrived(self, attempt: int, request_id: str) -> None:
        """The leader's prompt is in decode's cache, or will never be there: its siblings go on."""
        if self._leader.get(attempt) == request_id:
            self._arrival(attempt).set()

    async def wait_for_leader(self, attempt: int) -> None:
        await self._arrival(attempt).wait()

    def _arrival(self, attempt: int) -> asyncio.Event:
        return self._leader_arrived.setdefault(attempt, asyncio.Event())

    # -- giving it back

    async def release_if_idle(self) -> None:
        """Ends the ticket, also one whose grant no member waited for. Idempotent."""
        if not self.idle or self.released or self.request is None:
            return
        self.released = True
        waiting = list(self._answers.values())
        for answer in waiting:
            answer.cancel()  # no effect on one that has come; an admission that still waits is withdrawn
        for ticket in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(ticket, Ticket):
                self.ticket = self.ticket or ticket
        try:
            if self.ticket is not None:
                await self._controller.call(Ended(self.ticket.ticket_id, self._outcome, self._num_output_tokens))
        except ControllerGone:
            logger.warning("ticket %s could not be ended: the controller is away", self.ticket)
        finally:
            self._on_released(self)
