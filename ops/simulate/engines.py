"""Prefill, decode and transfer actors as cost models: what they say and hold is real, what they compute is time.

Staging is the product's own `Staging`. A page's bytes are modelled by who wrote them: opening compares that with what
the seal promises, so a late writer that hit somebody else's bytes would show as a mismatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actors.engine.integrity.ledger import FreeAnswer, Ledger, tag_epoch
from actors.messages import (
    Announcement,
    Fingerprint,
    HandOver,
    HeartbeatReply,
    Join,
    Lease,
    LeaseLost,
    Occupancy,
    Opened,
    OpenedAt,
    PrefillDone,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaHeartbeat,
    Role,
    Seal,
    Sealed,
    StagingStatus,
    Ticket,
    TransferEvent,
    TransferReport,
    Verdict,
)
from actors.transfer.staging import Key, Staging
from ops.simulate.world import MS, SECOND, Done, Net, Process, World

if TYPE_CHECKING:
    from ops.simulate.control import ControllerSim

HEARTBEAT_NS = SECOND // 2
PAGE_BYTES = 4096  # of a page's wire form in the model; only proportions matter
LAYOUT = {
    "num_layers": 2,
    "page_tokens": 32,
    "num_kv_heads": 1,
    "head_dim": 64,
    "order": "cpu_vec",
    "rounding": "nearest_even",
    "k_scales": [1.0],
    "v_scales": [1.0],
}


class Costs(Protocol):
    """What engine work takes, nanoseconds."""

    def prefill_ns(self, tokens: int) -> int: ...

    def step_ns(self, batch: int, context_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class LinearCosts:
    prefill_token_ns: int = 100_000
    step_base_ns: int = 20 * MS
    step_request_ns: int = 500_000
    step_token_ns: int = 100

    def prefill_ns(self, tokens: int) -> int:
        return tokens * self.prefill_token_ns

    def step_ns(self, batch: int, context_tokens: int) -> int:
        return self.step_base_ns + batch * self.step_request_ns + context_tokens * self.step_token_ns


class TransferSim(Process):
    """A node's transfer actor: the real staging allocator, seals, reports that are repeated until they arrive."""

    kind = "transfer"
    REPORT_NS = SECOND // 2

    def __init__(self, world: World, net: Net, name: str, bytes_max: int, lease_ns: int) -> None:
        super().__init__(world, name)
        self.net = net
        self.bytes_max = bytes_max
        self.lease_ns = lease_ns
        self.controller: ControllerSim | None = None
        self.taken_by_fault: Key | None = None
        self.bytes_moved = self.tokens_moved = 0
        self._reset()

    def _reset(self) -> None:
        self.staging = Staging(self.bytes_max)
        self.content: dict[int, Key] = {}  # offset of a page -> whose bytes lie there
        self.seals: dict[Key, Sealed] = {}
        self.events: list[TransferEvent] = []
        self.waiting: deque[tuple[Key, int, str, int, Done]] = deque()
        self.reporting = False
        self.granting = False

    def start(self, controller: ControllerSim) -> None:
        self.controller = controller
        self.later(self.REPORT_NS, self._tick)

    def reborn(self) -> None:
        super().reborn()
        self._reset()
        self.later(self.REPORT_NS, self._tick)

    # -- leases

    def lease(self, key: Key, num_bytes: int, engine: str, wait_ns: int, answer: Done) -> None:
        """Answers with a `Lease`, or None when there is no room within `wait_ns`."""
        self.waiting.append((key, num_bytes, engine, self.world.now_ns + wait_ns, answer))
        self._grant()

    def die(self) -> None:
        super().die()
        for *_, answer in self.waiting:
            self.world.at(2 * MS, answer, None)
        self.waiting.clear()

    def _grant(self) -> None:
        if self.granting:
            return  # an answer gave something back: the loop below sees it
        self.granting = True
        for _ in range(len(self.waiting)):
            key, num_bytes, engine, until_ns, answer = self.waiting.popleft()
            if self.staging.get(key) is not None or num_bytes > self.bytes_max:
                answer(None)  # asked twice, or never to be had
                continue
            region = self.staging.grant(key, num_bytes, self.world.now_ns + self.lease_ns)
            if region is not None:
                self.staging.open_writer(key, engine)
                answer(self._lease(key))
            elif self.world.now_ns >= until_ns:
                answer(None)
            else:
                self.waiting.append((key, num_bytes, engine, until_ns, answer))
        self.granting = False

    def _lease(self, key: Key) -> Lease:
        region = self.staging.get(key)
        assert region is not None
        segment = f"{self.name}/{self.life}"
        return Lease(
            ticket_id=key[0],
            attempt=key[1],
            node_id=self.name,
            segment=segment,
            offset=region.offset,
            num_bytes=region.num_bytes,
        )

    def write(self, lease: Lease, first_page: int, pages: int) -> None:
        """A worker half writes into shared memory: nobody can stop it, so the allocator must make it harmless."""
        if lease.segment == f"{self.name}/{self.life}":
            key = (lease.ticket_id, lease.attempt)
            for page in range(first_page, first_page + pages):
                self.content[lease.offset + page * PAGE_BYTES] = key

    def sealed(self, key: Key, engine: str, seal: Seal) -> None:
        region = self.staging.get(key)
        if region is not None and not region.released:
            self.seals[key] = Sealed(seal=seal, lease=self._lease(key))
            self._event(self.seals[key])
        self.staging.writer_done(key, engine)
        self._grant()

    def writer_done(self, key: Key, engine: str) -> None:
        self.staging.writer_done(key, engine)
        self.release([key])

    def begin_read(self, hand_over: HandOver, engine: str) -> Verdict:
        """`engine` empty: of another node, whose transfer actor copies the bytes in one go and holds nothing here."""
        key = (hand_over.ticket_id, hand_over.attempt)
        region = self.staging.get(key)
        if hand_over.lease.segment != f"{self.name}/{self.life}":
            return Verdict.MISSING
        if region is None or region.released:
            return Verdict.STALE
        return Verdict.OK if not engine or self.staging.open_reader(key, engine) else Verdict.STALE

    def read(self, hand_over: HandOver, engine: str) -> Verdict:
        """Opens the pages: do the bytes match the seal?"""
        key = (hand_over.ticket_id, hand_over.attempt)
        if hand_over.lease.segment != f"{self.name}/{self.life}":
            return Verdict.MISSING
        region = self.staging.get(key)
        if not engine and (region is None or region.released):
            return Verdict.STALE
        offsets = range(hand_over.lease.offset, hand_over.lease.offset + hand_over.lease.num_bytes, PAGE_BYTES)
        verdict = Verdict.OK if all(self.content.get(at) == key for at in offsets) else Verdict.MISMATCH
        self.staging.reader_done(key, engine)
        return verdict

    def opened(self, opened: Opened) -> None:
        if opened.ok:
            self.bytes_moved += opened.num_bytes
            self.tokens_moved += opened.num_tokens
        self._event(OpenedAt(opened=opened))
        self.release([(opened.ticket_id, opened.attempt)])

    def release(self, keys: list[Key]) -> None:
        for key in keys:
            if key != self.taken_by_fault:
                self.staging.release(key)
                self.seals.pop(key, None)
        self._grant()

    def engine_gone(self, engine: str) -> None:
        for key in self.staging.peer_gone(engine):
            if key not in self.seals:
                self.staging.release(key)
                self._event(LeaseLost(ticket_id=key[0], attempt=key[1], reason=f"engine {engine} is gone"))
        self._grant()

    # -- controller

    def _event(self, event: TransferEvent) -> None:
        self.events.append(event)
        self.later(0, self._report)

    def _tick(self) -> None:
        for key in self.staging.expire(self.world.now_ns):
            self.seals.pop(key, None)
            if key != self.taken_by_fault:
                self._event(LeaseLost(ticket_id=key[0], attempt=key[1], reason="the staging lease ran out"))
        self._grant()
        self._report()
        self.later(self.REPORT_NS, self._tick)

    def _report(self) -> None:
        if self.reporting or self.controller is None:
            return
        self.reporting = True
        events, self.events = tuple(self.events), []
        status = StagingStatus(
            node_id=self.name,
            incarnation=self.life,
            bytes_held=self.staging.bytes_held,
            bytes_max=self.staging.bytes_max,
            leases=len(self.staging),
            held=tuple(r.key for r in self.staging if not r.released and r.key != self.taken_by_fault),
            bytes_moved=self.bytes_moved,
            tokens_moved=self.tokens_moved,
            breaches=tuple(self.staging.breaches()),
        )

        def told(dead: list[Key]) -> None:
            self.reporting = False
            self.release(dead)
            if self.events:
                self._report()

        def failed(_: str) -> None:
            # The controller may be another one by now: it must hear of every seal that still waits for its reader.
            self.reporting = False
            again = [seal for seal in self.seals.values() if seal not in events]
            self.events = [*again, *events, *self.events]
            self.later(200 * MS, self._report)

        self.controller.call(self, TransferReport(status, tuple(events)), told, failed)


