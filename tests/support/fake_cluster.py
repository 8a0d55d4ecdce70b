"""A scripted cluster behind the engine core client: `app.rpc.ports` with every answer scripted.

Real engines answer in tests/service; here it is about orders of events that a real one shows once in a million.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.messages import (
    PAGE_INTEGRITY,
    AdmitRequest,
    Ended,
    HandOver,
    Lease,
    Outcome,
    Overloaded,
    PrefillDone,
    ReplicaLost,
    Role,
    Seal,
    Ticket,
    Verdict,
    WaitForHandOver,
)
from app.request.core_client import FerryCoreClient
from app.rpc.ports import ReplicaGone


def frames_of(
    request: EngineCoreRequest | None,
    *tokens: int,
    finish: FinishReason | None = None,
    cached: int | None = 0,
    name: str = "x",
) -> list[bytes]:
    """One engine step's message with one output in it; with statistics of the prompt unless `cached` is None."""
    stats = None
    if cached is not None:
        assert request is not None
        stats = PrefillStats()
        stats.set(len(request.prompt_token_ids or ()), cached, 0)
    output = EngineCoreOutput(request_id=name, new_token_ids=list(tokens), finish_reason=finish, prefill_stats=stats)
    return [bytes(frame) for frame in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output], timestamp=1.0))]


class Decode:
    """One decode replica's end of the wires."""

    def __init__(self) -> None:
        self.alive = True
        self.submitted: dict[str, EngineCoreRequest] = {}
        self.hand_overs: dict[str, HandOver | None] = {}
        self.aborted: list[str] = []
        self.wire: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self.streams = 0

    def emit(self, engine_id: str, *tokens: int, finish: FinishReason | None = None, cached: int | None = None) -> None:
        self.wire.put_nowait(
            frames_of(self.submitted.get(engine_id), *tokens, finish=finish, cached=cached, name=engine_id)
        )

    def page_mismatch(self, engine_id: str) -> None:
        """The engine has ended the request because its block table named a page that is not its own."""
        output = EngineCoreOutput(
            request_id=engine_id, new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=PAGE_INTEGRITY
        )
        frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output], timestamp=1.0))
        self.wire.put_nowait([bytes(frame) for frame in frames])

    def die(self) -> None:
        self.alive = False
        self.lose_connection()

    def lose_connection(self) -> None:
        self.wire.put_nowait(None)


