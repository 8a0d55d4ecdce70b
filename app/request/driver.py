"""One request on its way: performs the state machine's actions and gives everything back in one `finally`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from actors.engine.in_flight import EngineDied
from actors.messages import (
    PAGE_INTEGRITY,
    AdmitRequest,
    HandOver,
    Outcome,
    ReplicaId,
    Ticket,
    Verdict,
    WaitForHandOver,
)
from app.api.errors import to_exception
from app.metrics import FrontendMetrics
from app.request import eligibility, events, state
from app.request.context import Caller, detached
from app.request.decode_stream import DecodeStreams
from app.request.emitted import EmittedTokens, ReplayDiffers
from app.request.group import SequenceGroup
from app.request.record import RequestRecord
from app.request.submission import Submission
from app.rpc.ports import ControllerGone, ControllerPort, DecodePort, PrefillPort, ReplicaGone

GRAMMAR_ENDS = (
    "structured_outputs or response_format: the engine cannot compile what they describe, or it allows no token "
    "after {} tokens; write it with fewer features, or without a rule that never ends"
)
logger = logging.getLogger("pageferry.frontend")


@dataclass(frozen=True, slots=True)
class Collaborators:
    """What every request of a frontend works with. `on_end(driver, fault)`: it has ended, before it gives back."""

    controller: ControllerPort
    prefill: PrefillPort
    decode: DecodePort
    streams: DecodeStreams
    metrics: FrontendMetrics
    on_end: Callable[[RequestDriver, events.RequestError | None], None]


class RequestDriver:
    """`page_tokens`: of a page in the engines' prefix caches; None when they have none."""

    def __init__(
        self,
        request: EngineCoreRequest,
        admission: AdmitRequest,
        group: SequenceGroup,
        caller: Caller,
        collaborators: Collaborators,
        *,
        page_tokens: int | None = None,
        retries_mismatch: bool = False,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.group = group
        self.caller = caller
        self._admission = admission
        self._with = collaborators
        self._time = asyncio.get_running_loop().time
        name, prompt = request.external_req_id or request.request_id, request.prompt_token_ids or ()
        self.record = RequestRecord(collaborators.metrics, name, caller, len(prompt))
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.emitted = EmittedTokens(request.request_id, page_tokens)
        self._state, self._first = state.begin(eligibility.recovery_of(request), retries_mismatch)
        self._inbox: deque[events.Event] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._submission = Submission(self.request_id, collaborators.decode, collaborators.streams)
        self._hand_over: asyncio.Future[HandOver | Verdict] | None = None
        self._deadline = 0.0

    # -- from outside

    @property
    def tokens(self) -> list[int]:
        return self.emitted.tokens

    @property
    def place(self) -> tuple[Ticket, str] | None:
        """The ticket and the request's id in decode's engine ("" before it is there); None before it is admitted."""
        return None if self._state.ticket is None else (self._state.ticket, self._submission.engine_id)

    @property
    def decoding(self) -> bool:
        return self._state.phase in (state.Phase.SUBMIT, state.Phase.STREAM)

    @property
    def movable(self) -> bool:
        """Whether it can go on elsewhere exactly; if not it stays on a replica that is leaving, which waits for it."""
        return not self.tokens or self._state.recovery is not state.Recovery.NONE

    def start(self) -> None:
        self._task = detached(self._main())

    def tell(self, event: events.Event) -> None:
        self._inbox.append(event)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def left_behind(self, attempt: int) -> None:
        """A sibling has got the ticket's next attempt; every engine drops what is left of this one."""
        ticket = self._state.ticket
        if ticket is not None and ticket.attempt <= attempt:
            self.decode_lost(ticket.decode, "the request goes on elsewhere")

    def decode_lost(self, replica_id: ReplicaId, reason: str, died: bool = False) -> None:
        if self._submission.replica_id == replica_id:
            self._submission.stop_listening()  # a token that leaves after it was counted here would be computed twice
        self.tell(events.DecodeLost(replica_id, reason, len(self.tokens), died))

    def accept(self, output: EngineCoreOutput, step_s: float) -> EngineCoreOutput | None:
        """Called by the stream for every output of the current submission."""
        if output.finish_reason is FinishReason.ABORT:
            # Not by our wish, or we would not listen any more: the controller had the replica drop it.
            replica = self._submission.replica_id
            self._submission.stop_listening()
            self.decode_lost(replica, "its replica had to drop it")
            return None
        if output.finish_reason is FinishReason.ERROR and output.stop_reason == PAGE_INTEGRITY:
            # It carries no token. vLLM would tell the client "Internal server error".
            self._page_mismatch()
            return None
        if output.finish_reason is FinishReason.ERROR and eligibility.is_constrained(self.request):
            # vLLM's scheduler ends a request so whose grammar takes no token; its frontend would answer 500.
            self._submission.stop_listening()
            self._submission.finished = True
            self.tell(events.Broken(GRAMMAR_ENDS.format(len(self.tokens)), 400))
            return None
        first = not self.tokens
        if self._submission.silent and output.new_token_ids:
            self._submission.silent = False
            self.group.leader_arrived(self._attempt, self.request_id)
        try:
            taken = self.emitted.take(output)
        except ReplayDiffers as error:
            self._submission.stop_listening()
            self.tell(events.Broken(str(error)))
            return None
        if taken is not None and taken.new_token_ids:
            self.record.tokens(len(taken.new_token_ids), step_s)
        if first and self.tokens:
            self.record.first_token(self.emitted.first_token - self.emitted.began)
        if output.finish_reason is not None:
            self._submission.finished = True
            failed = output.finish_reason is FinishReason.ERROR
            self.tell(events.Finished(Outcome.FAILED if failed else Outcome.DONE))
        return taken

    def _page_mismatch(self) -> None:
        replica = self._submission.replica_id
        name = self.request.external_req_id or self.request_id
        self._submission.stop_listening()
        self._submission.finished = True
        earlier = self.group.mismatch(self._attempt)
        stay = any(not sibling.movable for sibling in self.group.members.values() if sibling is not self)
        self.tell(events.PageMismatch(replica, name, len(self.tokens), earlier, stay))

    # -- the loop

    async def _main(self) -> None:
        end = events.End(Outcome.FAILED, events.internal_error(self.request_id))
        try:
            end = await self._run_to_end()
        except Exception:
            logger.exception("request %s", self.request_id)
            end = events.End(Outcome.FAILED, events.internal_error(self.request_id))
        except asyncio.CancelledError:
            end = events.End(Outcome.CANCELLED, events.RequestError(503, "the frontend is shutting down"))
        finally:
            await self._give_back(end)

    async def _run_to_end(self) -> events.End:
        action = self._first
        while not isinstance(action, events.End):
            if not isinstance(action, events.Admit) and not self.admitted.done():
                self.admitted.set_result(None)
            action = await self._next(action)
        return action

    async def _next(self, action: events.Action) -> events.Action:
        """Performs `action`; the next one follows from what comes first, its result or an event from outside."""
        operation = asyncio.ensure_future(self._perform(action))
        try:
            while True:
                while self._inbox:
                    self._state, following = state.step(self._state, self._inbox.popleft())
                    if following is not None:
                        return following
                if operation.done():
                    event = events.Broken("a call was cancelled", 503) if operation.cancelled() else operation.result()
                    self._state, following = state.step(self._state, event)
                    if following is None:
                        raise RuntimeError(f"{event} does not belong into phase {self._state.phase}")
                    return following
                self._wake = asyncio.get_running_loop().create_future()
                await asyncio.wait((operation, self._wake), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._wake = None
            if not operation.done():
                operation.cancel()
                await asyncio.gather(operation, return_exceptions=True)

    # -- actions

    @property
    def _attempt(self) -> int:
        return self._state.ticket.attempt if self._state.ticket is not None else 0

    async def _perform(self, action: events.Action) -> events.Event:
        match action:
            case events.Admit():
                return await self._admit()
            case events.Prefill():
                return await self._prefill(action.ticket)
            case events.AwaitHandOver():
                return await self._await_hand_over(action.ticket)
            case events.WaitForLeader():
                await self.group.wait_for_leader(action.ticket.attempt)
                return events.LeaderArrived()
            case events.Submit():
                return await self._submit(action)
            case events.ReportLost():
                return await self._lost(action)
            case _:
                await asyncio.get_running_loop().create_future()  # streaming: what ends it comes from outside
                raise AssertionError("unreachable")

    async def _admit(self) -> events.Event:
        started = self._time()
        try:
            answer = await self.group.admit(self, self._admission)
        except ControllerGone as error:
            return self._without_controller(error)
        self.record.phase("admit", self._time() - started)
        self.caller.rates = answer.ticket.rates if isinstance(answer, events.Admitted) else answer.busy.rates
        if isinstance(answer, events.Admitted):
            self.record.placed(answer.ticket)
        return answer

    async def _lost(self, report: events.ReportLost) -> events.Event:
        self._submission.stop_listening()
        self._drop_hand_over()
        if report.alone:
            logger.warning("request %s was in engines that ended; it runs alone from now on", self.request_id)
        if not self.group.mismatched(report.ticket.attempt):
            self.record.lost(report.role, report.replica_id, report.reason)
        try:
            answer = await self.group.lost(self, report)
        except ControllerGone as error:
            return self._without_controller(error)
        if isinstance(answer, events.Admitted):
            self.record.placed(answer.ticket)
            if report.page_integrity and answer.leader:
                self.record.run_again()
        return answer

    def _without_controller(self, error: ControllerGone) -> events.Broken:
        logger.warning("request %s: %s", self.request_id, error)
        return events.Broken("the controller is away; send it again", 503)

    def _now(self) -> EngineCoreRequest:
        """The request as it has to be computed from here on."""
        request = self.request
        if self.tokens and self._state.recovery is state.Recovery.RESUME:
            request = eligibility.as_continuation(request, self.tokens)
        if self.group.mismatches_before(self._attempt):
            assert self._state.ticket is not None
            request = eligibility.with_private_cache_salt(request, self._state.ticket.ticket_id)
        return request

    async def _prefill(self, ticket: Ticket) -> events.Event:
        assert ticket.prefill is not None
        started = self._time()
        self._deadline = started + ticket.deadline_s
        self.emitted.cached_tokens = None
        # Asked for now, so that the answer is on its way the moment the last page is sealed.
        self._hand_over = asyncio.ensure_future(
            self._with.controller.call(WaitForHandOver(ticket.ticket_id, ticket.attempt, ticket.deadline_s))
        )
        request = self._now()
        samples = self.group.num_sequences == 1 and eligibility.samples_at_prefill(request, self._state.recovery)
        frames = eligibility.encode(eligibility.for_prefill(request, samples))
        try:
            done = await asyncio.wait_for(self._with.prefill.prefill(ticket.prefill, ticket, frames), ticket.deadline_s)
        except TimeoutError:
            return events.PrefillLost(f"no answer within transfer.hand_over_s {ticket.deadline_s:g}")
        except ReplicaGone as error:
            return events.PrefillLost(str(error), error.died)
        except Exception as error:
            logger.warning("prefill %s failed request %s: %r", ticket.prefill, self.request_id, error)
            return events.PrefillLost(f"it failed with {type(error).__name__}", isinstance(error, EngineDied))
        if not self.tokens:
            self.emitted.cached_tokens = done.num_cached_tokens
        self.record.phase("prefill", self._time() - started)
        self.record.phase("prefill_replica", done.seconds)
        if samples and done.output:
            # The client has its token now; decode opens the pages meanwhile and goes on after it.
            self._with.streams.to(ticket.decode).deliver(done.output, to=self)
        return events.Prefilled()

    async def _await_hand_over(self, ticket: Ticket) -> events.Event:
        assert self._hand_over is not None
        started = self._time()
        rest = max(0.1, self._deadline - started)
        waiting, self._hand_over = self._hand_over, None
        try:
            answer = await asyncio.wait_for(waiting, rest)
        except TimeoutError:
            answer = Verdict.MISSING
        except ControllerGone:
            answer = Verdict.STALE  # no process has the seal any more: decode can still compute the prompt
        self.record.phase("hand_over", self._time() - started)
        return events.HandedOver(answer) if isinstance(answer, HandOver) else events.NoHandOver(answer)

    def _drop_hand_over(self) -> None:
        if self._hand_over is not None:
            self._hand_over.cancel()
            self._hand_over = None

    async def _submit(self, action: events.Submit) -> events.Event:
        started = self._time()
        ticket, replica = action.ticket, action.ticket.decode
        if action.hand_over is None:
            self.emitted.cached_tokens = None
        self._submission.begin(replica, self)
        self.record.new_engine()
        self.emitted.new_engine(replays=self._state.recovery is state.Recovery.REPLAY)
        frames = eligibility.encode(msgspec.structs.replace(self._now(), request_id=self._submission.engine_id))
        if self.tokens and self._submission.count > 1:
            self.record.as_continuation()
        if lost := await self._submission.send(frames, ticket, action.hand_over):
            return replace(lost, num_output_tokens=len(self.tokens))
        self.record.phase("submit", self._time() - started)
        return events.Submitted()

    # -- giving back

    async def _give_back(self, end: events.End) -> None:
        self._drop_hand_over()
        self._submission.stop_listening()
        self._report(end)
        try:
            await self._submission.abort(self._state.ticket)
        finally:
            self.group.leave(self, end.outcome)
            await self.group.release_if_idle()

    def _report(self, end: events.End) -> None:
        """Tells the client side, before anything is given back: who waits learns it at once."""
        fault = end.fault
        if fault is not None:
            self.caller.fault = fault
        self.record.ended(end, len(self.tokens), self.emitted.token_gap_s)
        if not self.admitted.done():
            if fault is not None:
                self.admitted.set_exception(to_exception(fault))
                fault = None
            else:
                self.admitted.set_result(None)
        self._with.on_end(self, fault)
