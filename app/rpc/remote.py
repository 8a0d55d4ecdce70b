"""The ports of the engine core client over Ray: the controller actor, and replicas addressed through Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import Context
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors import link
from actors.controller.events import StepFailed
from actors.messages import (
    AdmitRequest,
    Ended,
    FrontendCommand,
    HandOver,
    Outcome,
    Overloaded,
    PrefillDone,
    ReplicaId,
    Request,
    T,
    Ticket,
)
from app.rpc import directory
from app.rpc.ports import ControllerGone, ReplicaGone
from app.rpc.replica_link import ReplicaLink

logger = logging.getLogger("pageferry.frontend")

APPEAR_S = 10.0  # how long a call waits for a replica that Serve has not announced to this process yet
ASK_S = 60.0  # a question to an engine, or a setting for it, waits for the step under way and may read a file
CONTROLLER_AWAY_S = 15.0  # a controller that died is back in a few seconds; requests wait that long for it
FAILED_CALL_S = 1.0  # the most that one failed call counts of it: what it waited before, it waited in a controller


def _cancel(call: Any) -> None:
    if isinstance(call, ray.ObjectRef):  # a future has been cancelled with who awaits it
        ray.cancel(call)


class RemoteController:
    """Calls that find the controller away look it up again and repeat; every one of them is idempotent."""

    def __init__(self, find: Callable[[], Any], frontend_id: str, cancel: Callable[[Any], None] = _cancel) -> None:
        self._find = find
        self._cancel = cancel  # what ends a call under way
        self._actor: Any = None
        self._frontend_id = frontend_id
        self._lost_calls: set[asyncio.Task[None]] = set()

    async def _call(self, method: str, *args: Any, patience_s: float = CONTROLLER_AWAY_S) -> Any:
        """Patience is spent while the controller is away: a call may have waited in it for minutes before it died."""
        clock = asyncio.get_running_loop().time
        away_s, pause_s = 0.0, 0.05
        while True:
            asked = clock()
            try:
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await self._await(getattr(self._actor, method).remote(*args))
            except (RayActorError, RayTaskError, ValueError) as error:
                if isinstance(error, RayTaskError):
                    if isinstance(error.cause, StepFailed):
                        raise error.cause from None  # without the controller's traceback and address
                    raise
                self._actor = None
                failed_s = clock() - asked
                if failed_s > FAILED_CALL_S:
                    pause_s = 0.05
                if away_s:  # the first one found it away, and cost nothing of that
                    away_s += min(failed_s, FAILED_CALL_S)
                if away_s + pause_s > patience_s:
                    raise ControllerGone(f"the controller is away: {error}".splitlines()[0]) from error
            await asyncio.sleep(pause_s)
            away_s += pause_s
            pause_s = min(1.0, pause_s * 2)

    async def _await(self, ref: Any) -> Any:
        try:
            return await ref
        except asyncio.CancelledError:
            self._cancel(ref)
            raise

    async def call(self, message: Request[T], patience_s: float = CONTROLLER_AWAY_S) -> T:
        """`patience_s`: how long it waits for a controller that is away before it raises `ControllerGone`."""
        if isinstance(message, AdmitRequest):
            return cast(T, await self._admit(message))
        return cast(T, await self._call("call", message, patience_s=patience_s))

    async def _admit(self, request: AdmitRequest) -> Ticket | Overloaded:
        """A caller that leaves withdraws the request; a ticket granted in that moment is given back."""
        call = asyncio.ensure_future(self._call("call", request))
        try:
            answer: Ticket | Overloaded = await asyncio.shield(call)
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._withdraw(call))
            self._lost_calls.add(task)
            task.add_done_callback(self._lost_calls.discard)
            raise
        return answer

    async def _withdraw(self, call: asyncio.Future[Ticket | Overloaded]) -> None:
        # The grant may be on its way: a moment for it, then the call itself is cancelled.
        done, _ = await asyncio.wait((call,), timeout=0.01)
        if not done:
            call.cancel()
        try:
            answer = await call
        except (asyncio.CancelledError, Exception):
            return
        if isinstance(answer, Ticket):
            await self.call(Ended(answer.ticket_id, Outcome.CANCELLED))

    def restart(self) -> None:
        """It hangs: Ray ends the process and begins its next life. What waits for an answer is asked again there."""
        actor, self._actor = self._actor, None
        if actor is not None:
            actor.end()

    async def orders(self, timeout_s: float) -> list[FrontendCommand]:
        commands: list[FrontendCommand] = await self._call("orders", self._frontend_id, timeout_s, patience_s=1.0)
        return commands

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("status", patience_s=1.0)
        return answer

    async def audit(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("audit", patience_s=1.0)
        return answer

    async def pages(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("pages", patience_s=1.0)
        return answer


def _gone(replica_id: ReplicaId, error: RayActorError) -> ReplicaGone:
    """In words that a client may read: Ray's own have addresses and process ids."""
    logger.warning("replica %s: %s", replica_id, error)
    return ReplicaGone(replica_id, "its process has died or cannot be reached", died=True)


