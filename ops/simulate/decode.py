"""A decode replica: continuous batching over KV blocks, with waiting for blocks and preemption of the youngest.

With `pages` the blocks are real pages under the shipped ledger; without, they are a number (large pools, where only
time is asked for).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from actors.engine.integrity.ledger import tag_epoch
from actors.messages import (
    PAGE_INTEGRITY,
    HandOver,
    Lease,
    Occupancy,
    Opened,
    ReplicaEvent,
    ReplicaEventKind,
    Role,
    Ticket,
    Verdict,
)
from actors.transfer import events as ev
from actors.transfer.channel import PagesOpened
from actors.transfer.staging import Key
from ops.simulate.model import advance, next_token
from ops.simulate.network import Net
from ops.simulate.pages import PagePool
from ops.simulate.replica import ReplicaSim, decode_request, encode_outputs
from ops.simulate.world import MS, SECOND, Done, Process

BEGIN_READ_NS = 6 * SECOND
PREFIXES_KEPT = 256


class TokenStream:
    """One frontend's output stream from one decode replica: ordered, and broken as a whole. Frames or None (broken)."""

    def __init__(self, net: Net, frontend: Process, replica: DecodeSim) -> None:
        self.frontend = frontend
        self.queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self.open = True
        self._net = net
        self._replica = replica
        self._last_ns = 0

    def push(self, frames: list[bytes]) -> None:
        world, delay_ns = self._net.world, self._net.stream_delay_ns("tokens")
        if delay_ns is None:
            # A stream has no gaps: losing a message is losing the stream, and both ends learn it.
            self.break_off(Net.ERROR_NS)
            self._replica.stream_closed(self)
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
        self._replica.later(MS, self._replica.stream_closed, self)

    def _deliver(self, frames: list[bytes]) -> None:
        if self.open:
            self.queue.put_nowait(frames)


@dataclass(slots=True)
class DecodeJob:
    engine_id: str
    ticket: Ticket
    frontend_id: str
    request: Any  # EngineCoreRequest
    salt: int
    total: int  # positions that it puts out at most, those of its prompt's end included
    position: int  # of the next token
    lease: Lease | None = None  # of a hand-over that is to be opened
    hand_over: HandOver | None = None
    state: int = 0  # of the model after all that it has read
    generated: int = 0
    blocks: int = 0
    in_engine: bool = False
    opening: bool = False
    ready: bool = False
    started: bool = False
    gone: bool = False

    @property
    def context(self) -> int:
        return len(self.request.prompt_token_ids) + self.generated

    @property
    def key(self) -> Key:
        return self.ticket.ticket_id, self.ticket.attempt


