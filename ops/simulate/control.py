"""The real controller machine behind a simulated network: what `actors/controller/actor.py` is in a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from actors.controller import status as view
from actors.controller.events import (
    Admit,
    Adopt,
    Effect,
    Ended,
    Event,
    FrontendHeartbeat,
    Join,
    Leaving,
    Log,
    Lost,
    PlatformSize,
    ReplicaHeartbeat,
    ReplicaLeft,
    Reply,
    Tick,
    ToFrontend,
    Transfer,
    WantHandOver,
)
from actors.controller.machine import Machine
from actors.messages import (
    AdmitRequest,
    Announcement,
    Claim,
    FrontendCommand,
    FrontendReply,
    Heartbeat,
    HeartbeatReply,
    Outcome,
    Role,
    StagingStatus,
    TransferEvent,
)
from cluster.spec import ClusterSpec
from ops.simulate.world import MS, SECOND, Done, Failed, Net, Process, World

TICK_NS = 250 * MS


class ControllerSim(Process):
    kind = "controller"

    def __init__(self, world: World, net: Net, spec: ClusterSpec) -> None:
        super().__init__(world, "controller")
        self.net = net
        self.spec = spec
        self.log: list[tuple[int, str]] = []
        self.breaches: list[str] = []
        self.counted: dict[str, float] = {}  # counters of all lives together
        self.step_ns: list[int] = []  # wall time of each step, when `measure` is set
        self.measure = False
        self._answers: dict[int, Done] = {}
        self._last_call = 0
        self._begin()

    def _begin(self) -> None:
        self.machine = Machine(self.spec, self.life, self.world.now_ns, fresh=self.life == 1)
        self._orders: dict[str, list[FrontendCommand]] = {}
        self._answers = {}
        self.later(TICK_NS, self._tick)

    def die(self) -> None:
        super().die()
        for name, value in self.machine.counters.items():
            self.counted[name] = self.counted.get(name, 0) + value

    def reborn(self) -> None:
        super().reborn()
        self._begin()

    def totals(self) -> dict[str, float]:
        names = {**self.counted, **self.machine.counters}
        return {name: self.counted.get(name, 0) + self.machine.counters.get(name, 0) for name in sorted(names)}

    # -- the machine

    def _tick(self) -> None:
        self.run(Tick())
        self.later(TICK_NS, self._tick)

    def run(self, event: Event) -> None:
        began = time.perf_counter_ns() if self.measure else 0
        effects = self.machine.step(event, self.world.now_ns)
        if self.measure:
            self.step_ns.append(time.perf_counter_ns() - began)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            answer = self._answers.pop(effect.call_id, None)
            if answer is not None:
                answer(effect.value)
        elif isinstance(effect, ToFrontend):
            self._orders.setdefault(effect.frontend_id, []).append(effect.order)
        elif isinstance(effect, Log):
            self.log.append((self.world.now_ns, effect.text))

    def audit(self) -> None:
        """The machine's own laws, now."""
        if self.alive:
            found = view.audit(self.machine)["breaches"]
            self.breaches += [f"{self.world.now_ns / SECOND:.3f} s: {breach}" for breach in found]

    # -- calls of others; `source` is the caller

    def _ask(self, make: Callable[[int], Event], answer: Done) -> None:
        self._last_call += 1
        self._answers[self._last_call] = answer
        self.run(make(self._last_call))

    def _call(self, source: Process, kind: str, make: Callable[[int], Event], done: Done, failed: Failed) -> None:
        self.net.call(source, self, kind, lambda answer: self._ask(make, answer), done, failed)

    def platform_size(self, source: Process, role: Role, current: int, target: int, done: Done, failed: Failed) -> None:
        self._call(source, "platform_size", lambda n: PlatformSize(n, role, current, target), done, failed)

    def join(self, source: Process, announcement: Announcement, done: Done, failed: Failed) -> None:
        self._call(source, "join", lambda n: Join(n, announcement), done, failed)

    def heartbeat(
        self, source: Process, beat: Heartbeat, done: Callable[[HeartbeatReply], None], failed: Failed
    ) -> None:
        self._call(source, "heartbeat", lambda n: ReplicaHeartbeat(n, beat), done, failed)

    def transfer_report(
        self, source: Process, status: StagingStatus, events: tuple[TransferEvent, ...], done: Done, failed: Failed
    ) -> None:
        self._call(source, "transfer_report", lambda n: Transfer(n, status, events), done, failed)

    def frontend_beat(
        self, source: Process, live: tuple[int, ...], stamp: int, done: Callable[[FrontendReply], None], failed: Failed
    ) -> None:
        def handler(answer: Done) -> None:
            def with_orders(reply: FrontendReply) -> None:
                orders = tuple(self._orders.pop(source.name, ()))
                answer(msgspec.structs.replace(reply, orders=orders))

            self._ask(lambda n: FrontendHeartbeat(n, source.name, live, stamp), with_orders)

        self.net.call(source, self, "frontend_beat", handler, done, failed)

    def adopt(self, source: Process, claims: tuple[Claim, ...]) -> None:
        self._tell(source, "adopt", Adopt(source.name, claims))

    def admit(self, source: Process, request: AdmitRequest, done: Done, failed: Failed) -> None:
        self._call(source, "admit", lambda n: Admit(n, request), done, failed)

    def hand_over(
        self, source: Process, ticket_id: int, attempt: int, timeout_ns: int, done: Done, failed: Failed
    ) -> None:
        self._call(source, "hand_over", lambda n: WantHandOver(n, ticket_id, attempt, timeout_ns), done, failed)

    def lost(
        self,
        source: Process,
        ticket_id: int,
        attempt: int,
        role: Role,
        replica_id: str,
        reason: str,
        tokens: int,
        request: AdmitRequest,
        done: Done,
        failed: Failed,
    ) -> None:
        self._call(
            source,
            "lost",
            lambda n: Lost(n, ticket_id, attempt, role, replica_id, reason, tokens, request),
            done,
            failed,
        )

    def ended(self, source: Process, ticket_id: int, outcome: Outcome, tokens: int, done: Done, failed: Failed) -> None:
        self._tell(source, "ended", Ended(ticket_id, outcome, tokens), done, failed)

    def leaving(self, source: Process, replica_id: str) -> None:
        self._tell(source, "leaving", Leaving(replica_id))

    def leave(self, source: Process, replica_id: str, incarnation: int) -> None:
        self._tell(source, "leave", ReplicaLeft(replica_id, incarnation))

    def _tell(
        self,
        source: Process,
        kind: str,
        event: Event,
        done: Done = lambda _: None,
        failed: Failed = lambda _: None,
    ) -> None:
        def handler(answer: Done) -> None:
            self.run(event)
            answer(None)

        self.net.call(source, self, kind, handler, done, failed)

    def status(self) -> dict[str, Any]:
        return view.status(self.machine, self.world.now_ns)
