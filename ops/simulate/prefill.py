"""A prefill replica: one prompt after another, in chunks; pages are sealed into staging as they are computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from actors.messages import Lease, Occupancy, PrefillDone, ReplicaEvent, ReplicaEventKind, Role, Ticket
from actors.transfer import events as ev
from actors.transfer.channel import PagesSealed, WriterDone
from actors.transfer.staging import Key
from ops.simulate.model import advance, next_token, page_states
from ops.simulate.network import Cancel
from ops.simulate.node import Content
from ops.simulate.replica import PAGE_BYTES, ReplicaSim, decode_request, encode_outputs
from ops.simulate.world import SECOND, Done


class PrefillRefused(Exception):
    """No staging room in time, or the engine gave the prompt up."""


@dataclass(slots=True)
class PrefillJob:
    ticket: Ticket
    request: Any  # EngineCoreRequest
    answer: Done
    began_ns: int
    lease: Lease | None = None
    computed: int = 0  # tokens
    state: int = 0  # of the model after them
    digests: list[int] = field(default_factory=list)
    sealed: int = 0  # pages said to be sealed
    aborted: bool = False

    @property
    def key(self) -> Key:
        return self.ticket.ticket_id, self.ticket.attempt

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class PrefillSim(ReplicaSim):
    role = Role.PREFILL
    CHUNK = 512

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.jobs: dict[Key, PrefillJob] = {}
        self.queue: deque[PrefillJob] = deque()  # in the engine; the first one is being computed
        self.busy = False

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(key[0] for key in self.jobs))

    def occupancy(self) -> Occupancy:
        held = min(sum(-(-job.computed // self.block_tokens) for job in self.jobs.values()), self.blocks_total)
        return Occupancy(
            blocks_total=self.blocks_total,
            blocks_free=self.blocks_total - held,
            blocks_held=held,
            running=len(self.jobs),
            waiting_prompt_tokens=sum(job.num_tokens - job.computed for job in self.jobs.values()),
        )

    def die(self) -> None:
        super().die()
        self.jobs, self.busy = {}, False
        self.queue.clear()

    # -- what the engine server does

    def prefill(self, ticket: Ticket, frames: list[bytes], answer: Done) -> Cancel:
        """Answers with `PrefillDone` or an exception. Returns how the call is cancelled."""
        job = PrefillJob(ticket, decode_request(frames), answer, self.world.now_ns)
        self.jobs[job.key] = job
        num_bytes = -(-job.num_tokens // self.block_tokens) * PAGE_BYTES
        wait_ns = int(ticket.deadline_s * SECOND) // 2
        settled = [False]

        def leased(lease: Lease | Exception | None) -> None:
            if settled[0]:
                return
            settled[0] = True
            if isinstance(lease, Lease) and not job.aborted:
                job.lease = lease
                self.events.append(ReplicaEvent(kind=ReplicaEventKind.PREFILL_STARTED, ticket_id=ticket.ticket_id))
                self.queue.append(job)
                self._work()
                return
            self.node.tell(self, "drop_writer", ev.WriterDropped(job.key, (self.engine,)))
            self._end(job, PrefillRefused(f"no staging room for {num_bytes} bytes: {lease}"))

        self.node.lease(self, job.key, num_bytes, self.engine, wait_ns, leased, lambda: not (settled[0] or job.aborted))
        self.later(wait_ns + SECOND, leased, TimeoutError("the transfer actor is silent"))
        return lambda: self._abort(job)

    def cancel(self, ticket_id: int, attempt: int) -> None:
        for job in [job for key, job in self.jobs.items() if key[0] == ticket_id and key[1] <= attempt]:
            self._abort(job)

    def _abort(self, job: PrefillJob) -> None:
        if job.aborted or self.jobs.get(job.key) is not job:
            return
        job.aborted = True
        if job.lease is None:
            self.node.tell(self, "drop_writer", ev.WriterDropped(job.key, (self.engine,)))
        else:
            self.node.tell(self, "release", ev.Released((job.key,)))
        if job not in self.queue or not (self.busy and self.queue[0] is job):
            self._drop(job)  # not in a running chunk; one that is runs to the chunk's end
        self._end(job, PrefillRefused("aborted"))

    def _end(self, job: PrefillJob, value: Any) -> None:
        if self.jobs.pop(job.key, None) is not None:
            self.events.append(ReplicaEvent(kind=ReplicaEventKind.RELEASED, ticket_id=job.ticket.ticket_id))
            job.answer(value)

    # -- the engine

    def _drop(self, job: PrefillJob) -> None:
        """The engine has let go of a request that was not sealed to its end."""
        if job in self.queue:
            self.queue.remove(job)
        if job.lease is not None:
            self._writer_done(job)

    def _writer_done(self, job: PrefillJob) -> None:
        job.lease = None
        self.node.from_engine(self.engine, WriterDone(ticket_id=job.key[0], attempt=job.key[1]))

    def _work(self) -> None:
        if self.busy or not self.queue:
            return
        self.busy = True
        job = self.queue[0]
        tokens = min(self.CHUNK, job.num_tokens - job.computed)
        self.later(int(self.costs.prefill_ns(max(1, tokens)) * self.slow), self._chunk_done, job, tokens)

    def _chunk_done(self, job: PrefillJob, tokens: int) -> None:
        self.busy = False
        self._seal(job, tokens)
        if job.aborted:
            self._drop(job)
        elif job.computed == job.num_tokens:
            self.queue.popleft()
            self._end(job, self._done(job))
        self._work()

    def _seal(self, job: PrefillJob, tokens: int) -> None:
        """Computes the chunk; the pages that are complete with it are written and sealed.

        As in the shipped worker half, the hand-over ends with the first page that cannot be written; the step goes on.
        """
        if job.lease is not None and not self.staging.may_touch(job.lease):
            self.staging.revoke((job.key,))
            self._writer_done(job)
        prompt, page, size = job.request.prompt_token_ids, job.computed // self.block_tokens, self.block_tokens
        end = job.computed + tokens
        last, whole = end == job.num_tokens, (end // size - page) * size
        states = page_states(job.state, prompt[page * size : page * size + whole], size)
        job.state = states[-1] if states else job.state
        if last and end % size:  # a chunk starts with a page, and only the last one ends within one
            job.state = advance(job.state, prompt[end - end % size : end])
            states.append(job.state)
        job.computed = end
        for number, state in enumerate(states, page):
            content = Content(*job.key, number, state)
            job.digests.append(content.digest)
            if job.lease is not None:
                self.node.write(job.lease, number, content)
        if job.lease is None:
            return
        message = PagesSealed(
            ticket_id=job.key[0],
            attempt=job.key[1],
            shard=0,
            num_shards=1,
            first_page=job.sealed,
            digests=job.digests[job.sealed :],
            layout_fingerprint="simulated",
            num_tokens=job.num_tokens,
            last=last,
        )
        job.sealed = len(job.digests)
        self.node.from_engine(self.engine, message)

    def _done(self, job: PrefillJob) -> PrefillDone:
        request, script = job.request, self.model.script_of(job.request.request_id)
        token = next_token(job.state, self.model.salt_of(request.request_id, request.sampling_params, self.engine))
        position = job.num_tokens - script.num_prompt_tokens + 1
        output = EngineCoreOutput(
            request_id=f"{job.ticket.request_id}.{job.ticket.attempt}",
            new_token_ids=[token],
            finish_reason=FinishReason.STOP if position == script.total else None,
        )
        return PrefillDone(
            ticket_id=job.key[0],
            attempt=job.key[1],
            num_tokens=job.num_tokens,
            num_cached_tokens=0,
            seconds=(self.world.now_ns - job.began_ns) / SECOND,
            output=encode_outputs([output], self.world.now_ns),
        )
