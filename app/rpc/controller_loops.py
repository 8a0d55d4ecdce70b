"""What keeps a frontend and the controller informed of each other, in the background.

No call is without a time-out, no exception ends a loop, and a loop that has ended or stands still is visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from actors.messages import (
    Adopt,
    Claim,
    Configure,
    FrontendCommand,
    FrontendHeartbeat,
    ReplicaId,
    ReplicaLeaving,
    Request,
    T,
    TicketId,
)

logger = logging.getLogger("pageferry.frontend")

HEARTBEAT_EVERY_S = 1.0
PATIENCE_S = 1.0  # a loop comes round again: it does not wait long for a controller that is away
ORDERS_S = 10.0  # how long one call for orders waits at the controller


class Controller(Protocol):
    async def call(self, message: Request[T], patience_s: float = ...) -> T: ...

    async def orders(self, timeout_s: float) -> list[FrontendCommand]: ...

    def restart(self) -> None: ...


class Tickets(Protocol):
    """The engine core client, as far as the controller is concerned."""

    frontend_id: str

    def live_tickets(self) -> tuple[TicketId, ...]: ...

    def claims(self) -> tuple[Claim, ...]: ...

    def obey(self, order: FrontendCommand) -> None: ...

    def replica_leaving(self, replica_id: ReplicaId) -> None: ...


class ControllerLoops:
    """`hung_s`: a controller that does not answer for so long is started again.

    `reachable`: the replicas that calls from here find; None: not known. `stall_s`: the longest that this process's
    event loop has stood still since it was asked before.
    """

    def __init__(
        self,
        controller: Controller,
        tickets: Tickets,
        configuration: Configure,
        hung_s: float,
        reachable: Callable[[], Iterable[ReplicaId] | None] = lambda: None,
        stall_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._controller = controller
        self._tickets = tickets
        self._configuration = configuration
        self._stamp = 0  # of the last heartbeat's reply: says what we knew when we sent the next one
        self._hung_s = hung_s
        self._reachable = reachable
        self._stall_s = stall_s
        self._longest_s = 0.0  # stall that the controller has not heard of
        self._news = asyncio.Event()  # for the heartbeat: it does not wait for its time
        self._epoch = 0  # of the controller that has our configuration
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, float] = {}  # when each loop last came round, on the event loop's clock
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for name, turn, pause_s in (("heartbeat", self._heartbeat, HEARTBEAT_EVERY_S), ("orders", self._orders, 0.0)):
            self._turns[name] = asyncio.get_running_loop().time()
            self._tasks[name] = asyncio.create_task(self._run(name, turn, pause_s))

    def stop(self) -> None:
        for task in (*self._tasks.values(), *self._leaving):
            task.cancel()

    def standing_still(self) -> str:
        """Which loop has ended, or has not come round for far too long; "" when none."""
        now = asyncio.get_running_loop().time()
        longest_s = 4 * (self._hung_s + ORDERS_S)
        for name, task in self._tasks.items():
            if task.done():
                return f"the {name} loop has ended"
            if now - self._turns[name] > longest_s:
                return f"the {name} loop has not come round for {now - self._turns[name]:.0f} s"
        return ""

    def replicas_changed(self) -> None:
        """What is reachable has changed: the controller hears of it now."""
        self._news.set()

    def replicas_left(self, replicas: Iterable[ReplicaId]) -> None:
        """Serve has taken these out of a deployment: no new tickets for them."""
        task = asyncio.ensure_future(self._say_leaving(tuple(replicas)))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _run(self, name: str, turn: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await self._pause(name, pause_s)
            self._turns[name] = asyncio.get_running_loop().time()
            try:
                await turn()
            except Exception as error:
                logger.warning("controller, %s: %s: %s", name, type(error).__name__, error)
                await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def _pause(self, name: str, pause_s: float) -> None:
        if name != "heartbeat":
            await asyncio.sleep(pause_s)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), pause_s)
        self._news.clear()

    async def _heartbeat(self) -> None:
        """Says which tickets live here; a controller that has come back asks for all that is known of them."""
        try:
            async with asyncio.timeout(self._hung_s):
                replicas, live = self._reachable(), self._tickets.live_tickets()
                reachable = None if replicas is None else tuple(replicas)
                self._longest_s = max(self._longest_s, self._stall_s())
                heartbeat = FrontendHeartbeat(self._tickets.frontend_id, live, self._stamp, reachable, self._longest_s)
                reply = await self._controller.call(heartbeat, PATIENCE_S)
                self._stamp, self._longest_s = reply.stamp, 0.0
                if reply.epoch != self._epoch:
                    await self._controller.call(self._configuration, PATIENCE_S)
                    self._epoch = reply.epoch
                if not reply.known:
                    await self._controller.call(Adopt(self._tickets.frontend_id, self._tickets.claims()))
        except TimeoutError:
            logger.error("the controller has not answered for %g s: it is started again", self._hung_s)
            self._controller.restart()
            return
        for order in reply.orders:
            self._obey(order)

    async def _orders(self) -> None:
        """A long poll: a replica that dies or leaves is heard of at once."""
        async with asyncio.timeout(ORDERS_S + self._hung_s):
            orders = await self._controller.orders(ORDERS_S)
        for order in orders:
            self._obey(order)

    def _obey(self, order: FrontendCommand) -> None:
        try:
            self._tickets.obey(order)
        except Exception:  # it is about one ticket: the others' orders must not be lost with it
            logger.exception("order %s", order)

    async def _say_leaving(self, replicas: tuple[ReplicaId, ...]) -> None:
        for replica_id in replicas:
            try:
                async with asyncio.timeout(self._hung_s):
                    await self._controller.call(ReplicaLeaving(replica_id))
            except Exception as error:
                logger.warning("controller, replica_leaving: %s: %s", type(error).__name__, error)
            self._tickets.replica_leaving(replica_id)
