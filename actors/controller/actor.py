"""The controller as a Ray actor: futures for calls that wait, a clock, a tick. No decisions in here.

One named, detached actor an application. It ends itself when the application that it serves is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import ray
import ray.util.metrics

from actors import logs
from actors.background import repeat
from actors.controller import status as view
from actors.controller.events import (
    Effect,
    Event,
    FrontendGone,
    Log,
    NodesDraining,
    Replace,
    Reply,
    Tick,
    ToFrontend,
    Withdraw,
)
from actors.controller.exports import Exporter
from actors.controller.gc_tuning import tune_gc
from actors.controller.history import History
from actors.controller.machine import Machine
from actors.messages import (
    AdmitRequest,
    FrontendCommand,
    FrontendHeartbeat,
    Join,
    ReplicaLeft,
    Request,
    T,
    Ticket,
    TransferReport,
)
from actors.tracing import tracer
from cluster.metrics import Emitter
from cluster.names import NAMESPACE, controller_actor, transfer_actor
from cluster.spec import ClusterSpec

TICK_S = 0.25
EXPORT_S = 2.0
PING_S = 1.0  # how soon the death of a process is seen; longer with more than PINGS_MAX of them
PINGS_MAX = 200
NODES_S = 2.0
ALONE_S = 40.0  # neither Serve nor a process of the application heard for this long: it is gone
Client = tuple[str, int]  # frontend, and which of its handles
EPOCH_ZERO_S = 1_577_836_800  # 2020-01-01; epochs count half seconds from there, so a later life has a higher one

logger = logging.getLogger("pageferry.controller")


class Controller:
    """Run as a Ray actor; see `get_or_create`. `call` takes the messages of `actors.messages`."""

    def __init__(self, application: str, spec_json: str, deployment: int) -> None:
        import ray.serve  # here: two threads that import it at once, later, find it half imported

        logs.as_component("pageferry_controller", application)
        spec = ClusterSpec.model_validate_json(spec_json)
        self._life = epoch = int((time.time() - EPOCH_ZERO_S) * 2)
        fresh = not _is_restarted()
        self._machine = Machine(spec, epoch, time.monotonic_ns(), fresh, deployment)
        tune_gc()
        self._application = application
        self._calls: dict[int, Callable[[Any], None]] = {}  # what takes the answer, by call
        self._last_call = 0
        self._mailboxes: dict[Client, Mailbox] = {}
        self._orders: dict[str, asyncio.Queue[FrontendCommand]] = {}
        self._polls: Counter[str] = Counter()  # frontend -> long polls that wait on its orders
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: set[str] = set()
        self._heard_at = time.monotonic()
        self._has_looked = False  # at the nodes
        self._history = History()
        self._tracing = spec.tracing
        self._tracer = tracer(spec.tracing, "controller", application)
        self._exporter = Exporter(Emitter(ray.util.metrics, application=application), time.time_ns())

    async def call(self, message: Request[T]) -> T:
        """Every message of replicas, transfer actors and frontends. Raises `IncompatibleReplica` and `StepFailed`."""
        if not isinstance(message, TransferReport):
            self._heard_at = time.monotonic()  # a transfer actor outlives its application
        answer = await self._ask(message)
        if isinstance(message, Join):
            name, life = message.announcement.replica_id, message.announcement.incarnation
            self._watch_process(name, ReplicaLeft(name, life, "has died", "died"))
        elif isinstance(message, FrontendHeartbeat):
            self._watch_process(message.frontend_id, FrontendGone(message.frontend_id))
            answer = msgspec.structs.replace(answer, orders=tuple(self._waiting_orders(message.frontend_id)))
        return cast(T, answer)

    async def calls(
        self, client: Client, batch: list[tuple[int, Request[Any] | None]]
    ) -> tuple[int, list[tuple[int, Any]]]:
        """Many messages, each with a number of its client's; None: no caller waits for that number any more.

        Returns this life's number and (number, answer) of all that are answered; the others come by `answers`.
        """
        self._heard_at = time.monotonic()
        mailbox = self._mailboxes.setdefault(client, Mailbox())
        for number, message in batch:
            if message is None:
                call_id = mailbox.waiting.pop(number, 0)
                if self._calls.pop(call_id, None) is not None:
                    self._run(Withdraw(call_id))
                continue
            call_id = mailbox.waiting[number] = self._next_call()
            self._calls[call_id] = self._traced(message, partial(mailbox.put, number))
            self._run(message, call_id)
        return self._life, mailbox.take()

    async def answers(self, client: Client, timeout_s: float) -> tuple[int, list[tuple[int, Any]]]:
        """Long poll for what `calls` did not answer at once."""
        mailbox = self._mailboxes.setdefault(client, Mailbox())
        mailbox.polls += 1
        try:
            await asyncio.wait_for(mailbox.filled.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            mailbox.polls -= 1
        return self._life, mailbox.take()

    async def orders(self, frontend_id: str, timeout_s: float = 10.0) -> list[FrontendCommand]:
        """Long poll for what else comes with the heartbeat's reply, without its delay."""
        queue = self._orders.setdefault(frontend_id, asyncio.Queue())
        self._polls[frontend_id] += 1
        try:
            return [await asyncio.wait_for(queue.get(), timeout_s), *self._waiting_orders(frontend_id)]
        except TimeoutError:
            return []
        finally:
            self._polls[frontend_id] -= 1

    def _waiting_orders(self, frontend_id: str) -> list[FrontendCommand]:
        queue = self._orders.get(frontend_id)
        return [] if queue is None else [queue.get_nowait() for _ in range(queue.qsize())]

    # -- people

    async def status(self) -> dict[str, Any]:
        self._start()
        return view.status(self._machine, time.monotonic_ns()) | {"history": self._history.points()}

    async def audit(self) -> dict[str, Any]:
        self._start()
        return view.audit(self._machine)

    async def pages(self) -> dict[str, Any]:
        self._start()
        return view.pages(self._machine)

    # -- inside

    async def _ask(self, message: Request[Any]) -> Any:
        call_id = self._next_call()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = self._traced(message, partial(_answer, future))
        try:
            self._run(message, call_id)
            return await future
        except asyncio.CancelledError:
            self._run(Withdraw(call_id))
            raise
        finally:
            self._calls.pop(call_id, None)

    def _traced(self, message: Request[Any], answer: Callable[[Any], None]) -> Callable[[Any], None]:
        """`answer`, with a span of the admission where the request is sampled."""
        if not isinstance(message, AdmitRequest) or not message.trace:
            return answer
        began, trace = time.monotonic(), message.trace

        def traced(value: Any) -> None:
            known = {}
            if isinstance(value, Ticket):
                known = {"ticket": value.ticket_id, "prefill": value.prefill, "decode": value.decode}
            self._tracer.span(
                "controller.admit", trace, time.monotonic() - began, why=getattr(value, "reason", ""), **known
            )
            answer(value)

        return traced

    def _next_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def _run(self, event: Event, call_id: int = 0) -> None:
        self._start()
        for effect in self._machine.step(event, time.monotonic_ns(), call_id):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            if (answer := self._calls.pop(effect.call_id, None)) is not None:
                answer(effect.value)
        elif isinstance(effect, ToFrontend):
            self._orders.setdefault(effect.frontend_id, asyncio.Queue()).put_nowait(effect.order)
        elif isinstance(effect, Replace):
            self._spawn(self._replace(effect))
        elif isinstance(effect, Log):
            logger.log(logging.ERROR if effect.is_error else logging.INFO, effect.text)

    def _start(self) -> None:
        if not self._tasks:
            self._spawn(repeat("the controller's tick", self._tick, TICK_S, logger))
            self._spawn(repeat("the export of metrics", self._export, EXPORT_S, logger))
            self._spawn(repeat("the watch for nodes that are about to go", self._look_at_nodes, NODES_S, logger))
            self._spawn(repeat("the watch for the application's end", self._end_when_alone, ALONE_S / 4, logger))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        self._run(Tick())
        for frontend_id in self._orders.keys() - self._machine.frontends.keys():
            if not self._polls[frontend_id]:  # else a long poll waits on it
                del self._orders[frontend_id], self._polls[frontend_id]
        for client, mailbox in list(self._mailboxes.items()):
            if client[0] not in self._machine.frontends and not mailbox.polls:
                del self._mailboxes[client]

    def _export(self) -> None:
        if self._machine.spec.tracing != self._tracing:  # deployed again
            self._tracing = self._machine.spec.tracing
            self._tracer = tracer(self._tracing, "controller", self._application)
        status = view.status(self._machine, time.monotonic_ns())
        self._history.add(status)
        self._exporter.export(status)

    async def _look_at_nodes(self) -> None:
        """This actor leaves such a node as well, in another life elsewhere; one that Ray put there in spite stays."""
        left = await asyncio.to_thread(draining_nodes, time.time())
        if left:
            self._run(NodesDraining(left))
        here, first = ray.get_runtime_context().get_node_id(), not self._has_looked
        self._has_looked = True
        if here in left and not first and await asyncio.to_thread(_has_other_node, left):
            logger.info("node %s is about to go: the controller goes on elsewhere", here)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=False)

    def _end_when_alone(self) -> None:
        """Serve asks for the pools' sizes while the application exists, and its processes say that they live."""
        if time.monotonic() - self._heard_at > ALONE_S:
            logger.info("no process was heard for %g s: the application is gone, and the controller ends", ALONE_S)
            ray.kill(ray.get_runtime_context().current_actor)

    # -- processes

    def _watch_process(self, name: str, when_dead: Event) -> None:
        """`name` is the id of a Serve replica; once a process, until it is dead."""
        if name not in self._watched:
            self._watched.add(name)
            self._spawn(self._ping(name, when_dead))

    async def _ping(self, name: str, when_dead: Event) -> None:
        """Silence needs seconds to be sure of; that a process is dead, Ray knows at once."""
        try:
            if (actor := await asyncio.to_thread(_actor_of, f"#{name}")) is None:
                return
            while True:
                with contextlib.suppress(ray.exceptions.ActorUnavailableError):  # a broken connection proves nothing
                    await actor.__ray_ready__.remote()
                await asyncio.sleep(PING_S * max(1.0, len(self._watched) / PINGS_MAX))
        except ray.exceptions.RayActorError:
            self._run(when_dead)
        finally:
            self._watched.discard(name)

    async def _replace(self, effect: Replace) -> None:
        """A transfer actor is restarted by Ray; a replica is made anew by Serve."""
        replica = effect.kind == "replica"
        suffix = f"#{effect.name}" if replica else transfer_actor(self._application, effect.name)
        try:
            if (actor := await asyncio.to_thread(_actor_of, suffix)) is not None:
                logger.warning("%s %s hangs and is ended", effect.kind, effect.name)
                ray.kill(actor, no_restart=replica)
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("%s %s cannot be ended: %s", effect.kind, effect.name, error)


