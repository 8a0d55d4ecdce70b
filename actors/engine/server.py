"""One vLLM engine and its place in the cluster, without Ray: `replica.py` makes Serve deployments of its two kinds.

It holds vLLM's own engine core client and relays: requests in, `EngineCoreOutputs` out, one message a step and
frontend, over a socket to each frontend (`frontend_links.py`). It decides nothing about tickets; it turns them into
orders for its engine, and tells the controller what happened. `transfer` and `controller` are handles whose methods are
called as `handle.method.remote(...)` and awaited: Ray actors in the service, plain objects behind
`ops.engine_pair.LocalHandle` where engines run without a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from actors.engine import engine_shm
from actors.engine.config import engine_kwargs, fingerprint, generation, pool_of, tokenizer_path
from actors.engine.engine_counters import EngineCounters, TokenRate
from actors.engine.frontend_links import FrontendLinks
from actors.engine.in_flight import EngineDied, InFlight, ReplicaError
from actors.engine.pending_report import PendingReport
from actors.engine.refusals import refuse_unmovable
from actors.engine.transfer_client import TransferClient
from actors.engine.watch import EngineWatch, LifeFile, Progress
from actors.link import Address
from actors.messages import (
    Announcement,
    HeartbeatReply,
    Join,
    Occupancy,
    ReplicaEventKind,
    ReplicaHeartbeat,
    ReplicaLeft,
    Role,
)
from actors.tracing import tracer
from cluster.fault_kinds import FaultError, Side, page_fault
from cluster.plan.preflight import refuse_unfit
from cluster.quality import refuse_poor_quality
from cluster.spec import ClusterSpec
from kernels.layout import PageLayout

logger = logging.getLogger("pageferry.replica")

HEARTBEAT_EVERY_S = 0.5
IDLE_BEATS = 3  # without anything to say; from then on a beat comes less often, until something happens
IDLE_EVERY_S = 2.0
PAGES_A_BEAT = 8192  # taken pages that one heartbeat tells of at most; about 150 KiB
UTILITY_TIMEOUT_S = 1.0
DEVICE_FACTS = ("device", "model_runner", "attention_backend", "kv_cache_layout", "cuda_graphs")
GOODBYE_S = 2.0


class EngineServer:
    role: Role

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        replica_id: str,
        node_id: str,
        get_transfer: Callable[[], Any],
        socket_path: str,
        get_controller: Callable[[], Any],
        host: str = "127.0.0.1",
    ) -> None:
        self.spec = spec
        self.pool = pool_of(spec, self.role)
        self.replica_id = replica_id
        self.node_id = node_id
        self.incarnation = time.time_ns()
        self._transfer = TransferClient(node_id, get_transfer, socket_path)
        self._get_controller = get_controller
        self._tracer = tracer(spec.tracing, str(self.role), replica_id)
        self._live: dict[str, InFlight] = {}
        self._streams: dict[str, asyncio.Queue[list[bytes] | None]] = {}
        self._report = PendingReport()
        self._token_rate = TokenRate()
        self._engine = EngineCounters()
        self._failure: str = ""
        self._failed = asyncio.Event()
        self.links = FrontendLinks(self, host, sends_outputs=self.role is Role.DECODE)
        self._tasks: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._start_engine(socket_path)

    def _start_engine(self, socket_path: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        began = time.monotonic()
        engine_shm.begin()
        if self.pool.gpus_per_replica:
            from vllm.platforms import current_platform

            refuse_unfit(self.spec, str(self.role), current_platform.get_device_name())  # of NVML: no CUDA here
        refuse_poor_quality(self.spec, str(self.role))
        self._life = LifeFile(1 + self.pool.tensor_parallel)
        try:
            kwargs = engine_kwargs(
                self.spec, self.role, self.replica_id, socket_path, self._life.path, self.incarnation
            )
            self.config = AsyncEngineArgs(**kwargs).create_engine_config()
            refuse_unmovable(self.config, self.pool, str(self.role))
            executor = Executor.get_class(self.config)
            self.core = EngineCoreClient.make_async_mp_client(self.config, executor, log_stats=True)
        finally:
            self._life.close()
        engine_shm.note(os.getpid())
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self.engines = [f"{self.replica_id}#{rank}" for rank in range(self.config.parallel_config.world_size)]
        logger.info("%s engine of %s is up after %.1f s", self.role, self.replica_id, time.monotonic() - began)

    async def start(self) -> None:
        """Describes the engine, joins the cluster and starts the background loops. Once. Raises when it has failed."""
        if self._failure:
            raise ReplicaError(self._failure)
        if self._tasks:
            return
        self._tasks = [asyncio.create_task(self._pump())]
        self.description = (await self.core.collective_rpc_async("pageferry_describe"))[0]
        self.layout = PageLayout.from_dict(self.description["layout"])
        self.fingerprint = fingerprint(self.config, tokenizer_path(self.spec, self.role))
        self.controller = self._get_controller()
        self._stats = await self.core.call_utility_async("pageferry_scheduler")
        await self.controller.call.remote(Join(self.announcement()))
        self._tasks.append(asyncio.create_task(self._heartbeat_loop()))

    async def check_health(self) -> None:
        """Called by Serve; raising makes it replace the replica."""
        await self.start()

    async def link(self, frontend_id: str) -> AsyncGenerator[Address, None]:
        """Where this frontend's socket goes; the socket ends with this stream.

        Serve lets a replica that is leaving go when no such stream is open any more.
        """
        await self.start()
        address = await self.links.invite(frontend_id)
        try:
            yield address
            await self._failed.wait()
            raise ReplicaError(self._failure)
        finally:
            self.links.end(address.invitation)

    def announcement(self) -> Announcement:
        cache = self.config.cache_config
        return Announcement(
            replica_id=self.replica_id,
            role=self.role,
            node_id=self.node_id,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout.to_dict(),
            block_tokens=cache.block_size,
            blocks_total=int(self._stats["blocks_total"]),
            max_model_len=self.config.model_config.max_model_len,
            max_num_seqs=self.pool.max_num_seqs,
            engine={
                "kv_cache_bytes": self.description["kv_cache_bytes"],
                "weights_bytes": self.description["weights_bytes"],
                "weights_loaded_bytes": self.description["weights_loaded_bytes"],
                "worker_pid": self.description["pid"],
                **{name: self.description[name] for name in DEVICE_FACTS},
                "async_scheduling": self.config.scheduler_config.async_scheduling,
                "replica_pid": os.getpid(),
                "weights": self.pool.weights or self.spec.model.path,
                "kv_dtype": self.pool.kv_dtype,
                "max_num_seqs": self.pool.max_num_seqs,
            },
            generation=generation(self.spec),
            tickets=tuple({live.ticket.ticket_id for live in self._live.values()}),
        )

    async def describe(self) -> Announcement:
        await self.start()
        return self.announcement()

    async def utility(self, method: str, args: list[Any]) -> Any:
        """A utility method of vLLM's engine core, for the frontends' admin routes."""
        return await self.core.call_utility_async(method, *args)

    async def fault(self, kind: str, trial: int, target: str | int, more: float = 0) -> dict[str, Any]:
        """Puts a fault into this engine; only kinds that `faults.kinds` names.

        `target`: see `actors.engine.fault_injection`.

        Raises `FaultError`. What was done comes back; `fired` False: not possible now.
        """
        if kind not in self.spec.faults.kinds:
            allowed = ", ".join(self.spec.faults.kinds) or "nothing"
            raise FaultError(f"fault {kind!r} is not allowed here; faults.kinds allows {allowed}")
        done: dict[str, Any]
        if page_fault(kind).side is Side.SCHEDULER:
            done = await self.core.call_utility_async("pageferry_fault", kind, trial, target)
        else:
            done = (await self.core.collective_rpc_async("pageferry_fault", args=(kind, trial, target, more)))[0]
        return done

    async def audit(self) -> dict[str, Any]:
        """What the scheduler half, the page ledger and the worker half say of themselves now.

        `integrity` has the laws that are broken now, and the latest breaches and verdicts with the pages' histories.
        Walking the ledger takes the engine's scheduler some milliseconds in ten thousand pages.
        """
        scheduler = await self.core.call_utility_async("pageferry_scheduler")
        integrity = await self.core.call_utility_async("pageferry_audit")
        workers = await self.core.collective_rpc_async("pageferry_worker")
        return {
            "replica_id": self.replica_id,
            "role": str(self.role),
            "scheduler": scheduler,
            "integrity": integrity,
            "workers": workers,
        }

    async def _pump(self) -> None:
        try:
            while True:
                outputs = await self.core.get_output_async()
                self._engine.add(outputs)
                self._on_outputs(outputs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._fail(f"the engine of {self.replica_id} is gone: {error}", "died")

    async def _fail(self, reason: str, lost: str) -> None:
        """For good: callers that wait for this replica hear of it now, and Serve makes another one.

        `lost`: see `ReplicaLeft`.
        """
        if self._failure:
            return
        self._failure = reason
        self._failed.set()
        logger.error("%s", reason)
        for live in self._live.values():
            if live.done is not None and not live.done.done():
                live.done.set_exception(EngineDied(reason))
        for queue in self._streams.values():
            queue.put_nowait(None)
        await self.say_goodbye(lost)

    async def say_goodbye(self, lost: str = "") -> None:
        """The controller gives no more tickets to this life of the replica. What it did not hear, silence tells it."""
        with contextlib.suppress(Exception):
            goodbye = ReplicaLeft(self.replica_id, self.incarnation, f"has {lost or 'left'}", lost)
            await asyncio.wait_for(self.controller.call.remote(goodbye), GOODBYE_S)

    def _on_outputs(self, outputs: Any) -> None:
        raise NotImplementedError

    def _event(self, kind: ReplicaEventKind, live: InFlight | None = None, request_id: str = "", **more: Any) -> None:
        self._woken.set()
        self._report.add(kind, live, request_id, **more)

    async def _heartbeat_loop(self) -> None:
        admission = self.spec.admission
        watch = EngineWatch(int(admission.fence_after_s * 1e9), int(admission.hung_after_s * 1e9))
        pending: asyncio.Task[Any] | None = None
        asked_ns = 0
        idle_s = min(IDLE_EVERY_S, admission.stale_after_s / 3)
        idle_beats = 0
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            idle_beats = 0 if self._live or self._report.events or self._report.wants_all_pages else idle_beats + 1
            if idle_beats > IDLE_BEATS and idle_s > HEARTBEAT_EVERY_S:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), idle_s - HEARTBEAT_EVERY_S)
            # The engine answers between steps; a long step keeps the last answer, and its processes prove their lives.
            if pending is None:
                asked_ns = time.monotonic_ns()
                whole, self._report.wants_all_pages = self._report.wants_all_pages, False
                pending = asyncio.create_task(self.core.call_utility_async("pageferry_beat", PAGES_A_BEAT, whole))
            done, _ = await asyncio.wait([pending], timeout=UTILITY_TIMEOUT_S)
            now_ns = time.monotonic_ns()
            if done:
                if self._failure:
                    return
                if (error := pending.exception()) is not None:
                    await self._fail(f"the engine of {self.replica_id} does not answer: {error}", "died")
                    return
                self._stats, pending = pending.result(), None
                running = 0 if self._stats["paused"] else self._stats["running"]
                watch.answered(Progress(asked_ns, self._engine.steps, running), now_ns)
                self._report.add_answer(self._stats, self._live)
            if reason := watch.verdict(asked_ns if pending else 0, self._life.oldest_ns(), now_ns):
                await self._fail(f"{self.replica_id}: {reason}", "hung")
            if self._failure:
                return
            await self._beat()

    async def _beat(self) -> None:
        events, pages, whole = self._report.take()
        heartbeat = ReplicaHeartbeat(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            occupancy=self.occupancy(),
            events=events,
            pages=pages,
            pages_whole=whole,
            counters={name: float(value) for name, value in self._stats["counters"].items()} | self._engine.totals(),
        )
        try:
            reply: HeartbeatReply = await self.controller.call.remote(heartbeat)
            if not reply.known:
                self._report.wants_all_pages = True
                await self.controller.call.remote(Join(self.announcement()))
            if reply.fenced:
                # Its tickets are elsewhere by now.
                await self._abort(list(self._live))
                await self._fail(f"{self.replica_id} was silent for too long and has been fenced", "hung")
            if reply.cancel:
                gone = dict(sorted(reply.cancel))  # the latest attempt of each ticket; a later one stays
                dropped = {
                    r: live
                    for r, live in self._live.items()
                    if live.ticket.attempt <= gone.get(live.ticket.ticket_id, 0)
                }
                await self._abort(list(dropped))
                self._report_dropped(dropped)
        except Exception as error:  # Ray's many ways to say that an actor is away
            self._report.put_back(events)
            logger.warning("controller is not there: %s", error)
            with contextlib.suppress(Exception):
                self.controller = self._get_controller()

    def occupancy(self) -> Occupancy:
        stats = self._stats
        return Occupancy(
            blocks_total=stats["blocks_total"],
            blocks_free=stats["blocks_free"],
            blocks_held=stats["blocks_held"],
            blocks_quarantined=stats["blocks_quarantined"],
            running=stats["running"],
            waiting=stats["waiting"],
            waiting_prompt_tokens=sum(
                live.ticket.num_prompt_tokens for live in self._live.values() if not live.started
            ),
            tokens_per_s=self._token_rate.per_second(),
        )

    async def _abort(self, request_ids: list[str]) -> None:
        in_engine = []
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None:
                continue
            live.aborted = True
            if live.in_engine:
                in_engine.append(request_id)
                self._live.pop(request_id, None)
                self._event(ReplicaEventKind.RELEASED, live, request_id)
                if live.done is not None and not live.done.done():
                    live.done.cancel()
        if in_engine:
            await self.core.abort_requests_async(in_engine)

    def _report_dropped(self, dropped: dict[str, InFlight]) -> None:
        """They ended by the controller's wish: a frontend that still waits for one hears of it."""

    def _encode(self, outputs: Any, share: list[Any]) -> list[bytes]:
        """One message: `share` of the outputs."""
        from vllm.v1.engine import EngineCoreOutputs

        part = EngineCoreOutputs(outputs=share, timestamp=outputs.timestamp, weight_version=outputs.weight_version)
        return [bytes(frame) for frame in self._encoder.encode(part)]

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def end(self) -> None:
        """Serve calls this when nothing is in progress any more. Also of a replica that never started."""
        if getattr(self, "core", None) is not None:
            await self.say_goodbye()
            self.shutdown()

    def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self.links.close()
        self._transfer.close()
        self.core.shutdown()
        engine_shm.sweep()  # of processes that had to be killed
