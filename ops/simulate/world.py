"""Virtual time, and processes that can die or hang. Deterministic.

Nothing here reads a clock or global randomness: one seeded generator, one heap of events. A process may have an
asyncio event loop of its own, so that shipped asyncio code runs in virtual time as it is.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.simulate.network import Call

MS = 1_000_000
SECOND = 1_000_000_000

Done = Callable[[Any], None]
Failed = Callable[[str], None]


def ignore(_: Any) -> None:
    pass


class World:
    """`at` schedules, `run` lets time pass. Events of one moment happen in the order they were scheduled."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 0
        self.random = random.Random(seed)
        self.events = 0
        self.violations: list[str] = []  # seen as they happened, exceptions that no task handled among them
        self.soon: deque[tuple[ProcessLoop, asyncio.Handle]] = deque()
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Schedules `action(*args)` in `delay_ns` nanoseconds; a negative delay means now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now_ns + max(0, delay_ns), self._number, action, args))

    def run(self, until_ns: int, stop: Callable[[], bool] | None = None) -> None:
        """Until `until_ns`, or until `stop` says so (asked once a virtual second)."""
        look_ns = self.now_ns + SECOND
        self._run_soon()
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, action, args = heapq.heappop(self._heap)
            self.events += 1
            action(*args)
            self._run_soon()
            if stop is not None and self.now_ns >= look_ns:
                look_ns = self.now_ns + SECOND
                if stop():
                    return
        self.now_ns = until_ns

    def _run_soon(self) -> None:
        while self.soon:
            loop, handle = self.soon.popleft()
            self.events += 1
            loop.run_handle(handle)


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
        self.calls: dict[int, Call] = {}  # calls that have arrived here and are not answered yet

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
        """Every caller that waits for an answer learns it soon."""
        self.alive = False
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.callee_died()

    def reborn(self) -> None:
        self.alive = True
        self.life += 1
        self.hung_until_ns = 0
        self.slow = 1.0


class ProcessLoop(asyncio.AbstractEventLoop):
    """The asyncio event loop of one life of one process: its clock is the world's, and it stops with the process.

    `asyncio.to_thread` runs its function in place. An exception that no task handles is kept in `world.violations`.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._life = process.life
        self._world = process.world
        self._ended = False
        self._rest: deque[asyncio.Handle] = deque()

    # -- for the simulator

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Starts a coroutine from outside the loop."""
        return self.create_task(work, context=Context())

    def run_handle(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        process = self._process
        if not self._ended:
            if not process.alive or process.life != self._life:
                return
            if process.hung:
                self._world.at(process.hung_until_ns - self._world.now_ns, self.run_handle, handle)
                return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(before)

    def end(self) -> None:
        """The process is gone. Its tasks are unwound apart from the world, so that none of them lingers in memory.

        Calls that they still make must fail at once: the ports refuse a process that does not live.
        """
        self._ended = True
        soon = self._world.soon
        self._rest.extend(handle for loop, handle in soon if loop is self)
        self._world.soon = deque(item for item in soon if item[0] is not self)
        for _ in range(50):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            while self._rest:
                self.run_handle(self._rest.popleft())

    # -- asyncio's surface

    def time(self) -> float:
        return self._world.now_ns / SECOND

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self._ended:
            self._rest.append(handle)
        else:
            self._world.soon.append((self, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._ended:
            self._world.at(math.ceil(when * SECOND) - self._world.now_ns, self.run_handle, timer)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._ended:
            self._world.violations.append(f"{self._process.name}: {context.get('exception') or context['message']!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._ended

    def is_closed(self) -> bool:
        return self._ended
