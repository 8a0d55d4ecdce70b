"""A node's transfer machine against a model that knows only who can physically touch which bytes.

Invariants:
1. Bytes are never lent while an engine, a fetch or a copy can still touch them for another key.
2. Every call is answered exactly once, at the latest when its deadline has passed.
3. A key gets bytes at most once, and never after its end.
4. A writer that is done without a complete seal is reported in the same step, with its ticket's bytes released.
5. A seal is reported only when every shard has sealed its pages, and is reported again to a controller that failed.
6. Who waits first and can be reached gets what is free: no lease waits beside memory that would do.
7. While a lease waits at the front, the stretch kept for it is not lent to one that came later.
8. A report that fails is repeated: events reach the controller at least once, in order.
9. Nothing leaks: when engines and copies have ended and time has passed, all bytes are free and no table has an entry.
10. `violations()` is empty after every step.
11. An opening is reported once, when every shard has reported it, and only for engines that were reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transfer_node import fetched

from actors.messages import HandOver, Lease, LeaseLost, Opened, OpenedAt, Seal, Sealed, TransferEvent, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import PagesOpened, PagesSealed, StagingMapped, WriterDone
from actors.transfer.machine import TransferMachine
from actors.transfer.staging import ALIGN_BYTES, Key, aligned

PAGES = 8
WRITERS = ("p#0", "p#1")
READERS = ("d#0", "d#1")
TICKETS = st.integers(1, 6)
LEASE_NS = 100


@dataclass(slots=True)
class Touch:
    """What can touch these bytes now, whatever the machine thinks."""

    who: str
    key: Key
    first: int
    last: int


@dataclass(slots=True)
class Model:
    touching: list[Touch] = field(default_factory=list)
    lent: dict[Key, int] = field(default_factory=dict)  # every offset ever given
    ended: set[Key] = field(default_factory=set)
    sealed_shards: dict[Key, set[int]] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)  # call -> deadline
    opened_shards: dict[Key, set[int]] = field(default_factory=dict)
    fetches: dict[int, Key] = field(default_factory=dict)
    copies: dict[int, Key] = field(default_factory=dict)
    sizes: dict[Key, int] = field(default_factory=dict)
    engines: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of the call
    keys: dict[int, Key] = field(default_factory=dict)
    fetched: set[Key] = field(default_factory=set)  # asked for from another node


class TransferLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = TransferMachine("n", 1, "n-1", PAGES * ALIGN_BYTES, LEASE_NS)
        self.model = Model()
        self.now = 0
        self.calls = 0
        self.links = 0
        self.link_of: dict[str, int] = {}
        self.report: tuple[TransferEvent, ...] | None = None
        self.heard: list[TransferEvent] = []
        self.just_lost: set[Key] = set()
        self.attempt = 1

    @initialize()
    def all_engines_connect(self) -> None:
        for engine in (*WRITERS, *READERS):
            self.connect(engine)

    # -- the actor that carries the machine

    def step(self, event: ev.Event) -> None:
        model = self.model
        welcomed: list[ev.Welcome] = []
        for effect in self.machine.step(event, self.now):
            match effect:
                case ev.Answer(call_id, value):
                    assert call_id in model.pending, "answered twice"  # 2
                    del model.pending[call_id]
                    if isinstance(value, Lease):
                        self.lend(call_id, value)
                case ev.Refuse(call_id):
                    assert self.model.keys[call_id] in model.fetched, f"{effect} for what fits, or is held"  # 3
                    del model.pending[call_id]
                case ev.StartFetch(fetch_id, source, offset):
                    key = (source.ticket_id, source.attempt)
                    model.fetches[fetch_id] = key
                    self.touch(f"fetch:{fetch_id}", key, offset, source.num_bytes)
                case ev.CopyOut(call_id, offset, num_bytes):
                    del model.pending[call_id]
                    model.touching.append(Touch(f"copy:{call_id}", model.copies[call_id], offset, offset + num_bytes))
                case ev.Welcome(engine, link):
                    assert self.link_of[engine] == link
                    welcomed.append(effect)
                case ev.Report(_, events):
                    assert self.report is None, "one report at a time"
                    self.report = events
        assert self.machine.violations() == []  # 10
        for welcome in welcomed:  # its worker lets go next; the tests of the machine have the late case
            dropped = list(welcome.revoked)
            for key in dropped:
                self.let_go(welcome.engine, key)
            self.step(ev.FromEngine(welcome.engine, StagingMapped(segment=self.machine.segment, dropped=dropped)))

    def touch(self, who: str, key: Key, offset: int, num_bytes: int) -> None:
        for other in self.model.touching:
            apart = other.last <= offset or offset + aligned(num_bytes) <= other.first
            assert apart or other.key == key, f"{who} gets bytes that {other.who} can touch"  # 1
        self.model.touching.append(Touch(who, key, offset, offset + num_bytes))

    def lend(self, call_id: int, lease: Lease) -> None:
        key = (lease.ticket_id, lease.attempt)
        assert self.model.lent.setdefault(key, lease.offset) == lease.offset  # 3
        assert key not in self.model.ended  # 3
        self.model.sizes[key] = lease.num_bytes
        for engine in self.model.engines[call_id]:
            if not any(t.who == engine and t.key == key for t in self.model.touching):
                self.touch(engine, key, lease.offset, lease.num_bytes)

    def let_go(self, who: str, key: Key) -> None:
        self.model.touching = [t for t in self.model.touching if (t.who, t.key) != (who, key)]

    def call(self, key: Key, engines: tuple[str, ...], wait: int) -> int:
        self.calls += 1
        self.model.pending[self.calls] = self.now + wait
        self.model.engines[self.calls], self.model.keys[self.calls] = engines, key
        return self.calls

    def connect(self, engine: str) -> None:
        self.links += 1
        self.link_of[engine] = self.links
        self.step(ev.EngineConnected(engine, self.links))

    # -- calls

    @rule(ticket=TICKETS, pages=st.integers(1, PAGES), both=st.booleans(), wait=st.integers(1, 30))
    def lease(self, ticket: int, pages: int, both: bool, wait: int) -> None:
        key = (ticket, self.attempt)
        held = self.machine.staging.get(key)
        num_bytes = held.num_bytes if held else pages * ALIGN_BYTES - 5
        engines = WRITERS if both else WRITERS[:1]
        if (waiting := self.machine.queue.get(key)) is not None:  # repeated by Ray: the same replica asks, for the same
            num_bytes, engines = waiting.num_bytes, waiting.engines
        if held is not None:
            engines = ()  # the same, and who asked first writes
        self.step(ev.LeaseAsked(self.call(key, engines, wait), key, num_bytes, engines, wait))

    @rule()
    def another_attempt(self) -> None:
        self.attempt += 1

    @rule(ticket=TICKETS)
    def drop_writer(self, ticket: int) -> None:
        """Only a replica whose engines never began calls this."""
        key = (ticket, self.attempt)
        if self.model.sealed_shards.get(key):
            return
        for engine in WRITERS:
            self.let_go(engine, key)
        self.model.ended.add(key)
        self.step(ev.WriterDropped(key, WRITERS))

    @rule(ticket=TICKETS)
    def release(self, ticket: int) -> None:
        key = (ticket, self.attempt)
        self.model.ended.add(key)
        self.step(ev.Released((key,)))

    @rule(ticket=TICKETS, far=st.booleans(), pages=st.integers(1, PAGES), wait=st.integers(1, 30))
    def read(self, ticket: int, far: bool, pages: int, wait: int) -> None:
        key = (ticket, self.attempt)
        held = self.machine.staging.get(key)
        node, num_bytes = ("far", pages * ALIGN_BYTES) if far else ("n", held.num_bytes if held else 1)
        if far and (self.machine.queue.get(key) is not None or held is not None):
            return
        segment = "far-1" if far else self.machine.segment
        lease = Lease(
            ticket_id=ticket, attempt=self.attempt, node_id=node, segment=segment, offset=0, num_bytes=num_bytes
        )
        seal = Seal(ticket_id=ticket, attempt=self.attempt, layout_fingerprint="l", num_tokens=1, digests=((1,),))
        if far:
            self.model.fetched.add(key)
        over = HandOver(ticket_id=ticket, attempt=self.attempt, seal=seal, lease=lease, deadline_s=1.0)
        self.step(ev.ReadAsked(self.call(key, READERS, wait), over, READERS, wait))

    @rule(ticket=TICKETS)
    def drop_reader(self, ticket: int) -> None:
        key = (ticket, self.attempt)
        if key in self.machine.opening:
            return
        for engine in READERS:
            self.let_go(engine, key)
        self.model.ended.add(key)
        self.step(ev.ReaderDropped(key, READERS))

    @precondition(lambda self: self.machine.outbox.standing)
    @rule(data=st.data())
    def piece(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([sealed.lease for sealed in self.machine.outbox.standing.values()]))
        key = (lease.ticket_id, lease.attempt)
        call = self.call(key, (), 0)
        self.model.copies[call] = key
        self.step(ev.PieceAsked(call, lease, 0, 1))

    # -- what engines and copies do

    @precondition(lambda self: any(t.who in WRITERS for t in self.model.touching))
    @rule(data=st.data(), last=st.booleans(), gap=st.booleans())
    def seal(self, data: st.DataObject, last: bool, gap: bool) -> None:
        touch = data.draw(st.sampled_from([t for t in self.model.touching if t.who in WRITERS]))
        writers = {t.who for t in self.model.touching if t.key == touch.key and t.who in WRITERS}
        shards = self.model.sealed_shards.setdefault(touch.key, set())
        num_shards = len(writers | {WRITERS[shard] for shard in shards})
        shard = WRITERS.index(touch.who)
        held = self.machine.staging.get(touch.key)
        alive = held is not None and not held.released
        message = PagesSealed(
            ticket_id=touch.key[0],
            attempt=touch.key[1],
            shard=shard,
            num_shards=num_shards,
            first_page=3 if gap else 0,
            digests=[1],
            layout_fingerprint="l",
            num_tokens=1,
            last=last,
        )
        if last:
            self.let_go(touch.who, touch.key)
            if not gap:
                shards.add(shard)
        self.step(ev.FromEngine(touch.who, message))
        if gap and alive:
            assert self.machine.staging.get(touch.key) is None or self.machine.staging.get(touch.key).released  # 4
            self.model.ended.add(touch.key)

    @precondition(lambda self: any(t.who in WRITERS for t in self.model.touching))
    @rule(data=st.data())
    def writer_gives_up(self, data: st.DataObject) -> None:
        touch = data.draw(st.sampled_from([t for t in self.model.touching if t.who in WRITERS]))
        held = self.machine.staging.get(touch.key)
        alive = held is not None and not held.released
        self.let_go(touch.who, touch.key)
        self.step(ev.FromEngine(touch.who, WriterDone(ticket_id=touch.key[0], attempt=touch.key[1])))
        if alive:
            events = [*self.heard, *(self.report or ()), *self.machine.outbox.unheard]
            lost = {(e.ticket_id, e.attempt) for e in events if isinstance(e, LeaseLost)}
            assert touch.key in lost  # 4
            self.model.ended.add(touch.key)

    @precondition(lambda self: any(t.who in READERS for t in self.model.touching))
    @rule(data=st.data(), twice=st.booleans())
    def open(self, data: st.DataObject, twice: bool) -> None:
        touch = data.draw(st.sampled_from([t for t in self.model.touching if t.who in READERS]))
        opened = Opened(
            ticket_id=touch.key[0],
            attempt=touch.key[1],
            replica_id="d",
            num_pages=1,
            num_bytes=1,
            num_tokens=1,
            verdicts={Verdict.OK: 1},
            seconds=0.0,
        )
        self.let_go(touch.who, touch.key)
        shard = READERS.index(touch.who)
        self.model.opened_shards.setdefault(touch.key, set()).add(shard)
        for _ in range(1 + twice):
            self.step(ev.FromEngine(touch.who, PagesOpened(opened=opened, shard=shard, num_shards=2)))

    @rule(engine=st.sampled_from(READERS), ticket=TICKETS)
    def reports_what_it_does_not_read(self, engine: str, ticket: int) -> None:
        key = (ticket, self.attempt)
        if any((t.who, t.key) == (engine, key) for t in self.model.touching):
            return
        opened = Opened(
            ticket_id=ticket,
            attempt=self.attempt,
            replica_id="d",
            num_pages=1,
            num_bytes=1,
            num_tokens=1,
            verdicts={Verdict.OK: 1},
            seconds=0.0,
        )
        self.step(ev.FromEngine(engine, PagesOpened(opened=opened, shard=READERS.index(engine), num_shards=2)))

    @rule(engine=st.sampled_from((*WRITERS, *READERS)))
    def link_breaks(self, engine: str) -> None:
        self.step(ev.EngineDetached(engine, self.link_of[engine]))

    @rule(engine=st.sampled_from((*WRITERS, *READERS)))
    def connects(self, engine: str) -> None:
        self.connect(engine)

    @rule(engine=st.sampled_from((*WRITERS, *READERS)), latest=st.booleans())
    def process_ends(self, engine: str, latest: bool) -> None:
        if latest:
            self.model.touching = [t for t in self.model.touching if t.who != engine]
        self.step(ev.EngineGone(engine, self.link_of[engine] - (not latest)))

    @precondition(lambda self: self.model.fetches)
    @rule(data=st.data(), complete=st.booleans(), twice=st.booleans())
    def fetch_ends(self, data: st.DataObject, complete: bool, twice: bool) -> None:
        fetch_id = data.draw(st.sampled_from(sorted(self.model.fetches)))
        self.let_go(f"fetch:{fetch_id}", self.model.fetches.pop(fetch_id))
        for _ in range(1 + twice):
            self.step(fetched(fetch_id, complete))

    @precondition(lambda self: any(t.who.startswith("copy:") for t in self.model.touching))
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        touch = data.draw(st.sampled_from([t for t in self.model.touching if t.who.startswith("copy:")]))
        self.model.touching.remove(touch)
        self.step(ev.CopiedOut(int(touch.who.removeprefix("copy:"))))

    # -- time and the controller

    @rule(by=st.integers(1, 60))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.step(ev.Tick())
        assert not [c for c, until in self.model.pending.items() if until <= self.now]  # 2

    @precondition(lambda self: self.report is not None)
    @rule(fails=st.booleans())
    def report_ends(self, fails: bool) -> None:
        assert self.report is not None
        events, self.report = self.report, None
        if fails:
            standing = list(self.machine.outbox.standing.values())
            self.step(ev.ReportFailed())
            unheard = [*(self.report or ()), *self.machine.outbox.unheard]
            assert [e for e in unheard if e in events] == list(events)  # 8
            assert all(sealed in unheard for sealed in standing)  # 5
        else:
            self.heard += events
            for event in events:
                if isinstance(event, OpenedAt):
                    key = (event.opened.ticket_id, event.opened.attempt)
                    assert len(self.model.opened_shards.pop(key)) == 2, "once, and of both shards"  # 11
                if isinstance(event, Sealed):
                    key = (event.seal.ticket_id, event.seal.attempt)
                    assert len(event.seal.digests) == len(self.model.sealed_shards[key])  # 5
            self.step(ev.ReportAnswered(()))

    # -- laws

    @invariant()
    def no_lease_waits_beside_memory_that_would_do(self) -> None:
        for waiting in self.machine.queue:
            if self.machine.engines.ready(waiting.engines):
                holes = self.machine.staging._holes
                assert all(size < aligned(waiting.num_bytes) for _, size in holes)  # 6
                kept = self.machine.queue.kept
                assert kept is not None and kept[0] == waiting.key  # 7, with law 7 of the machine
                return

    def teardown(self) -> None:
        for engine in (*WRITERS, *READERS):
            self.model.touching = [t for t in self.model.touching if t.who != engine]
            self.step(ev.EngineGone(engine, self.link_of[engine]))
        for _ in range(3):
            self.now += 10 * LEASE_NS
            self.step(ev.Tick())
            for fetch_id in list(self.model.fetches):
                self.let_go(f"fetch:{fetch_id}", self.model.fetches.pop(fetch_id))
                self.step(fetched(fetch_id))
            for touch in list(self.model.touching):
                self.model.touching.remove(touch)
                self.step(ev.CopiedOut(int(touch.who.removeprefix("copy:"))))
        machine = self.machine
        assert machine.staging.bytes_held == 0 and not self.model.pending and not len(machine.queue)  # 9
        assert not machine.copies and not machine.fetches.running and not machine.fetches.wanted  # 9
        assert not machine.outbox.standing and not list(machine.opening) and not len(machine.seals)  # 9


TransferLaws.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTransferLaws = TransferLaws.TestCase
