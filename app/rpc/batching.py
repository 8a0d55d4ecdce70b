"""Many messages to the controller in one call of its actor, and many answers in one reply.

A call of a Ray actor costs several times what the controller needs to decide. So messages of requests that come within
`WINDOW_S` of the last call go together with the next one; one that comes alone goes at once. Answers that are not there
yet, of those who wait for room or for a seal, come by a long poll that stands only while a caller waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.messages import AdmitRequest, Ended, Outcome, ReplicaLost, Request, Ticket, WaitForHandOver

WINDOW_S = 0.005
POLL_S = 10.0
WITHDRAWN_MAX = 1_000
_handles = itertools.count(1)
BATCHED = (AdmitRequest, WaitForHandOver, ReplicaLost, Ended)


class BatchingHandle:
    """What a frontend has of the controller's actor: as the actor's own handle, `handle.method.remote(...)`.

    `frontend_id`: of this process. Each handle has a mailbox of its own at the actor, so that one that was given up
    takes no answer of its successor's. An answer that may be lost (the actor is gone, or is another life of
    it) is a `RayActorError` at the caller that waits for it: all of these messages may be sent again.
    """

    def __init__(self, actor: Any, frontend_id: str) -> None:
        self.actor = actor
        self._client = (frontend_id, next(_handles))
        self._numbers = itertools.count(1)
        self._outbox: list[tuple[int, Request[Any] | None]] = []  # None: this number is not waited for any more
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._kept: dict[int, int] = {}  # number -> life of the actor that will answer it later
        # Admissions that were left, and whose ticket may be on its way: the latest of them.
        self._withdrawn: dict[int, None] = {}
        self._sent_at = 0.0
        self._sending = False  # a send is due
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)

    def end(self) -> None:
        """Ray ends the process and begins its next life."""
        ray.kill(self.actor, no_restart=False)

    @property
    def call(self) -> _Method:
        return _Method(self._ask)

    def _ask(self, message: Request[Any]) -> Awaitable[Any]:
        if not isinstance(message, BATCHED):
            answer: Awaitable[Any] = self.actor.call.remote(message)
            return answer
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda ended: self._leave(number, message) if ended.cancelled() else None)
        self._post(number, message)
        return future

    def _post(self, number: int, message: Request[Any] | None) -> None:
        self._outbox.append((number, message))
        if self._sending:
            return
        self._sending = True
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._sent_at + WINDOW_S), self._send)

    def _leave(self, number: int, message: Request[Any]) -> None:
        if self._waiting.pop(number, None) is None:
            return
        self._kept.pop(number, None)
        if isinstance(message, AdmitRequest):
            self._withdrawn[number] = None
            if len(self._withdrawn) > WITHDRAWN_MAX:
                del self._withdrawn[next(iter(self._withdrawn))]
        self._post(number, None)

    def _send(self) -> None:
        batch, self._outbox, self._sending = self._outbox, [], False
        self._sent_at = asyncio.get_running_loop().time()
        self._spawn(self._exchange(batch))

    async def _exchange(self, batch: list[tuple[int, Request[Any] | None]]) -> None:
        numbers = [number for number, _ in batch]
        try:
            life, answers = await self.actor.calls.remote(self._client, batch)
        except Exception as error:
            self._fail(numbers, error)
            return
        self._kept |= {number: life for number in numbers if number in self._waiting}
        self._take(life, answers)
        if self._kept and not self._polling:
            self._polling = True
            self._spawn(self._poll())

    async def _poll(self) -> None:
        """Fetches what comes later, while a caller waits for it."""
        clock = asyncio.get_running_loop().time
        try:
            while self._kept:
                asked = clock()
                life, answers = await self.actor.answers.remote(self._client, POLL_S)
                self._take(life, answers)
                await asyncio.sleep(max(0.0, asked + WINDOW_S - clock()))
        except Exception as error:
            self._fail(list(self._kept), error)
        finally:
            self._polling = False

    def _take(self, life: int, answers: Iterable[tuple[int, Any]]) -> None:
        for number, value in answers:
            self._kept.pop(number, None)
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
            elif isinstance(value, Ticket) and number in self._withdrawn:
                self._post(next(self._numbers), Ended(value.ticket_id, Outcome.CANCELLED))
        if lost := [number for number, kept_by in self._kept.items() if kept_by != life]:
            self._fail(lost, RayActorError(error_msg="the controller has begun another life"))

    def _fail(self, numbers: list[int], error: Exception) -> None:
        for number in numbers:
            self._kept.pop(number, None)
            if (future := self._waiting.pop(number, None)) is not None and not future.done():
                future.set_exception(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Method:
    """A method of the handle: `remote(...)` begins the call."""

    def __init__(self, begin: Callable[[Request[Any]], Awaitable[Any]]) -> None:
        self.remote = begin