class _Pool:
    """Calls to one named replica of a deployment. Handles are cached: making one costs more than calling it."""

    def __init__(self, handle: Any, frontend_id: str) -> None:
        self._handle = handle
        self._frontend_id = frontend_id
        self._named: dict[tuple[str, ReplicaId, bool], Any] = {}
        self._links: dict[ReplicaId, ReplicaLink] = {}

    def _method(self, name: str, replica_id: ReplicaId, stream: bool = False) -> Any:
        key = (name, replica_id, stream)
        if key not in self._named:
            if len(self._named) > 4096:
                self._named.clear()
            self._named[key] = self._handle.options(method_name=name, session_id=replica_id, stream=stream)
        return self._named[key]

    async def _call(self, name: str, replica_id: ReplicaId, *args: Any) -> Any:
        # Serve gives every call on behalf of one HTTP request that request's id, and its router keeps waiting calls by
        # id: of two at once, to two replicas, one waits for ever. In an empty context each has an id of its own.
        method = self._method(name, replica_id)
        await directory.wait_until_known(self.name, replica_id, APPEAR_S)
        response = Context().run(method.remote, *args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayActorError as error:
            raise _gone(replica_id, error) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from None

    @property
    def name(self) -> str:
        return str(self._handle.deployment_name)

    async def _open(self, replica_id: ReplicaId) -> ReplicaLink:
        """A new link. Raises `ReplicaGone`."""
        made = ReplicaLink(replica_id, self._ended)
        await made.open(self._presence(replica_id))
        self._links[replica_id] = made
        return made

    def _ended(self, ended: ReplicaLink) -> None:
        if self._links.get(ended.replica_id) is ended:
            del self._links[ended.replica_id]

    async def _presence(self, replica_id: ReplicaId) -> AsyncGenerator[link.Address, None]:
        method = self._method("link", replica_id, stream=True)
        await directory.wait_until_known(self.name, replica_id, APPEAR_S)
        response = Context().run(method.remote, self._frontend_id)
        try:
            async for address in response:
                yield address
        finally:
            response.cancel()

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        live = sorted(directory.live(self.name))
        async with asyncio.timeout(ASK_S):
            if not live:  # the router has not been asked yet: any replica will do
                return [await self._handle.options(method_name="utility").remote(method, args)]
            return list(await asyncio.gather(*(self._call("utility", replica, method, args) for replica in live)))

    async def audit(self, replica_id: ReplicaId) -> dict[str, Any]:
        async with asyncio.timeout(ASK_S):
            answer: dict[str, Any] = await self._call("audit", replica_id)
        return answer

    async def fault(
        self, replica_id: ReplicaId, kind: str, trial: int, target: str | int, more: float
    ) -> dict[str, Any]:
        async with asyncio.timeout(ASK_S):
            done: dict[str, Any] = await self._call("fault", replica_id, kind, trial, target, more)
        return done


class RemotePrefill(_Pool):
    """One link to each replica, opened by the first call to it."""

    def __init__(self, handle: Any, frontend_id: str) -> None:
        super().__init__(handle, frontend_id)
        self._opening: dict[ReplicaId, asyncio.Task[ReplicaLink]] = {}
        self._loop = asyncio.get_running_loop()
        directory.watch(self._changed)

    async def prefill(self, replica_id: ReplicaId, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        link_to = self._links.get(replica_id) or await self._opened(replica_id)
        try:
            done = await link_to.call(lambda call_id: link.Prefill(call_id, ticket, frames))
        finally:
            self._leave(link_to)
        assert done is not None
        return done

    async def _opened(self, replica_id: ReplicaId) -> ReplicaLink:
        task = self._opening.get(replica_id)
        if task is None:
            task = self._opening[replica_id] = self._loop.create_task(self._open(replica_id), context=Context())
            task.add_done_callback(lambda _: self._opening.pop(replica_id, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have left
        return await asyncio.shield(task)

    def _changed(self, deployment: str, live: frozenset[str], left: frozenset[str]) -> None:
        """Called from the thread of Serve's router."""
        if deployment == self.name and left:
            self._loop.call_soon_threadsafe(self._left, left)

    def _left(self, left: frozenset[str]) -> None:
        for opened in list(self._links.values()):
            if opened.replica_id in left:
                self._leave(opened)

    def _leave(self, opened: ReplicaLink) -> None:
        """The link keeps a replica that Serve wants to end: it goes with its last call."""
        if not opened.busy and opened.replica_id not in directory.live(self.name):
            opened.end("the replica is leaving and this frontend has nothing there")


class RemoteDecode(_Pool):
    async def submit(
        self, replica_id: ReplicaId, frames: list[bytes], ticket: Ticket, hand_over: HandOver | None
    ) -> None:
        """Needs the stream of `outputs` to stand."""
        await self._link(replica_id).call(lambda call_id: link.Submit(call_id, ticket, hand_over, frames))

    async def abort(self, replica_id: ReplicaId, engine_ids: list[str]) -> None:
        await self._link(replica_id).call(lambda call_id: link.Abort(call_id, engine_ids))

    def _link(self, replica_id: ReplicaId) -> ReplicaLink:
        if (opened := self._links.get(replica_id)) is None:
            raise ReplicaGone(replica_id, "it has no connection, and so nothing of this frontend")
        return opened

    async def outputs(self, replica_id: ReplicaId) -> AsyncIterator[list[bytes]]:
        opened = await self._open(replica_id)
        try:
            yield []  # the stream stands
            while (frames := await opened.outputs.get()) is not None:
                yield frames
            raise ReplicaGone(replica_id, opened.reason, opened.died)
        finally:
            opened.end("this frontend has nothing there any more")