class ReplicaSim(Process):
    """What prefill and decode replicas share: joining, heartbeats, cancels."""

    role: Role

    def __init__(
        self, world: World, net: Net, name: str, node: TransferSim, costs: Costs, facts: dict[str, Any]
    ) -> None:
        super().__init__(world, name)
        self.net = net
        self.node = node
        self.costs = costs
        self.blocks_total: int = facts["blocks_total"]
        self.block_tokens: int = facts["block_tokens"]
        self.max_seqs: int = facts["max_seqs"]
        self.generation: str = facts.get("generation", "")
        self.events: list[ReplicaEvent] = []
        self.leaving = False
        self.controller: ControllerSim | None = None
        self.on_fenced: Callable[[ReplicaSim], None] = lambda replica: None
        self.tokens_generated = 0

    def start(self, controller: ControllerSim) -> None:
        self.controller = controller
        self._join()
        self.later(HEARTBEAT_NS, self._beat)

    def live_tickets(self) -> tuple[int, ...]:
        raise NotImplementedError

    def occupancy(self) -> Occupancy:
        raise NotImplementedError

    def abort(self, ticket_id: int, attempt: int) -> None:
        """That and earlier attempts; idempotent."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        return not self.live_tickets()

    def announcement(self) -> Announcement:
        dtype = "bfloat16" if self.role is Role.PREFILL else "float8_e4m3fn"
        return Announcement(
            replica_id=self.name,
            role=self.role,
            node_id=self.node.name,
            incarnation=self.life,
            fingerprint=Fingerprint(geometry={"layers": 2}, tokenizer="simulated"),
            layout=LAYOUT | {"dtype": dtype},
            block_tokens=self.block_tokens,
            blocks_total=self.blocks_total,
            max_model_len=1 << 20,
            tickets=self.live_tickets(),
            generation=self.generation,
        )

    def _join(self) -> None:
        assert self.controller is not None

        def again(_: str) -> None:
            self.later(200 * MS, self._join)

        self.controller.call(self, Join(self.announcement()), self._obey, again)

    def _beat(self) -> None:
        assert self.controller is not None
        events, self.events = tuple(self.events), []
        beat = ReplicaHeartbeat(replica_id=self.name, incarnation=self.life, occupancy=self.occupancy(), events=events)

        def failed(_: str) -> None:
            self.events = [*events, *self.events]

        self.controller.call(self, beat, self._obey, failed)
        self.later(HEARTBEAT_NS, self._beat)

    def _obey(self, reply: HeartbeatReply | Exception) -> None:
        if isinstance(reply, Exception):
            raise reply
        if not reply.known:
            self._join()
        for ticket_id, attempt in reply.cancel:
            self.abort(ticket_id, attempt)
        if reply.fenced:
            self.on_fenced(self)


@dataclass(slots=True)
class PrefillJob:
    ticket: Ticket
    lease: Lease | None
    tokens_left: int
    num_tokens: int
    answer: Done
    fail: Callable[[str], None]
    began_ns: int
    aborted: bool = False


class PrefillSim(ReplicaSim):
    """One prompt after another, in chunks; pages are written as they are computed and sealed at the end."""

    role = Role.PREFILL
    CHUNK = 512

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.jobs: dict[Key, PrefillJob] = {}
        self.seen: set[Key] = set()
        self.queue: deque[Key] = deque()
        self.busy = False

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(key[0] for key in self.jobs))

    def occupancy(self) -> Occupancy:
        held = sum(-(-(j.num_tokens - j.tokens_left) // self.block_tokens) for j in self.jobs.values())
        held = min(held, self.blocks_total)
        return Occupancy(
            blocks_total=self.blocks_total,
            blocks_free=self.blocks_total - held,
            blocks_held=held,
            running=len(self.jobs),
            waiting_prompt_tokens=sum(job.tokens_left for job in self.jobs.values()),
        )

    def die(self) -> None:
        super().die()
        jobs, self.jobs, self.busy = self.jobs, {}, False
        self.queue.clear()
        self.events = []
        for job in jobs.values():
            job.aborted = True
        if self.node.alive:
            self.world.at(5 * MS, self.node.engine_gone, f"{self.name}/{self.life}")

    def prefill(self, ticket: Ticket, num_tokens: int, answer: Done) -> None:
        """Answers with `PrefillDone`, or with a string that says why not; a doubled call with nothing."""
        key = (ticket.ticket_id, ticket.attempt)
        if key in self.seen:
            return
        self.seen.add(key)
        if not self.node.alive:
            answer("the transfer actor is away")
            return
        job = PrefillJob(ticket, None, num_tokens, num_tokens, answer, answer, self.world.now_ns)
        self.jobs[key] = job
        life = self.life
        pages = -(-num_tokens // self.block_tokens)

        def leased(lease: Lease | None) -> None:
            if not self.alive or self.life != life:
                if lease is not None:
                    self.node.writer_done(key, f"{self.name}/{life}")
                return
            if lease is None or job.aborted:
                if lease is not None:
                    self.node.writer_done(key, f"{self.name}/{life}")
                if self.jobs.pop(key, None) is not None:
                    answer("no staging room")
                return
            job.lease = lease
            self.queue.append(key)
            self._work()

        wait_ns = int(ticket.deadline_s * SECOND / 2)
        self.node.lease(key, pages * PAGE_BYTES, f"{self.name}/{life}", wait_ns, leased)

    def _work(self) -> None:
        if self.busy or not self.queue:
            return
        self.busy = True
        key = self.queue[0]
        job = self.jobs[key]
        if job.tokens_left == job.num_tokens:
            self.events.append(ReplicaEvent(kind=ReplicaEventKind.PREFILL_STARTED, ticket_id=key[0]))
        chunk = min(self.CHUNK, job.tokens_left)
        self.later(int(self.costs.prefill_ns(chunk) * self.slow), self._chunk_done, key, chunk)

    def _chunk_done(self, key: Key, chunk: int) -> None:
        self.busy = False
        job = self.jobs.get(key)
        if job is not None and job.lease is not None:
            # Also for a job that was aborted in this chunk: the kernel was running.
            first = (job.num_tokens - job.tokens_left) // self.block_tokens
            job.tokens_left -= chunk
            last = -(-(job.num_tokens - job.tokens_left) // self.block_tokens)
            self.node.write(job.lease, first, last - first)
            if job.aborted:
                self._drop(key)
            elif job.tokens_left <= 0:
                self._finish(key, job)
        self._work()

    def _finish(self, key: Key, job: PrefillJob) -> None:
        self._forget(key)
        pages = -(-job.num_tokens // self.block_tokens)
        digests = (tuple(hash((key, page)) & 0xFFFF for page in range(pages)),)
        seal = Seal(
            ticket_id=key[0], attempt=key[1], layout_fingerprint="sim", num_tokens=job.num_tokens, digests=digests
        )
        if self.node.alive:
            self.node.sealed(key, f"{self.name}/{self.life}", seal)
        seconds = (self.world.now_ns - job.began_ns) / SECOND
        job.answer(
            PrefillDone(
                ticket_id=key[0], attempt=key[1], num_tokens=job.num_tokens, num_cached_tokens=0, seconds=seconds
            )
        )

    def _forget(self, key: Key) -> None:
        self.jobs.pop(key, None)
        if key in self.queue:
            self.queue.remove(key)

    def _drop(self, key: Key) -> None:
        job = self.jobs.get(key)
        self._forget(key)
        if job is not None and self.node.alive:
            self.node.writer_done(key, f"{self.name}/{self.life}")
        if job is not None:
            job.answer("aborted")

    def abort(self, ticket_id: int, attempt: int) -> None:
        for key in [key for key in self.jobs if key[0] == ticket_id and key[1] <= attempt]:
            job = self.jobs[key]
            job.aborted = True
            if job.lease is not None and not (self.busy and self.queue and self.queue[0] == key):
                self._drop(key)  # not in a running chunk; one that is runs to the chunk's end


@dataclass(slots=True)
class DecodeJob:
    ticket: Ticket
    frontend_id: str
    request_key: str
    prompt_tokens: int
    done_tokens: int  # positions already out
    total_tokens: int
    hand_over: HandOver | None
    blocks: int = 0
    to_compute: int = 0  # prompt (and replayed) tokens this replica computes itself
    ready: bool = False
    started: bool = False
    aborted: bool = False
    arrived_ns: int = 0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.done_tokens


@dataclass(slots=True)
class Stream:
    """One frontend's token stream from one decode replica: ordered, and broken as a whole."""

    deliver: Callable[[list[tuple[Key, int, int, bool]]], None]
    broken: Callable[[str], None] = lambda reason: None
    last_ns: int = 0
    open: bool = True


