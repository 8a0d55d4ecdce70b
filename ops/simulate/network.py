"""Calls between simulated processes, over a network that can be made to misbehave.

A message is a call with an answer, as between Ray actors. A caller whose call or answer was lost learns it as an
error a moment later, and a caller whose callee is dead learns it at once: "drop" is a broken connection, not silence.
Silence is a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ops.simulate.world import MS, Done, Failed, Process, World, ignore

Cancel = Callable[[], None]
Handler = Callable[[Done], Cancel | None]  # gets `answer`; returns what to do when the caller gives up


class ConnectionLost(Exception):
    """The call or its answer was lost, or the callee is dead."""


@dataclass(slots=True)
class NetworkFault:
    """What happens to messages now. Probabilities a leg; `only` limits it to these message kinds (empty: all)."""

    drop: float = 0.0
    delay: float = 0.0
    delay_ns: int = 0
    duplicate: float = 0.0
    only: frozenset[str] = field(default_factory=frozenset)

    def covers(self, kind: str) -> bool:
        return not self.only or kind in self.only


class Call:
    """One call: `done(value)` or `failed(reason)` at the source, exactly once, unless it is cancelled before."""

    __slots__ = (
        "_answered",
        "_arrived",
        "_cancels",
        "_done",
        "_failed",
        "_finished",
        "_handler",
        "_life",
        "_net",
        "_number",
        "_once",
        "_source",
        "_target",
        "_void",
        "kind",
    )

    def __init__(
        self, net: Net, number: int, source: Process, target: Process, kind: str, handler: Handler, once: bool
    ) -> None:
        self._net = net
        self._number = number
        self._source = source
        self._target = target
        self._life = source.life
        self.kind = kind
        self._handler = handler
        self._once = once
        self._done: Done = ignore
        self._failed: Failed = ignore
        self._finished = self._answered = self._arrived = self._void = False
        self._cancels: list[Cancel] = []

    def start(self, done: Done, failed: Failed) -> None:
        self._done, self._failed = done, failed
        self._net.leg(self.kind, self._arrive, self._fail)

    def cancel(self) -> None:
        """The caller wants no answer any more; the callee hears of it like of anything else."""
        if not self._finished:
            self._finished = True
            if self._source.alive:
                self._net.leg(f"{self.kind}_cancel", self._withdraw, ignore)

    def callee_died(self) -> None:
        if not self._answered:
            self._answered = True
            self._net.world.at(2 * MS, self._fail, f"{self._target.name} died")

    def _finish(self, action: Callable[[Any], None], value: Any) -> None:
        if not self._finished:
            self._finished = True
            if self._source.alive and self._source.life == self._life:
                self._source.later(0, action, value)

    def _fail(self, reason: str) -> None:
        self._finish(self._failed, reason)

    def _arrive(self, life: int | None = None) -> None:
        """`life`: that of the target which had it while it hung; a process that is started again has none of it."""
        target = self._target
        if not target.alive or life not in (None, target.life):
            self._fail(f"{target.name} is dead")
        elif target.hung:
            self._net.world.at(target.hung_until_ns - self._net.world.now_ns, self._arrive, target.life)
        elif not self._void and not (self._once and self._arrived):
            self._arrived = True
            if not self._answered:
                target.calls[self._number] = self
            if (cancel := self._handler(self._answer)) is not None:
                self._cancels.append(cancel)

    def _answer(self, value: Any) -> None:
        if not self._answered:
            self._answered = True
            self._target.calls.pop(self._number, None)
            self._net.leg(f"{self.kind}_reply", lambda: self._finish(self._done, value), self._fail)

    def _withdraw(self) -> None:
        target = self._target
        if target.alive and target.hung:
            self._net.world.at(target.hung_until_ns - self._net.world.now_ns, self._withdraw)
            return
        self._void = True
        target.calls.pop(self._number, None)
        if target.alive and not self._answered:
            self._answered = True
            for cancel in self._cancels:
                cancel()


class Net:
    """`spread_ns` alone already reorders messages; delays do so grossly."""

    ERROR_NS = 400 * MS  # after this a broken connection shows

    def __init__(self, world: World, base_ns: int = 300_000, spread_ns: int = 700_000) -> None:
        self.world = world
        self.base_ns = base_ns
        self.spread_ns = spread_ns
        self.faults: list[NetworkFault] = []
        self.counts = {"messages": 0, "dropped": 0, "delayed": 0, "duplicated": 0}
        self._calls = 0

    def call(
        self,
        source: Process,
        target: Process,
        kind: str,
        handler: Handler,
        done: Done = ignore,
        failed: Failed = ignore,
        once: bool = False,
    ) -> Call:
        """Runs `handler(answer)` at `target`; then `done(value)` or `failed(reason)` at `source`, exactly once.

        A doubled message runs the handler twice, unless `once` (Serve's calls, which it never repeats).
        """
        self._calls += 1
        call = Call(self, self._calls, source, target, kind, handler, once)
        call.start(done, failed)
        return call

    def ask(
        self, source: Process, target: Process, kind: str, handler: Handler, once: bool = False
    ) -> asyncio.Future[Any]:
        """A call of asyncio code in `source`. Raises `ConnectionLost`, or the answer if that is an exception."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(value: Any) -> None:
            if future.done():
                return
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

        if not source.alive:
            future.set_exception(ConnectionLost(f"{source.name} is dead itself"))
            return future
        call = self.call(source, target, kind, handler, done, lambda reason: done(ConnectionLost(reason)), once)
        future.add_done_callback(lambda ended: call.cancel() if ended.cancelled() else None)
        return future

    def leg(self, kind: str, deliver: Callable[[], None], fail: Failed) -> None:
        """One message, one way."""
        dice = self.world.random
        self.counts["messages"] += 1
        delay_ns = self.base_ns + int(dice.random() * self.spread_ns)
        for fault in self.faults:
            if not fault.covers(kind):
                continue
            if dice.random() < fault.drop:
                self.counts["dropped"] += 1
                self.world.at(self.ERROR_NS, fail, "connection lost")
                return
            if dice.random() < fault.delay:
                self.counts["delayed"] += 1
                delay_ns += int(dice.random() * fault.delay_ns)
            if dice.random() < fault.duplicate:
                self.counts["duplicated"] += 1
                self.world.at(delay_ns + int(dice.random() * 50 * MS), deliver)
        self.world.at(delay_ns, deliver)

    def stream_delay_ns(self, kind: str) -> int | None:
        """What the next message of an ordered stream takes; None: the connection breaks."""
        dice = self.world.random
        delay_ns = self.base_ns + int(dice.random() * self.spread_ns)
        for fault in self.faults:
            if fault.covers(kind):
                if dice.random() < fault.drop:
                    return None
                if dice.random() < fault.delay:
                    delay_ns += int(dice.random() * fault.delay_ns)
        return delay_ns
