"""Virtual time, processes that can die or hang, and a network that can be told to misbehave. Deterministic.

Nothing here reads a clock or global randomness: one seeded generator, one heap of events. A message is a call with an
answer, as between Ray actors; a caller whose call or answer was lost learns it as an error a moment later, and a
caller whose callee is dead learns it at once. So "drop" is a broken connection, not silence; silence is a hang.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MS = 1_000_000
SECOND = 1_000_000_000

Done = Callable[[Any], None]
Failed = Callable[[str], None]


class World:
    """`at` schedules, `run` lets time pass. Events of one moment happen in the order they were scheduled."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 0
        self.random = random.Random(seed)
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now_ns + max(0, delay_ns), self._number, action, args))

    def run(self, until_ns: int, stop: Callable[[], bool] | None = None) -> None:
        """Until `until_ns`, or until `stop` says so (looked at once a virtual second)."""
        look_ns = self.now_ns + SECOND
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, action, args = heapq.heappop(self._heap)
            self.events += 1
            action(*args)
            if stop is not None and self.now_ns >= look_ns:
                look_ns = self.now_ns + SECOND
                if stop():
                    return
        self.now_ns = until_ns


@dataclass(slots=True)
class _Call:
    """One call in flight at its callee."""

    failed: Failed
    answered: bool = False


class Process:
    """Something that can be called, can die, and can hang. A new life has a higher `life`."""

    kind = "process"

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.life = 1
        self.hung_until_ns = 0
        self.slow = 1.0
        self.calls: dict[int, _Call] = {}

    @property
    def hung(self) -> bool:
        return self.world.now_ns < self.hung_until_ns

    def later(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """`action` of this life: nothing happens if it is over by then, and it waits while the process hangs."""
        self.world.at(delay_ns, self._wake, self.life, action, args)

    def _wake(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or life != self.life:
            return
        if self.hung:
            self.world.at(self.hung_until_ns - self.world.now_ns, self._wake, life, action, args)
            return
        action(*args)

    def die(self) -> None:
        """Everybody who waits for an answer learns it soon."""
        self.alive = False
        calls, self.calls = self.calls, {}
        for call in calls.values():
            if not call.answered:
                self.world.at(2 * MS, call.failed, f"{self.name} died")

    def reborn(self) -> None:
        self.alive = True
        self.life += 1
        self.hung_until_ns = 0
        self.slow = 1.0


@dataclass(slots=True)
class Weather:
    """What happens to messages now. Probabilities a leg; `only` limits it to these message kinds (empty: all)."""

    drop: float = 0.0
    delay: float = 0.0
    delay_ns: int = 0
    duplicate: float = 0.0
    only: frozenset[str] = field(default_factory=frozenset)

    def covers(self, kind: str) -> bool:
        return not self.only or kind in self.only


class Net:
    """Calls between processes. `spread_ns` alone already reorders messages; delays do so grossly."""

    ERROR_NS = 400 * MS  # after this a broken connection shows

    def __init__(self, world: World, base_ns: int = 300_000, spread_ns: int = 700_000) -> None:
        self.world = world
        self.base_ns = base_ns
        self.spread_ns = spread_ns
        self.weather: list[Weather] = []
        self.counts = {"messages": 0, "dropped": 0, "delayed": 0, "duplicated": 0}
        self._calls = 0

    def call(
        self, source: Process, target: Process, kind: str, handler: Callable[[Done], None], done: Done, failed: Failed
    ) -> None:
        """Runs `handler(answer)` at `target`; then `done(value)` or `failed(reason)` at `source`, exactly once."""
        self._calls += 1
        number, life, finished = self._calls, source.life, [False]

        def finish(action: Callable[[Any], None], value: Any) -> None:
            if not finished[0]:
                finished[0] = True
                if source.alive and source.life == life:
                    source.later(0, action, value)

        def fail(reason: str) -> None:
            finish(failed, reason)

        def arrive() -> None:
            if not target.alive:
                fail(f"{target.name} is dead")
            elif target.hung:
                self.world.at(target.hung_until_ns - self.world.now_ns, arrive)
            else:
                entry = target.calls.setdefault(number, _Call(fail))
                handler(lambda value: answer(entry, value))

        def answer(entry: _Call, value: Any) -> None:
            if not entry.answered:
                entry.answered = True
                target.calls.pop(number, None)
                self._leg(kind + "_reply", lambda: finish(done, value), fail)

        self._leg(kind, arrive, fail)

    def _leg(self, kind: str, deliver: Callable[[], None], fail: Failed) -> None:
        dice = self.world.random
        self.counts["messages"] += 1
        delay_ns = self.base_ns + int(dice.random() * self.spread_ns)
        for weather in self.weather:
            if not weather.covers(kind):
                continue
            if dice.random() < weather.drop:
                self.counts["dropped"] += 1
                self.world.at(self.ERROR_NS, fail, "connection lost")
                return
            if dice.random() < weather.delay:
                self.counts["delayed"] += 1
                delay_ns += int(dice.random() * weather.delay_ns)
            if dice.random() < weather.duplicate:
                self.counts["duplicated"] += 1
                self.world.at(delay_ns + int(dice.random() * 50 * MS), deliver)
        self.world.at(delay_ns, deliver)