class PagePool:
    """A decode engine's pages: the product's own ledger, and in the place of vLLM's block pool a free list and counts.

    Page 0 is the null page, as in vLLM. Pages that were freed last are handed out last.
    """

    def __init__(self, num_pages: int, epoch: int) -> None:
        self.refs = [0] * (num_pages + 1)
        self.free = deque(range(1, num_pages + 1))
        self.ledger = Ledger(num_pages + 1, epoch, self.refs.__getitem__)
        self.held: dict[str, list[int]] = {}

    def take(self, owner: str, count: int) -> None:
        """`count` more pages at the end of the owner's table; the caller has seen that there are as many."""
        pages = []
        for _ in range(count):
            page = self.free.popleft()
            assert self.ledger.may_hand_out(page), f"page {page} is not to be handed out"
            self.ledger.allocated(page)
            self.refs[page] += 1
            pages.append(page)
        mine = self.held.setdefault(owner, [])
        self.ledger.claim(owner, len(mine), pages)
        mine += pages

    def give_back(self, owner: str) -> None:
        """Everything the owner has: an end, an abort or a preemption."""
        self.ledger.release(owner)
        for page in reversed(self.held.pop(owner, [])):
            if self.ledger.free(page) is not FreeAnswer.REFUSE:
                self.refs[page] -= 1
                self.free.append(page)

    def breaches(self, idle: bool) -> list[str]:
        """The ledger's laws against the pool as it is, and every breach that it saw happen since the last call."""
        laws = self.ledger.idle_breaches(self.free) if idle else self.ledger.breaches(self.free)
        return laws + [str(breach) for breach in self.ledger.kept_breaches(forget=True)]