class FakeCluster:
    def __init__(self) -> None:
        self.decodes = {"d1": Decode(), "d2": Decode()}
        self.prefill_calls: list[tuple[str, int]] = []
        self.prefill_cancelled = 0
        self.prefill_fails: dict[str, Exception] = {}
        self.prefilled: list[EngineCoreRequest] = []
        self.prefill_token: int | None = None  # what prefill samples
        self.prefill_finish: FinishReason | None = None
        self.prefill_gate = asyncio.Event()
        self.prefill_gate.set()
        self.hand_over_answer: Verdict | None = None
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.admit_gate = asyncio.Event()
        self.admit_gate.set()
        self.admit_answer: Overloaded | None = None
        self.lost_answers: list[Ticket | Overloaded] = []
        self.admits: list[AdmitRequest] = []
        self.losses: list[tuple[Role, str, str, int]] = []
        self.alone: list[bool] = []  # of each loss: whether the next place must be an empty replica
        self.ends: list[tuple[int, Outcome, int]] = []
        self.withdrawn = 0
        self.mismatches = 0  # losses that were none: a page was not the request's own
        self.use_prefill = True
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    # controller

    async def call(self, message: Any, patience_s: float = 15.0) -> Any:
        match message:
            case AdmitRequest():
                return await self.admit(message)
            case WaitForHandOver():
                return await self.hand_over(message.ticket_id, message.attempt)
            case ReplicaLost():
                return await self.lost(message)
            case Ended():
                return await self.ended(message.ticket_id, message.outcome, message.num_output_tokens)
        raise AssertionError(message)

    async def admit(self, request: AdmitRequest) -> Ticket | Overloaded:
        try:
            await self.admit_gate.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        self.admits.append(request)
        if self.admit_answer is not None:
            return self.admit_answer
        return self.ticket(len(self.admits), prefill="p1" if self.use_prefill and request.disaggregate else None)

    def ticket(self, ticket_id: int, attempt: int = 1, *, prefill: str | None = None, decode: str = "d1") -> Ticket:
        return Ticket(
            ticket_id=ticket_id,
            attempt=attempt,
            request_id="r",
            frontend_id="f",
            epoch=1,
            decode=decode,
            prefill=prefill,
            deadline_s=2.0,
        )

    async def hand_over(self, ticket_id: int, attempt: int) -> HandOver | Verdict:
        if self.hand_over_answer is not None:
            return self.hand_over_answer
        seal = Seal(ticket_id=ticket_id, attempt=attempt, layout_fingerprint="l", num_tokens=1, digests=((1,),))
        lease = Lease(ticket_id=ticket_id, attempt=attempt, node_id="n", segment="s", offset=0, num_bytes=1)
        return HandOver(ticket_id=ticket_id, attempt=attempt, seal=seal, lease=lease, deadline_s=1.0)

    async def lost(self, loss: ReplicaLost) -> Ticket | Overloaded:
        self.mismatches += loss.page_integrity
        self.alone.append(loss.request is not None and loss.request.alone)
        self.losses.append((loss.role, loss.replica_id, loss.reason, loss.num_output_tokens))
        return self.lost_answers.pop(0)

    async def ended(self, ticket_id: int, outcome: Outcome, num_output_tokens: int) -> None:
        self.ends.append((ticket_id, outcome, num_output_tokens))

    # prefill

    async def prefill(self, replica_id: str, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        self.prefill_calls.append((replica_id, ticket.attempt))
        request = self._decoder.decode(frames)
        try:
            await self.prefill_gate.wait()
        except asyncio.CancelledError:
            self.prefill_cancelled += 1
            raise
        if replica_id in self.prefill_fails:
            raise self.prefill_fails[replica_id]
        self.prefilled.append(request)
        return PrefillDone(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            num_tokens=len(request.prompt_token_ids),
            num_cached_tokens=3,
            seconds=0.0,
            output=[]
            if self.prefill_token is None
            else frames_of(request, self.prefill_token, finish=self.prefill_finish),
        )

    # decode

    async def submit(self, replica_id: str, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None) -> None:
        decode = self.decodes[replica_id]
        await self.submit_gate.wait()
        if not decode.alive:
            raise ReplicaGone(replica_id, "it died")
        request = self._decoder.decode(frames)
        assert decode.streams, "outputs of a request that is submitted before the stream stands go nowhere"
        assert request.request_id not in decode.submitted, "an engine knows this id already"
        decode.submitted[request.request_id] = request
        decode.hand_overs[request.request_id] = hand_over

    async def abort(self, replica_id: str, engine_ids: list[str]) -> None:
        if not self.decodes[replica_id].alive:
            raise ReplicaGone(replica_id, "it died")
        self.decodes[replica_id].aborted += engine_ids

    async def outputs(self, replica_id: str) -> AsyncIterator[list[bytes]]:
        decode = self.decodes[replica_id]
        decode.streams += 1
        try:
            yield []
            while (frames := await decode.wire.get()) is not None:
                yield frames
            raise ReplicaGone(replica_id, "its stream ended", died=not decode.alive)
        finally:
            decode.streams -= 1

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        return [["generate"]]

    # the client on the near side

    def client(self) -> FerryCoreClient:
        return FerryCoreClient("f", self, self, self, block_tokens=4)


def request(request_id: str = "r", prompt: int = 10, **params: Any) -> EngineCoreRequest:
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(range(prompt)),
        mm_features=None,
        sampling_params=SamplingParams(**defaults | params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Waits for something that other tasks of this loop bring about; fails loudly when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def tokens_of(client: FerryCoreClient, request_id: str, count: int) -> list[int]:
    """The next `count` tokens that vLLM's output processor would see for a request."""
    found: list[int] = []
    while len(found) < count:
        outputs = await asyncio.wait_for(client.get_output_async(), 5.0)
        for output in outputs.outputs:
            assert output.request_id == request_id
            found += output.new_token_ids
    return found


def to_builtins(value: Any) -> Any:
    return msgspec.to_builtins(value)


async def settled(client: FerryCoreClient, far: FakeCluster, finished: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    await until(lambda: not client.runs and not client.groups)
    granted = len(far.admits) if far.admit_answer is None else 0
    assert sorted(ticket for ticket, _, _ in far.ends) == list(range(1, granted + 1))
    for decode in far.decodes.values():
        if decode.alive:
            assert set(decode.submitted) - finished <= set(decode.aborted)
    client.shutdown()


async def cancel(client: FerryCoreClient, *request_ids: str) -> None:
    client.cancel(list(request_ids))
