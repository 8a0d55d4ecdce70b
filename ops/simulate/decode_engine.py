"""A decode engine: continuous batching over KV blocks, with waiting for blocks and preemption of the youngest.

With `pages` the blocks are real pages under the shipped ledger; without, they are a number (large pools, where only
time is asked for).
"""

from __future__ import annotations

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
from actors.transfer.channel import PagesOpened
from actors.transfer.staging import Key
from ops.simulate.model import advance, generate
from ops.simulate.pages import PagePool
from ops.simulate.replica import ReplicaSim
from ops.simulate.world import MS, SECOND

PREFIXES_KEPT = 256


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
    turn: int = 0  # how often it was preempted
    ready: bool = False  # its prompt is in the cache: it takes part in steps
    started: bool = False
    gone: bool = False

    @property
    def context(self) -> int:
        return len(self.request.prompt_token_ids) + self.generated

    @property
    def key(self) -> Key:
        return self.ticket.ticket_id, self.ticket.attempt


class DecodeEngine(ReplicaSim):
    role = Role.DECODE
    open_page_ns = 50_000
    quantum = 4  # steps a simulated event at most, once every request has its first token

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.jobs: dict[str, DecodeJob] = {}  # by engine id
        self.waiting: deque[DecodeJob] = deque()
        self.running: list[DecodeJob] = []  # as vLLM's list: also those whose prompt is computed now
        self.prefixes: dict[tuple[str, int], int] = {}  # cached prompts: (salt, state after it) -> tokens
        self.verdicts: dict[Verdict, int] = {}
        self.free = self.blocks_total
        self.pages: PagePool | None = None
        self.stepping = False
        self.preempted = 0
        self.recomputed_tokens = 0
        self.peak_running = 0

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

    def put_out(self, frontend_id: str, outputs: list[EngineCoreOutput]) -> None:
        """What one engine step has for one frontend."""
        raise NotImplementedError

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

    def mismatch(self, choice: int) -> str:
        """A step's check finds a page that is not the request's own: it ends before a token leaves. Its engine id."""
        ready = [job for job in self.running if job.ready]
        if not ready:
            return ""
        job = ready[choice % len(ready)]
        self.events.append(
            ReplicaEvent(kind=ReplicaEventKind.TAG_MISMATCH, ticket_id=job.key[0], request_id=job.engine_id)
        )
        self._drop(job)
        output = EngineCoreOutput(job.engine_id, [], finish_reason=FinishReason.ERROR, stop_reason=PAGE_INTEGRITY)
        self.put_out(job.frontend_id, [output])
        self._admit()
        return job.engine_id

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
        elif lease is None or not self.staging.may_touch(lease):
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
        self.running.append(job)
        self.later(int(self.costs.prefill_ns(max(1, tokens)) * self.slow), self._ready, job, job.turn)

    def _ready(self, job: DecodeJob, turn: int) -> None:
        if job.gone or job.turn != turn:
            return
        job.ready = True
        self.prefixes[(job.request.cache_salt or "", job.state)] = job.context
        while len(self.prefixes) > PREFIXES_KEPT:
            del self.prefixes[next(iter(self.prefixes))]
        self.peak_running = max(self.peak_running, sum(job.ready for job in self.running))
        self._step()

    # -- the engine: steps

    def _step(self) -> None:
        jobs = [job for job in self.running if job.ready]
        if self.stepping or not jobs:
            return
        self.stepping = True
        steps = min(self.quantum, min(job.total - job.position for job in jobs))
        if any(not job.started for job in jobs):
            steps = 1
        context = sum(job.context for job in jobs)
        self.later(int(self.costs.step_ns(len(jobs), context) * steps * self.slow), self._stepped, jobs, steps)

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
            self.put_out(frontend_id, batch)
        self._admit()

    def _generate(self, job: DecodeJob, steps: int) -> EngineCoreOutput:
        tokens, job.state = generate(job.state, job.salt, steps)
        job.generated += steps
        job.position += steps
        self.tokens_generated += steps
        if not job.started:
            job.started = True
            self.events.append(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=job.ticket.ticket_id))
        finish = FinishReason.STOP if job.position >= job.total else None
        return EngineCoreOutput(job.engine_id, tokens, finish_reason=finish)

    def _grow(self, job: DecodeJob, steps: int) -> bool:
        """Blocks for the next tokens; False when this request itself had to give way.

        The one that came last gives way, also while its prompt is computed: if it did not, two that fill the pool would
        take turns for ever.
        """
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
        job.turn, job.ready = job.turn + 1, False
        self.waiting.appendleft(job)
