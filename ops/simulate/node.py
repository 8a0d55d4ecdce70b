"""A node's transfer actor: the shipped `TransferMachine` in a simulated process, and the staging memory it leases out.

A page's bytes are modelled by what they say: whose they are, and what the model knows after reading them. Opening
compares them with the seal, so bytes of another ticket show as a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.messages import HandOver, Lease, TransferReport
from actors.transfer import events as ev
from actors.transfer.channel import StagingMapped
from actors.transfer.machine import TransferMachine
from actors.transfer.staging import Key
from ops.simulate.fetches import FetchSim
from ops.simulate.network import Cancel, Handler, Net
from ops.simulate.replica import PAGE_BYTES
from ops.simulate.world import MS, SECOND, Done, Process, World

if TYPE_CHECKING:
    from ops.simulate.controller import ControllerSim
    from ops.simulate.replica import ReplicaSim

TICK_NS = 250 * MS
SOCKET_NS = 50_000
RECONNECT_NS = SECOND // 2
COPY_NS_PER_BYTE = 0.1
CALL_AGAIN_NS = SECOND // 4
CALL_TRIES = 100
Wanted = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Content:
    """What one page of staging memory holds: page `ordinal` of a ticket's prompt; `state` is the model's after it."""

    ticket_id: int
    attempt: int
    ordinal: int
    state: int

    @property
    def digest(self) -> int:
        return hash((self.ticket_id, self.attempt, self.ordinal, self.state)) & ((1 << 63) - 1)


class NodeSim(Process):
    kind = "transfer"

    def __init__(self, world: World, net: Net, name: str, bytes_max: int, lease_ns: int) -> None:
        super().__init__(world, name)
        self.net = net
        self.bytes_max = bytes_max
        self.lease_ns = lease_ns
        self.controller: ControllerSim | None = None
        self.peers: dict[str, NodeSim] = {}  # every node of the cluster, this one too
        self.engines: dict[str, ReplicaSim] = {}  # replicas on this node whose process lives
        self.fetches = 0
        self._links = 0
        self._memories: dict[str, dict[int, Content]] = {}
        self._reset()

    def _reset(self) -> None:
        self.machine = TransferMachine(self.name, self.life, self.segment, self.bytes_max, self.lease_ns)
        # Offset of a page -> what lies there. Engines keep what they have mapped, whatever becomes of the actor.
        self.memory = self._memories.setdefault(self.segment, {})
        self._answers: dict[int, Done] = {}
        self._last_call = 0
        self._link_of: dict[str, int] = {}  # engines that are connected
        self._watched: dict[str, int] = {}  # latest link of each engine whose process lives, ended or not
        self.stopped: set[int] = set()  # fetches that are not waited for

    @property
    def segment(self) -> str:
        return f"{self.name}/{self.life}"

    def start(self, controller: ControllerSim) -> None:
        self.controller = controller
        self.later(0, self._tick)

    def die(self) -> None:
        super().die()
        for replica in self.engines.values():
            replica.staging.drop()

    def reborn(self) -> None:
        super().reborn()
        self._reset()
        self.later(0, self._tick)
        for replica in self.engines.values():
            self.later(self.world.random.randrange(RECONNECT_NS), self._connect, replica.engine)

    # -- the machine

    def step(self, event: ev.Event) -> None:
        for effect in self.machine.step(event, self.world.now_ns):
            self._perform(effect)

    def _tick(self) -> None:
        self.step(ev.Tick())
        self.later(TICK_NS, self._tick)

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Answer():
                self._answer(effect.call_id, effect.value)
            case ev.Refuse():
                self._answer(effect.call_id, ValueError(effect.message))
            case ev.CopyOut():
                self._copy_out(effect)
            case ev.StartFetch():
                self._start_fetch(effect)
            case ev.StopFetch():
                self.stopped.add(effect.fetch_id)
            case ev.StopCopy():
                pass  # a copy here is short
            case ev.Welcome():
                self._welcome(effect)
            case ev.Report():
                self._report(effect)
            case ev.MakeStaging():
                self.later(MS, self.step, ev.StagingMade(self.segment, effect.bytes_max))

    def _answer(self, call_id: int, value: Any) -> None:
        answer = self._answers.pop(call_id, None)
        if answer is None:
            self.world.violations.append(f"{self.name}: call {call_id} is answered and does not wait")
        else:
            answer(value)

    def next_call(self, answer: Done) -> int:
        self._last_call += 1
        self._answers[self._last_call] = answer
        return self._last_call

    def _report(self, effect: ev.Report) -> None:
        assert self.controller is not None

        def answered(dead: list[Key]) -> None:
            self.step(ev.ReportAnswered(tuple(dead)))

        def failed(_: str) -> None:
            self.step(ev.ReportFailed())

        self.controller.call(self, TransferReport(effect.status, effect.events), answered, failed)

    # -- calls of replicas on this node

    def lease(
        self, source: Process, key: Key, num_bytes: int, engine: str, wait_ns: int, done: Done, wanted: Wanted
    ) -> None:
        """`done` gets a `Lease`, None when there was no room, or an exception."""

        def handler(answer: Done) -> Cancel | None:
            self.step(ev.LeaseAsked(self.next_call(answer), key, num_bytes, (engine,), wait_ns))
            return None

        self._repeated(source, "lease", handler, done, wanted)

    def begin_read(
        self, source: Process, hand_over: HandOver, engine: str, wait_ns: int, done: Done, wanted: Wanted
    ) -> None:
        """`done` gets a `Lease` of this node or a `Verdict`."""

        def handler(answer: Done) -> Cancel | None:
            self.step(ev.ReadAsked(self.next_call(answer), hand_over, (engine,), wait_ns))
            return None

        self._repeated(source, "begin_read", handler, done, wanted)

    def tell(self, source: Process, kind: str, event: ev.Event) -> None:
        """A call without an answer."""

        def handler(answer: Done) -> Cancel | None:
            self.step(event)
            answer(None)
            return None

        self._repeated(source, kind, handler, lambda _: None, lambda: True)

    def _repeated(
        self, source: Process, kind: str, handler: Handler, done: Done, wanted: Wanted, tries: int = CALL_TRIES
    ) -> None:
        """As a replica does: what is lost, or its answer, is asked again, in this actor's next life too.

        Not once the answer is `wanted` no more: the shipped `TransferClient` ends with who waits for it.
        """

        def again(_: str) -> None:
            if tries and wanted():
                source.later(CALL_AGAIN_NS, once_more)

        def once_more() -> None:
            if wanted():
                self._repeated(source, kind, handler, done, wanted, tries - 1)

        self.net.call(source, self, kind, handler, done, again)

    # -- engines: a local socket, which keeps order and ends with either process

    def attach(self, replica: ReplicaSim) -> None:
        self.engines[replica.engine] = replica
        if self.alive:
            self._connect(replica.engine)

    def _connect(self, engine: str) -> None:
        if engine in self.engines:
            self._links += 1
            self._link_of[engine] = self._watched[engine] = self._links
            self.step(ev.EngineConnected(engine, self._links))

    def from_engine(self, engine: str, message: Any) -> None:
        """What an engine says is dropped when it has no link."""
        if self.alive and engine in self._link_of:
            self.later(SOCKET_NS, self._arrived, engine, self._link_of[engine], message)

    def _arrived(self, engine: str, link: int, message: Any) -> None:
        if self._link_of.get(engine) == link:
            self.step(ev.FromEngine(engine, message))

    def engine_died(self, engine: str) -> None:
        """The kernel says so of every process that has ever connected, whether its link stands or not."""
        self.engines.pop(engine, None)
        if self.alive and engine in self._watched:
            self.later(5 * MS, self._gone, engine, self._watched[engine])

    def _gone(self, engine: str, link: int) -> None:
        if self._watched.get(engine) == link:
            del self._watched[engine]
            self._link_of.pop(engine, None)
            self.step(ev.EngineGone(engine, link))

    def break_link(self, engine: str) -> None:
        """The connection ends and the process lives; it comes back a moment later."""
        if self.alive and (link := self._link_of.pop(engine, None)) is not None:
            if (replica := self.engines.get(engine)) is not None:
                replica.staging.drop()
            self.later(SOCKET_NS, self._detached, engine, link)
            self.later(RECONNECT_NS, self._reconnect, engine)

    def _detached(self, engine: str, link: int) -> None:
        self.step(ev.EngineDetached(engine, link))

    def _reconnect(self, engine: str) -> None:
        if engine not in self._link_of:
            self._connect(engine)

    def occupy(self, share: float, duration_ns: int) -> None:
        """A stuck engine leases `share` of the free bytes and does not let go before it dies, `duration_ns` later."""
        engine = f"stuck#{self._links}"
        self._links += 1
        link = self._links
        num_bytes = int(self.machine.staging.bytes_free * share) // PAGE_BYTES * PAGE_BYTES
        if num_bytes:
            self._link_of[engine] = self._watched[engine] = link
            self.step(ev.EngineConnected(engine, link))
            self.step(ev.FromEngine(engine, StagingMapped(segment=self.machine.segment)))
            self.step(ev.LeaseAsked(self.next_call(lambda lease: None), (-link, self.life), num_bytes, (engine,), 0))
            self.later(duration_ns, self._gone, engine, link)

    def _welcome(self, effect: ev.Welcome) -> None:
        replica = self.engines.get(effect.engine)
        if replica is not None:
            replica.later(SOCKET_NS, self._map, replica, effect.link, self.machine.segment, effect.revoked)

    def _map(self, replica: ReplicaSim, link: int, segment: str, revoked: tuple[Key, ...]) -> None:
        if self._link_of.get(replica.engine) == link:
            replica.staging.replace(segment, revoked)
            self.from_engine(replica.engine, StagingMapped(segment=segment, dropped=list(revoked)))

    # -- bytes

    def write(self, lease: Lease, page: int, content: Content) -> None:
        """An engine writes into memory that it has mapped: nothing can stop it, so the leases must make it harmless."""
        self._must_hold("writes", lease.segment, (lease.ticket_id, lease.attempt), lease.offset)
        self._memories[lease.segment][lease.offset + page * PAGE_BYTES] = content

    def read(self, lease: Lease, page: int) -> Content | None:
        self._must_hold("reads", lease.segment, (lease.ticket_id, lease.attempt), lease.offset)
        return self._memories[lease.segment].get(lease.offset + page * PAGE_BYTES)

    def _must_hold(self, does: str, segment: str, key: Key, offset: int) -> None:
        region = self.machine.staging.get(key)
        held = region is not None and region.offset <= offset < region.offset + region.size
        if segment == self.segment and not held:
            self.world.violations.append(
                f"{self.name}: ticket {key} {does} staging bytes that are not its own any more"
            )

    def _copy_out(self, effect: ev.CopyOut) -> None:
        """Copies in two halves some time apart, as a real copy sees memory change under it."""
        offsets = range(effect.offset, effect.offset + effect.num_bytes, PAGE_BYTES)
        half = len(offsets) // 2
        took = [self.memory.get(offset) for offset in offsets[:half]]

        key = self.machine.copies[effect.call_id]

        def rest() -> None:
            self._must_hold("copies", self.segment, key, effect.offset)
            took.extend(self.memory.get(offset) for offset in offsets[half:])
            self._answer(effect.call_id, took)
            self.step(ev.CopiedOut(effect.call_id))

        self.later(MS + int(effect.num_bytes * COPY_NS_PER_BYTE), rest)

    def land(self, source: Lease, offset: int, first_page: int, pages: list[Content | None]) -> None:
        """Pages of another node, written at `offset`."""
        self._must_hold("lands in", self.segment, (source.ticket_id, source.attempt), offset)
        for index, content in enumerate(pages, first_page):
            if content is not None:
                self.memory[offset + index * PAGE_BYTES] = content

    def _start_fetch(self, effect: ev.StartFetch) -> None:
        self.fetches += 1
        FetchSim(self, effect, self.peers.get(effect.source.node_id))
