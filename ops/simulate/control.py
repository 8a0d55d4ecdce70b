"""The real controller machine behind a simulated network: what `actors/controller/actor.py` is in a real cluster."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from actors.controller import status as view
from actors.controller.events import Effect, Event, Log, Reply, Tick, ToFrontend
from actors.controller.machine import Machine
from actors.messages import FrontendCommand, FrontendHeartbeat, Request
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

    def run(self, event: Event, call_id: int = 0) -> None:
        began = time.perf_counter_ns() if self.measure else 0
        effects = self.machine.step(event, self.world.now_ns, call_id)
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

    def _ask(self, message: Request[Any], answer: Done) -> None:
        self._last_call += 1
        self._answers[self._last_call] = answer
        self.run(message, self._last_call)

    def call(
        self, source: Process, message: Request[Any], done: Done = lambda _: None, failed: Failed = lambda _: None
    ) -> None:
        def handler(answer: Done) -> None:
            def with_orders(reply: Any) -> None:
                orders = tuple(self._orders.pop(source.name, ()))
                answer(msgspec.structs.replace(reply, orders=orders))

            self._ask(message, with_orders if isinstance(message, FrontendHeartbeat) else answer)

        self.net.call(source, self, type(message).__name__, handler, done, failed)

    def status(self) -> dict[str, Any]:
        return view.status(self.machine, self.world.now_ns)
