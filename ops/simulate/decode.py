"""A decode replica: what its engine server does with calls, streams and hand-overs, round a `DecodeEngine`."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from actors.messages import (
    HandOver,
    Lease,
    ReplicaEvent,
    ReplicaEventKind,
    Ticket,
    Verdict,
)
from actors.transfer import events as ev
from actors.transfer.staging import Key
from ops.simulate.decode_engine import DecodeEngine, DecodeJob
from ops.simulate.network import Net
from ops.simulate.replica import decode_request, encode_outputs
from ops.simulate.world import MS, SECOND, Done, Process

BEGIN_READ_NS = 6 * SECOND


class TokenStream:
    """One frontend's output stream from one decode replica: ordered, and broken as a whole. Frames or None (broken)."""

    def __init__(self, net: Net, frontend: Process, replica: DecodeSim) -> None:
        self.frontend = frontend
        self.queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self.open = True
        self._net = net
        self.replica = replica
        self._last_ns = 0

    def push(self, frames: list[bytes]) -> None:
        world, delay_ns = self._net.world, self._net.stream_delay_ns("tokens")
        if delay_ns is None:
            # A stream has no gaps: losing a message is losing the stream, and both ends learn it.
            self.break_off(Net.ERROR_NS)
            self.replica.stream_closed(self)
            return
        self._last_ns = max(self._last_ns, world.now_ns + delay_ns)
        self.frontend.later(self._last_ns - world.now_ns, self._deliver, frames)

    def break_off(self, after_ns: int) -> None:
        """Nothing more arrives; the frontend learns it `after_ns` later."""
        if self.open:
            self.open = False
            self.frontend.later(after_ns, self.queue.put_nowait, None)

    def close(self) -> None:
        """By the frontend."""
        self.open = False
        self.replica.later(MS, self.replica.stream_closed, self)

    def _deliver(self, frames: list[bytes]) -> None:
        if self.open:
            self.queue.put_nowait(frames)


class DecodeSim(DecodeEngine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.streams: dict[str, TokenStream] = {}

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(job.ticket.ticket_id for job in self.jobs.values()))

    @property
    def empty(self) -> bool:
        return super().empty and not self.streams

    def die(self) -> None:
        super().die()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.break_off(2 * MS + self.world.random.randrange(20 * MS))

    def put_out(self, frontend_id: str, outputs: list[EngineCoreOutput]) -> None:
        if (stream := self.streams.get(frontend_id)) is not None:
            stream.push(encode_outputs(outputs, self.world.now_ns))

    def works_on(self, key: Key, frontend: Process) -> bool:
        """Whether the ticket's request runs here and its tokens get out."""
        stream = self.streams.get(frontend.name)
        up = self.alive and not self.hung and not self.leaving and stream is not None and stream.open
        return up and any(job.ready and job.key == key for job in self.running)

    # -- what the engine server does

    def open_stream(self, stream: TokenStream, answer: Done) -> None:
        if stream.open:
            self.streams[stream.frontend.name] = stream
            stream.push([])
        answer(None)

    def stream_closed(self, stream: TokenStream) -> None:
        """The frontend is gone, or the connection is: what it has here is aborted."""
        name = stream.frontend.name
        if self.streams.get(name) is stream:
            del self.streams[name]
            self.abort([engine_id for engine_id, job in self.jobs.items() if job.frontend_id == name])

    def submit(
        self, frontend_id: str, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None, answer: Done
    ) -> None:
        """Answers with None once the engine has the request, or with an exception."""
        if hand_over is not None:
            self._check_proof(ticket, hand_over)
        request = decode_request(frames)
        script = self.model.script_of(request.request_id)
        position = len(request.prompt_token_ids or ()) - script.num_prompt_tokens
        most = position + request.sampling_params.max_tokens
        job = DecodeJob(
            request.request_id,
            ticket,
            frontend_id,
            request,
            self.model.salt_of(request.request_id, request.sampling_params, self.engine),
            most if script.total is None else min(most, script.total),
            position,
        )
        if request.request_id in self.jobs:
            answer(ValueError(f"request id {request.request_id} is running already"))
            return
        self.jobs[request.request_id] = job
        if hand_over is None:
            self._enter(job, answer)
            return
        wait_ns = min(BEGIN_READ_NS, int(hand_over.deadline_s * SECOND))
        settled = [False]

        def may_read(found: Lease | Verdict | Exception) -> None:
            if settled[0]:
                return
            settled[0] = True
            drop = ev.ReaderDropped(job.key, (self.engine,))
            if isinstance(found, Lease) and not job.gone:
                job.lease, job.hand_over = found, hand_over
            elif isinstance(found, Lease | TimeoutError):
                self.node.tell(self, "drop_reader", drop)
            if not isinstance(found, Lease):
                verdict = found if isinstance(found, Verdict) else Verdict.MISSING
                self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
                tokens = len(request.prompt_token_ids or ())
                self.events.append(
                    ReplicaEvent(kind=ReplicaEventKind.RECOMPUTED, ticket_id=job.key[0], num_tokens=tokens)
                )
            self._enter(job, answer)

        self.node.begin_read(self, hand_over, self.engine, wait_ns, may_read, lambda: not (settled[0] or job.gone))
        self.later(wait_ns + SECOND, may_read, TimeoutError("the transfer actor is silent"))

    def _check_proof(self, ticket: Ticket, hand_over: HandOver) -> None:
        key = ticket.ticket_id, ticket.attempt
        for part in (hand_over, hand_over.seal, hand_over.lease):
            if (part.ticket_id, part.attempt) != key:
                text = f"{type(part).__name__} of {(part.ticket_id, part.attempt)} comes with ticket {key}"
                self.world.violations.append(f"{self.name}: {text}")

    def _enter(self, job: DecodeJob, answer: Done) -> None:
        if not job.gone:
            job.in_engine = True
            self.waiting.append(job)
            self._admit()
        answer(None)

    def abort(self, engine_ids: list[str]) -> None:
        """Idempotent."""
        for engine_id in engine_ids:
            if (job := self.jobs.get(engine_id)) is not None:
                self._drop(job)
        self._admit()

    def cancel(self, ticket_id: int, attempt: int) -> None:
        dropped = [j for j in self.jobs.values() if j.ticket.ticket_id == ticket_id and j.ticket.attempt <= attempt]
        self.abort([job.engine_id for job in dropped])
        for job in dropped:  # a frontend that still waits for it must not wait for ever
            output = EngineCoreOutput(job.engine_id, [], finish_reason=FinishReason.ABORT)
            self.put_out(job.frontend_id, [output])