class DecodeSim(ReplicaSim):
    """Continuous batching over KV blocks, with waiting for blocks and preemption of the youngest.

    With `pages` the blocks are real pages under the product's ledger; without, they are a number (large pools, where
    only time is asked for).
    """

    role = Role.DECODE
    quantum = 4  # steps a simulated event at most, once every request has its first token

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.jobs: dict[Key, DecodeJob] = {}
        self.waiting: deque[Key] = deque()
        self.running: list[Key] = []
        self.streams: dict[str, Stream] = {}
        self.free = self.blocks_total
        self.pages: PagePool | None = None
        self.stepping = False
        self.preempted = 0
        self.recomputed_tokens = 0
        self.peak_running = 0

    def live_tickets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(key[0] for key in self.jobs))

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

    def breaches(self) -> list[str]:
        held = sum(job.blocks for job in self.jobs.values())
        found = [] if held + self.free == self.blocks_total else [f"{held} held + {self.free} free"]
        if self.pages is not None:
            found += self.pages.breaches(idle=not self.jobs)
            if len(self.pages.free) != self.free:
                found.append(f"{len(self.pages.free)} pages are free, {self.free} blocks are counted")
        return [f"{self.name}: {text}" for text in found]

    def _take(self, key: Key, job: DecodeJob, blocks: int) -> None:
        self.free -= blocks
        job.blocks += blocks
        if self.pages is not None:
            self.pages.take(str(key), blocks)

    def _give_back(self, key: Key, job: DecodeJob) -> None:
        self.free += job.blocks
        job.blocks = 0
        if self.pages is not None:
            self.pages.give_back(str(key))

    def die(self) -> None:
        super().die()
        for job in self.jobs.values():
            job.aborted = True
        self.jobs, self.running, self.stepping = {}, [], False
        self.events = []
        self.waiting.clear()
        self.free = self.blocks_total
        if self.pages is not None:
            self.keep_pages()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.open = False
            self.world.at(2 * MS + self.world.random.randrange(20 * MS), stream.broken, f"{self.name} died")
        if self.node.alive:
            self.world.at(5 * MS, self.node.engine_gone, f"{self.name}/{self.life}")

    # -- requests

    def submit(self, job: DecodeJob, stream: Stream) -> str:
        """Empty when taken, else why not."""
        key = (job.ticket.ticket_id, job.ticket.attempt)
        if key in self.jobs:
            return ""  # said twice
        for old in [k for k in self.jobs if k[0] == key[0]]:
            if old[1] > key[1]:
                return "a later attempt is here already"
            self._drop(old)
        standing = self.streams.get(job.frontend_id)
        if not stream.open:
            return "the stream is not open"
        if standing is not stream:
            self.stream_closed(job.frontend_id)  # the old one broke; what went over it is lost
            self.streams[job.frontend_id] = stream
        job.arrived_ns = self.world.now_ns
        self.jobs[key] = job
        self.waiting.append(key)
        self._admit()
        return ""

    def stream_closed(self, frontend_id: str) -> None:
        """The frontend is gone, or the link is: whatever it has here is aborted."""
        stream = self.streams.pop(frontend_id, None)
        if stream is not None:
            stream.open = False
        for key in [key for key, job in self.jobs.items() if job.frontend_id == frontend_id]:
            self._drop(key)
        self._admit()

    def abort(self, ticket_id: int, attempt: int) -> None:
        for key in [key for key in self.jobs if key[0] == ticket_id and key[1] <= attempt]:
            self._drop(key)
        self._admit()

    def _drop(self, key: Key) -> None:
        job = self.jobs.pop(key)
        job.aborted = True
        self._give_back(key, job)
        if key in self.waiting:
            self.waiting.remove(key)
        if key in self.running:
            self.running.remove(key)
        self.events.append(ReplicaEvent(kind=ReplicaEventKind.RELEASED, ticket_id=key[0]))

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _admit(self) -> None:
        while self.waiting and sum(1 for j in self.jobs.values() if j.blocks) < self.max_seqs:
            key = self.waiting[0]
            job = self.jobs[key]
            need = self._need(job.context + 1)
            if need > self.free:
                break
            self.waiting.popleft()
            self._take(key, job, need)
            if job.hand_over is not None:
                self._open(key, job)
            else:
                job.to_compute = job.context
                self._compute(key, job)
        self._step()

    def _open(self, key: Key, job: DecodeJob) -> None:
        hand_over, job.hand_over = job.hand_over, None
        assert hand_over is not None
        source = self.node_of(hand_over.lease.node_id)
        engine = f"{self.name}/{self.life}" if source is self.node else ""
        verdict = source.begin_read(hand_over, engine) if source is not None and source.alive else Verdict.MISSING
        began_ns = self.world.now_ns
        move_ns = 2 * MS + hand_over.lease.num_bytes // 10

        def moved() -> None:
            found = verdict
            if found is Verdict.OK:
                assert source is not None
                found = source.read(hand_over, engine) if source.alive else Verdict.MISSING
            pages = len(hand_over.seal.digests[0])
            opened = Opened(
                ticket_id=key[0],
                attempt=key[1],
                replica_id=self.name,
                num_pages=pages,
                num_bytes=hand_over.lease.num_bytes,
                num_tokens=hand_over.seal.num_tokens,
                verdicts={found: pages},
                seconds=(self.world.now_ns - began_ns) / SECOND,
            )
            if self.node.alive:
                self.node.opened(opened)
            if job.aborted:
                return
            job.to_compute = job.context - hand_over.seal.num_tokens if found is Verdict.OK else job.context
            self.on_verdict(found)
            self._compute(key, job)

        self.later(move_ns, moved)

    def node_of(self, node_id: str) -> TransferSim | None:
        """Set by the cluster: the transfer actor that holds the bytes."""
        return self.node if node_id == self.node.name else None

    def on_verdict(self, verdict: Verdict) -> None:
        """Set by the cluster: a checker watches."""

    def _compute(self, key: Key, job: DecodeJob) -> None:
        """What was not handed over is computed here, beside the running steps."""
        if job.to_compute > 1:
            self.recomputed_tokens += job.to_compute
            if job.prompt_tokens > job.to_compute:
                self.events.append(
                    ReplicaEvent(kind=ReplicaEventKind.RECOMPUTED, ticket_id=key[0], num_tokens=job.to_compute)
                )
        self.later(int(self.costs.prefill_ns(max(1, job.to_compute)) * self.slow), self._ready, key, job)

    def _ready(self, key: Key, job: DecodeJob) -> None:
        if not job.aborted and job.blocks:
            job.ready = True
            self.running.append(key)
            self.peak_running = max(self.peak_running, len(self.running))
            self._step()

    # -- steps

    def _step(self) -> None:
        if self.stepping or not self.running:
            return
        self.stepping = True
        jobs = [self.jobs[key] for key in self.running]
        steps = min(self.quantum, min(job.total_tokens - job.done_tokens for job in jobs))
        if any(not job.started for job in jobs):
            steps = 1
        context = sum(job.context for job in jobs)
        self.later(
            int(self.costs.step_ns(len(jobs), context) * steps * self.slow), self._stepped, list(self.running), steps
        )

    def _stepped(self, keys: list[Key], steps: int) -> None:
        self.stepping = False
        outputs: dict[str, list[tuple[Key, int, int, bool]]] = {}
        for key in keys:
            job = self.jobs.get(key)
            if job is None or not job.ready or not self._grow(key, job, steps):
                continue
            first = job.done_tokens
            job.done_tokens += steps
            self.tokens_generated += steps
            finished = job.done_tokens >= job.total_tokens
            if not job.started:
                job.started = True
                self.events.append(ReplicaEvent(kind=ReplicaEventKind.DECODE_STARTED, ticket_id=key[0]))
            outputs.setdefault(job.frontend_id, []).append((key, first, steps, finished))
            if finished:
                self._drop(key)
        for frontend_id, batch in outputs.items():
            self._send(frontend_id, batch)
        self._admit()

    def _grow(self, key: Key, job: DecodeJob, steps: int) -> bool:
        """Blocks for the next tokens; False when this request itself had to give way."""
        need = self._need(job.context + steps) - job.blocks
        while need > self.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim == key:
                return False
        self._take(key, job, max(0, need))
        return True

    def _preempt(self, key: Key) -> None:
        job = self.jobs[key]
        self.preempted += 1
        self.running.remove(key)
        self._give_back(key, job)
        job.ready = False
        self.waiting.appendleft(key)

    def _send(self, frontend_id: str, batch: list[tuple[Key, int, int, bool]]) -> None:
        stream = self.streams.get(frontend_id)
        if stream is None or not stream.open:
            return
        dice = self.world.random
        delay_ns = self.net.base_ns + int(dice.random() * self.net.spread_ns)
        for weather in self.net.weather:
            if weather.covers("tokens"):
                if dice.random() < weather.drop:
                    # A stream has no gaps: losing a message is losing the stream, and both ends learn it.
                    self.world.at(Net.ERROR_NS, stream.broken, "connection lost")
                    self.stream_closed(frontend_id)
                    return
                if dice.random() < weather.delay:
                    delay_ns += int(dice.random() * weather.delay_ns)
        when_ns = max(stream.last_ns, self.world.now_ns + delay_ns)
        stream.last_ns = when_ns
        self.world.at(when_ns - self.world.now_ns, self._deliver, stream, batch)

    @staticmethod
    def _deliver(stream: Stream, batch: list[tuple[Key, int, int, bool]]) -> None:
        if stream.open:
            stream.deliver(batch)