class Mailbox:
    """Answers for one client that sends its messages by `Controller.calls`."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}  # number of the client -> call of the machine
        self.filled = asyncio.Event()
        self.polls = 0  # long polls that wait on it
        self._ready: list[tuple[int, Any]] = []

    def put(self, number: int, value: Any) -> None:
        self.waiting.pop(number, None)
        self._ready.append((number, value))
        self.filled.set()

    def take(self) -> list[tuple[int, Any]]:
        taken, self._ready = self._ready, []
        self.filled.clear()
        return taken


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def _actor_of(suffix: str) -> Any:
    """The named actor, of Serve or ours, whose name ends so; None when there is none."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].endswith(suffix):
            try:
                return ray.get_actor(actor["name"], namespace=actor["namespace"])
            except ValueError:
                return None  # gone meanwhile
    return None


def draining_nodes(now_s: float) -> dict[str, float | None]:
    """Seconds that each draining node still has, by node id; None where no time was given. Blocks.

    As Serve's own controller asks: Ray has no public call for it (`ray.nodes()` does not say).
    """
    gcs = ray._private.worker.global_worker.gcs_client
    until_by_node: dict[str, int] = gcs.get_draining_nodes(timeout=5)
    return {node_id: (until_ms / 1e3 - now_s if until_ms else None) for node_id, until_ms in until_by_node.items()}


def _has_other_node(draining: dict[str, float | None]) -> bool:
    """Blocks."""
    return any(node["Alive"] and node["NodeID"] not in draining for node in ray.nodes())


def _is_restarted() -> bool:
    """Whether this process is a later life of the actor."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def get_or_create(application: str, spec: ClusterSpec, deployment: int) -> Any:
    """The application's controller; made if it is not there."""
    return (
        ray.remote(Controller)
        .options(
            name=controller_actor(application),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=100_000,
            num_cpus=0,
            runtime_env=logs.of_actor(),
            # Else, made by a replica that is a placement group, it would belong to that group and end with it for good.
            scheduling_strategy="DEFAULT",
        )
        .remote(application, spec.model_dump_json(), deployment)
    )