class DecodeSim(ReplicaSim):
    role = Role.DECODE
    open_page_ns = 50_000
    quantum = 4  # steps a simulated event at most, once every request has its first token

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.jobs: dict[str, DecodeJob] = {}  # by engine id
        self.waiting: deque[DecodeJob] = deque()
        self.running: list[DecodeJob] = []
        self.streams: dict[str, TokenStream] = {}
        self.prefixes: dict[tuple[str, int], int] = {}  # cached prompts: (salt, state after it) -> tokens
        self.verdicts: dict[Verdict, int] = {}
        self.free = self.blocks_total
        self.pages: PagePool | None = None
        self.stepping = False
        self.preempted = 0
        self.recomputed_tokens = 0
        self.peak_running = 0

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(job.ticket.ticket_id for job in self.jobs.values()))

    @property
    def empty(self) -> bool:
        return super().empty and not self.streams

    def occupancy(self) -> Occupancy:
        return Occupancy(
            blocks_total=self.blocks_total,
            blocks_free=self.free,
            blocks_held=self.blocks_total - self.free,
            running=len(self.running),
            waiting=len(self.waiting),
        )

    def keep_pages(self) -> None:
        """From now on every block is a page of the ledger."""
        self.pages = PagePool(self.blocks_total, tag_epoch(self.name, self.life))

    def violations(self) -> list[str]:
        held = sum(job.blocks for job in self.jobs.values())
        found = [] if held + self.free == self.blocks_total else [f"{held} held + {self.free} free"]
        if self.pages is not None:
            found += self.pages.violations(idle=not self.jobs)
            if len(self.pages.free) != self.free:
                found.append(f"{len(self.pages.free)} pages are free, {self.free} blocks are counted")
        return [f"{self.name}: {text}" for text in found]

    def die(self) -> None:
        super().die()
        for job in self.jobs.values():
            job.gone = True
        self.jobs, self.running, self.stepping = {}, [], False
        self.waiting.clear()
        self.free = self.blocks_total
        if self.pages is not None:
            self.keep_pages()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.break_off(2 * MS + self.world.random.randrange(20 * MS))

    def works_on(self, key: Key, frontend: Process) -> bool:
        """Whether the ticket's request runs here and its tokens get out."""
        stream = self.streams.get(frontend.name)
        up = self.alive and not self.hung and not self.leaving and stream is not None and stream.open
        return up and any(job.key == key for job in self.running)

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

        self.node.begin_read(self, hand_over, self.engine, wait_ns, may_read)
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
            self._send(job, EngineCoreOutput(job.engine_id, [], finish_reason=FinishReason.ABORT))

    def forget_leases(self, keys: tuple[Key, ...]) -> None:
        for job in self.jobs.values():
            if job.key in keys:
                job.lease = None

    def mismatch(self, choice: int) -> str:
        """A step's check finds a page that is not the request's own: it ends before a token leaves. Its engine id."""
        if not self.running:
            return ""
        job = self.running[choice % len(self.running)]
        self.events.append(
            ReplicaEvent(kind=ReplicaEventKind.TAG_MISMATCH, ticket_id=job.key[0], request_id=job.engine_id)
        )
        self._drop(job)
        output = EngineCoreOutput(job.engine_id, [], finish_reason=FinishReason.ERROR, stop_reason=PAGE_INTEGRITY)
        self._send(job, output)
        self._admit()
        return job.engine_id

    def _drop(self, job: DecodeJob) -> None:
        del self.jobs[job.engine_id]
        job.gone = True
        self._give_back(job)
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.running:
            self.running.remove(job)
        if job.lease is not None and not job.opening:
            self._report_opened(job, {}, 0.0)
        self.events.append(ReplicaEvent(kind=ReplicaEventKind.RELEASED, ticket_id=job.ticket.ticket_id))

    def _send(self, job: DecodeJob, output: EngineCoreOutput) -> None:
        if (stream := self.streams.get(job.frontend_id)) is not None:
            stream.push(encode_outputs([output], self.world.now_ns))

    # -- the engine: blocks, opening

    def _take(self, job: DecodeJob, blocks: int) -> None:
        self.free -= blocks
        job.blocks += blocks
        if self.pages is not None:
            self.pages.take(job.engine_id, blocks)

    def _give_back(self, job: DecodeJob) -> None:
        self.free += job.blocks
        job.blocks = 0
        if self.pages is not None:
            self.pages.give_back(job.engine_id)

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _admit(self) -> None:
        while self.waiting and sum(1 for j in self.jobs.values() if j.blocks) < self.max_seqs:
            job = self.waiting[0]
            need = self._need(job.context + 1)
            if need > self.free:
                break
            self.waiting.popleft()
            self._take(job, need)
            if job.generated:
                self._compute(job, job.context)
            elif self._cached(job):
                if job.lease is not None:
                    self._report_opened(job, {}, 0.0)
                self._compute(job, 1)
            elif job.lease is not None:
                self._open(job)
            else:
                self._compute(job, job.context)
        self._step()

    def _cached(self, job: DecodeJob) -> bool:
        job.state = advance(0, job.request.prompt_token_ids)
        return (job.request.cache_salt or "", job.state) in self.prefixes

    def _open(self, job: DecodeJob) -> None:
        assert job.lease is not None and job.hand_over is not None
        job.opening = True
        began_ns = self.world.now_ns
        open_ns = self.open_page_ns * len(job.hand_over.seal.digests[0])
        self.later(2 * MS + int(open_ns * self.slow), self._opened, job, began_ns)

    def _opened(self, job: DecodeJob, began_ns: int) -> None:
        lease, hand_over = job.lease, job.hand_over
        assert hand_over is not None
        seal = hand_over.seal
        state = None
        if job.gone:
            verdict = Verdict.STALE
        elif lease is None:
            verdict = Verdict.MISSING
        else:
            pages = [self.node.read(lease, page) for page in range(len(seal.digests[0]))]
            good = all(page is not None and page.digest == digest for page, digest in zip(pages, seal.digests[0]))
            verdict = Verdict.OK if good else Verdict.MISMATCH
            state = pages[-1].state if good and pages[-1] is not None else None
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        if lease is not None:
            job.lease = lease
            self._report_opened(job, {verdict: len(seal.digests[0])}, (self.world.now_ns - began_ns) / SECOND)
        if job.gone:
            return
        if state is None:
            self._compute(job, job.context)
            return
        rest = job.request.prompt_token_ids[seal.num_tokens :]
        job.state = advance(state, rest)
        self._compute(job, 1 + len(rest))

    def _report_opened(self, job: DecodeJob, verdicts: dict[Verdict, int], seconds: float) -> None:
        """The engine touches these bytes no more."""
        assert job.lease is not None and job.hand_over is not None
        opened = Opened(
            ticket_id=job.key[0],
            attempt=job.key[1],
            replica_id=self.name,
            num_pages=sum(verdicts.values()),
            num_bytes=job.lease.num_bytes if verdicts else 0,
            num_tokens=job.hand_over.seal.num_tokens if verdicts else 0,
            verdicts=verdicts,
            seconds=seconds,
        )
        job.lease = None
        self.node.from_engine(self.engine, PagesOpened(opened=opened))

    def _compute(self, job: DecodeJob, tokens: int) -> None:
        """What was not handed over is computed here, beside the running steps."""
        if tokens > 1:
            self.recomputed_tokens += tokens
        self.later(int(self.costs.prefill_ns(max(1, tokens)) * self.slow), self._ready, job)

    def _ready(self, job: DecodeJob) -> None:
        if job.gone or not job.blocks:
            return
        job.ready = True
        self.prefixes[(job.request.cache_salt or "", job.state)] = job.context
        while len(self.prefixes) > PREFIXES_KEPT:
            del self.prefixes[next(iter(self.prefixes))]
        self.running.append(job)
        self.peak_running = max(self.peak_running, len(self.running))
        self._step()

    # -- the engine: steps

    def _step(self) -> None:
        if self.stepping or not self.running:
            return
        self.stepping = True
        jobs = self.running
        steps = min(self.quantum, min(job.total - job.position for job in jobs))
        if any(not job.started for job in jobs):
            steps = 1
        context = sum(job.context for job in jobs)
        self.later(int(self.costs.step_ns(len(jobs), context) * steps * self.slow), self._stepped, list(jobs), steps)

    def _stepped(self, jobs: list[DecodeJob], steps: int) -> None:
        self.stepping = False
        outputs: dict[str, list[EngineCoreOutput]] = {}
        for job in jobs:
            if job.gone or not job.ready or not self._grow(job, steps):
                continue
            outputs.setdefault(job.frontend_id, []).append(self._generate(job, steps))
            if job.position >= job.total:
                self._drop(job)
        for frontend_id, batch in outputs.items():
            if (stream := self.streams.get(frontend_id)) is not None:
                stream.push(encode_outputs(batch, self.world.now_ns))
        self._admit()

    def _generate(self, job: DecodeJob, steps: int) -> EngineCoreOutput:
        tokens = []
        for _ in range(steps):
            token = next_token(job.state, job.salt)
            job.state = advance(job.state, (token,))
            tokens.append(token)
        job.generated += steps
        job.position += steps
        self.tokens_generated += steps
        if not job.started:
            job.started = True
            self.events.append(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=job.ticket.ticket_id))
        finish = FinishReason.STOP if job.position >= job.total else None
        return EngineCoreOutput(job.engine_id, tokens, finish_reason=finish)

    def _grow(self, job: DecodeJob, steps: int) -> bool:
        """Blocks for the next tokens; False when this request itself had to give way."""
        need = self._need(job.context + steps) - job.blocks
        while need > self.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is job:
                return False
        self._take(job, max(0, need))
        return True

    def _preempt(self, job: DecodeJob) -> None:
        self.preempted += 1
        self.running.remove(job)
        self._give_back(job)
        job.ready = False
        self.waiting.appendleft(job)
