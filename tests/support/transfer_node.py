"""A transfer machine with a clock by hand, and the messages that its engines send."""

from __future__ import annotations

from actors.messages import HandOver, Lease, LeaseLost, Opened, Seal, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import PagesOpened, PagesSealed, StagingMapped
from actors.transfer.machine import TransferMachine
from actors.transfer.staging import Key

MIB = 1 << 20


SECOND = 1_000_000_000


LEASE_NS = 60 * SECOND


class Node:
    """A machine with a clock, whose answers and reports are kept."""

    def __init__(self, num_bytes: int = 16 * MIB, *engines: str, name: str = "here") -> None:
        self.machine = TransferMachine(name, 1, f"{name}-1", num_bytes, LEASE_NS)
        self.now_ns = 0
        self.answers: dict[int, object] = {}
        self.effects: list[ev.Effect] = []
        self.reported: list[object] = []
        self._calls = 0
        self._links = 0
        for engine in engines or ("p#0", "d#0"):
            self.connect(engine)

    def step(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.machine.step(event, self.now_ns)
        for effect in effects:
            if isinstance(effect, (ev.Answer, ev.Refuse)):
                assert effect.call_id not in self.answers, "a call is answered once"
                self.answers[effect.call_id] = effect.value if isinstance(effect, ev.Answer) else effect
            if isinstance(effect, ev.Report):
                self.reported += effect.events
        assert self.machine.violations() == []
        self.effects += effects
        if any(isinstance(effect, ev.Report) for effect in effects):
            self.step(ev.ReportAnswered(()))
        return effects

    def connect(self, engine: str, maps: bool = True) -> list[ev.Effect]:
        self._links += 1
        effects = self.step(ev.EngineConnected(engine, self._links))
        if maps:
            self.mapped(engine)
        return effects

    def mapped(self, engine: str, *dropped: Key) -> None:
        segment = self.machine.segment
        self.step(ev.FromEngine(engine, StagingMapped(segment=segment, dropped=list(dropped))))

    def at(self, seconds: float) -> None:
        self.now_ns = int(seconds * SECOND)
        self.step(ev.Tick())

    def ask(self, ticket_id: int, num_bytes: int = MIB, *engines: str, wait_s: float = 15) -> int:
        self._calls += 1
        wait_ns = int(wait_s * SECOND)
        self.step(ev.LeaseAsked(self._calls, (ticket_id, 1), num_bytes, engines or ("p#0",), wait_ns))
        return self._calls

    def lease(self, ticket_id: int, num_bytes: int = MIB, *engines: str) -> Lease:
        lease = self.answers[self.ask(ticket_id, num_bytes, *engines)]
        assert isinstance(lease, Lease)
        return lease

    def read(self, over: HandOver, *engines: str, wait_s: float = 6) -> int:
        self._calls += 1
        self.step(ev.ReadAsked(self._calls, over, engines or ("d#0",), int(wait_s * SECOND)))
        return self._calls

    def seal(self, ticket_id: int, engine: str = "p#0", shard: int = 0, num_shards: int = 1) -> None:
        self.step(ev.FromEngine(engine, sealed(ticket_id, shard=shard, num_shards=num_shards)))

    def lost(self) -> dict[Key, str]:
        return {(each.ticket_id, each.attempt): each.reason for each in self.reported if isinstance(each, LeaseLost)}


def sealed(ticket_id: int, first_page: int = 0, last: bool = True, shard: int = 0, num_shards: int = 1) -> PagesSealed:
    return PagesSealed(
        ticket_id=ticket_id,
        attempt=1,
        shard=shard,
        num_shards=num_shards,
        first_page=first_page,
        digests=[1, 2],
        layout_fingerprint="l",
        num_tokens=64,
        last=last,
    )


def opened(ticket_id: int, shard: int = 0, num_shards: int = 1) -> PagesOpened:
    part = Opened(
        ticket_id=ticket_id,
        attempt=1,
        replica_id="d",
        num_pages=2,
        num_bytes=100,
        num_tokens=64,
        verdicts={Verdict.OK: 2},
        seconds=0.1,
    )
    return PagesOpened(opened=part, shard=shard, num_shards=num_shards)


def fetched(fetch_id: int, complete: bool = True, num_bytes: int = MIB) -> ev.FetchEnded:
    return ev.FetchEnded(fetch_id, ev.Measured("far", "direct", complete, num_bytes if complete else 0, 1_000_000))


def hand_over(lease: Lease) -> HandOver:
    seal = Seal(ticket_id=lease.ticket_id, attempt=1, layout_fingerprint="l", num_tokens=64, digests=((1, 2),))
    return HandOver(ticket_id=lease.ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=30.0)
