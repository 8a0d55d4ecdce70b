"""The shipped controller machine in a simulated process: what `actors/controller/actor.py` is in a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from actors.controller import status as view
from actors.controller.events import Effect, Event, FrontendGone, Log, Replace, Reply, Tick, ToFrontend, Withdraw
from actors.controller.machine import Machine
from actors.messages import FrontendCommand, FrontendHeartbeat, FrontendReply, ReplicaLeft, Request
from cluster.spec import ClusterSpec
from ops.simulate.network import Cancel, Handler, Net
from ops.simulate.world import MS, SECOND, Done, Failed, Process, World, ignore

TICK_NS = 250 * MS


class ControllerSim(Process):
    kind = "controller"

    def __init__(self, world: World, net: Net, spec: ClusterSpec) -> None:
        super().__init__(world, "controller")
        self.net = net
        self.spec = spec
        self.log: list[tuple[int, str]] = []
        self.violations: list[str] = []
        self.counted: dict[str, float] = {}  # counters of all lives together
        self.step_ns: list[int] = []  # wall time of each step, when `measure` is set
        self.measure = False
        self.platform_replace: Callable[[str, str], None] = lambda kind, name: None
        self._last_call = 0
        self._begin()

    def _begin(self) -> None:
        self.machine = Machine(self.spec, self.life, self.world.now_ns, fresh=self.life == 1)
        self._commands: dict[str, list[FrontendCommand]] = {}
        self._polls: dict[str, list[Done]] = {}  # long polls that wait, by frontend
        self._answers: dict[int, Done] = {}
        self.later(TICK_NS, self._tick)

    def die(self) -> None:
        super().die()
        for name, value in self.machine.counters.items():
            self.counted[name] = self.counted.get(name, 0) + value

    def reborn(self) -> None:
        super().reborn()
        self._begin()

    def restart(self) -> None:
        """By a frontend that has waited for too long: the process is ended and begins its next life."""
        if self.alive:
            self.die()
            self.world.at(500 * MS, self.reborn)

    def totals(self) -> dict[str, float]:
        living = self.machine.counters if self.alive else {}  # `die` has counted those of a life that is over
        names = sorted({**self.counted, **living})
        return {name: self.counted.get(name, 0) + living.get(name, 0) for name in names}

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
        match effect:
            case Reply():
                answer = self._answers.pop(effect.call_id, None)
                if answer is not None:
                    answer(effect.value)
            case ToFrontend():
                self._commands.setdefault(effect.frontend_id, []).append(effect.order)
                if polls := self._polls.pop(effect.frontend_id, None):
                    # Later in this moment, so that what the same step has for this frontend goes along.
                    self.later(0, self._answer_poll, effect.frontend_id, polls)
            case Replace():
                self.platform_replace(effect.kind, effect.name)
            case Log():
                self.log.append((self.world.now_ns, effect.text))
                if effect.is_error:
                    self.violations.append(effect.text)

    def _answer_poll(self, frontend_id: str, polls: list[Done]) -> None:
        polls[-1](self._commands.pop(frontend_id, []))
        for poll in polls[:-1]:
            poll([])

    def audit(self) -> None:
        """The machine's own laws, now."""
        if self.alive:
            found = view.audit(self.machine)["breaches"]
            self.violations += [f"{self.world.now_ns / SECOND:.3f} s: {text}" for text in found]

    # -- calls of others; `source` is the caller

    def call(self, source: Process, message: Request[Any], done: Done = ignore, failed: Failed = ignore) -> None:
        self.net.call(source, self, type(message).__name__, self.handler_of(message), done, failed)

    def handler_of(self, message: Request[Any]) -> Handler:
        def handler(answer: Done) -> Cancel:
            self._last_call += 1
            call_id = self._last_call
            if isinstance(message, FrontendHeartbeat):
                answer = partial(self._with_commands, message.frontend_id, answer)
            self._answers[call_id] = answer
            self.run(message, call_id)
            return lambda: self._withdraw(call_id)

        return handler

    def _with_commands(self, frontend_id: str, answer: Done, reply: FrontendReply) -> None:
        answer(msgspec.structs.replace(reply, orders=tuple(self._commands.pop(frontend_id, ()))))

    def _withdraw(self, call_id: int) -> None:
        if self._answers.pop(call_id, None) is not None:
            self.run(Withdraw(call_id))

    def process_died(self, event: ReplicaLeft | FrontendGone) -> None:
        """The platform says so."""
        self.later(0, self.run, event)

    def poll(self, frontend_id: str, timeout_s: float) -> Handler:
        """A long poll for the frontend's commands."""

        def handler(answer: Done) -> None:
            if frontend_id in self._commands:
                answer(self._commands.pop(frontend_id))
                return
            self._polls.setdefault(frontend_id, []).append(answer)
            self.later(int(timeout_s * SECOND), self._poll_over, frontend_id, answer)

        return handler

    def _poll_over(self, frontend_id: str, answer: Done) -> None:
        if answer in self._polls.get(frontend_id, ()):
            self._polls[frontend_id].remove(answer)
            answer([])

    def status(self) -> dict[str, Any]:
        return view.status(self.machine, self.world.now_ns)
