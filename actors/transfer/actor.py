"""The KVTransfer actor: one a node and application. Owns its staging memory and the local socket of its engines.

It only carries: `actors.transfer.machine` decides, and every decision about a ticket is the controller's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import ray

from actors import logs
from actors.messages import HandOver, Lease, StagingStatus, TransferReport, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import Offer
from actors.transfer.fetch import PIECE_BYTES, Bytes, fetch
from actors.transfer.host_calls import HostCalls
from actors.transfer.link_server import LinkServer
from actors.transfer.machine import TransferMachine
from actors.transfer.memory import MemoryRefused, StagingMemory, socket_path
from actors.transfer.spans import OFF, TransferSpans
from actors.transfer.staging import Key, Staging, StagingError
from cluster.frontend_spec import TracingSpec
from cluster.names import NAMESPACE, controller_actor, file_tag, transfer_actor

logger = logging.getLogger("pageferry.transfer")

TICK_S = 0.25
REPORT_S = 10.0  # for the controller's answer
ORPHAN_S = 120.0  # no controller and no engine for this long: the application has ended


class KVTransfer:
    """Run as a Ray actor; see `get_or_create`."""

    def __init__(
        self,
        node_id: str,
        staging_bytes_max: int,
        lease_s: float,
        application: str,
        tracing: TracingSpec = OFF,
    ) -> None:
        self.node_id = node_id
        self._application = application
        self._spans = TransferSpans(tracing, node_id)
        self._incarnation = time.time_ns()
        self._segments = itertools.count(1)
        num_bytes = Staging(staging_bytes_max).bytes_max
        self.memory = StagingMemory(num_bytes)
        self.machine = TransferMachine(node_id, self._incarnation, self._next_segment(), num_bytes, int(lease_s * 1e9))
        path = socket_path(file_tag(application), node_id)
        self.links = LinkServer(path, self._step)
        self.hosts = HostCalls(self, path)
        self._controller: Any = None
        self._orphan_since = 0.0
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._stopped: set[int] = set()  # fetches that are not waited for
        self._tasks: set[asyncio.Task[None]] = set()

    def _next_segment(self) -> str:
        return f"{self.node_id[:12]}-{self._incarnation:x}-{next(self._segments)}"

    async def start(
        self, staging_bytes_max: int = 0, lease_s: float = 0.0, tracing: TracingSpec | None = None
    ) -> dict[str, Any]:
        """Idempotent; returns what a replica has to tell its engine. Settings other than those in force take effect."""
        if not self._tasks:
            self._spawn(self._tick_loop())
            self.links.start()
            await self.hosts.start()
        if tracing is not None:
            self._spans.configure(tracing)
        if staging_bytes_max:
            self._step(ev.Configured(staging_bytes_max, int(lease_s * 1e9)))
        return {"socket": self.links.path, "segment": self.machine.segment, "node_id": self.node_id}

    async def pid(self) -> int:
        return os.getpid()

    def status(self) -> StagingStatus:
        return self.machine.status()

    async def close(self) -> None:
        """Ends the loops and removes the socket. The memory goes with the last process that has it mapped."""
        for task in self._tasks:
            task.cancel()
        self.links.close()
        self.hosts.close()
        self.memory.close()

    # -- calls of replicas

    async def lease(
        self,
        ticket_id: int,
        attempt: int,
        num_bytes: int,
        engines: list[str],
        wait_s: float,
        keep_s: float = 0.0,
        trace: str = "",
    ) -> Lease | None:
        """Staging for a ticket, written by `engines`. Waits for room up to `wait_s`; None when there was none.

        It ends when no page is sealed for `keep_s` (0: the configured lease time) and no reader has come for it.

        Raises `StagingError` when there can never be. May be repeated: the same ticket gets the same bytes.
        """
        key, writers, wait_ns, keep_ns = (ticket_id, attempt), tuple(engines), int(wait_s * 1e9), int(keep_s * 1e9)
        lease: Lease | None = await self._call(
            lambda call: ev.LeaseAsked(call, key, num_bytes, writers, wait_ns, keep_ns)
        )
        self._spans.leased(key, trace)
        return lease

    async def drop_writer(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        """These engines never began to write (or are dead); the ticket's bytes are released. May overtake `lease`."""
        self._step(ev.WriterDropped((ticket_id, attempt), tuple(engines)))

    async def begin_read(
        self, hand_over: HandOver, engines: list[str], wait_s: float | None = None, trace: str = ""
    ) -> Lease | Verdict:
        """Registers `engines` as readers; brings the bytes to this node first when they lie on another one.

        MISSING when that takes longer than `wait_s` (default: the hand-over's deadline).
        """
        readers, wait_ns = tuple(engines), int((wait_s or hand_over.deadline_s) * 1e9)
        self._spans.reads((hand_over.ticket_id, hand_over.attempt), trace)
        answer: Lease | Verdict = await self._call(lambda call: ev.ReadAsked(call, hand_over, readers, wait_ns))
        return answer

    async def drop_reader(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        """These engines never began to read; the ticket's bytes are released. May overtake `begin_read`."""
        self._step(ev.ReaderDropped((ticket_id, attempt), tuple(engines)))

    async def release(self, keys: list[Key]) -> None:
        self._step(ev.Released(tuple((ticket_id, attempt) for ticket_id, attempt in keys)))

    async def read(self, lease: Lease, first: int, num_bytes: int) -> Bytes | None:
        """A piece of a lease of this node, for a transfer actor elsewhere; Ray's object store carries it."""
        if num_bytes > PIECE_BYTES:
            raise StagingError(f"a piece of {num_bytes} bytes was asked for; the most is {PIECE_BYTES}")
        piece: Bytes | None = await self._call(lambda call: ev.PieceAsked(call, lease, first, num_bytes))
        return piece

    async def _call(self, event: Callable[[int], ev.Event]) -> Any:
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._step(event(call_id))
            return await future
        finally:
            del self._calls[call_id]

    # -- the machine

    def _step(self, event: ev.Event) -> None:
        for effect in self.machine.step(event, time.monotonic_ns()):
            match effect:
                case ev.Answer(call_id, value):
                    self._answer(call_id, value)
                case ev.Refuse(call_id, message):
                    self._answer(call_id, StagingError(message))
                case ev.CopyOut():
                    self._spawn(self._copy_out(effect))
                case ev.StartFetch():
                    self._spawn(self._fetch(effect))
                case ev.StopFetch(fetch_id):
                    self._stopped.add(fetch_id)
                case ev.Welcome(_, link, revoked):
                    segment, num_bytes = self.machine.segment, self.memory.num_bytes
                    offer = Offer(segment=segment, num_bytes=num_bytes, revoked=list(revoked))
                    self.links.offer(link, offer, self.memory.fd)
                case ev.MakeStaging(num_bytes):
                    self._spawn(self._make_staging(num_bytes))
                case ev.Report():
                    self._spans.happened(effect.events)
                    self._spawn(self._report(effect))

    def _answer(self, call_id: int, value: Any) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return  # its caller has left
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._step(ev.Tick())
            except Exception:
                logger.exception("a step of the transfer machine has failed")

    async def _make_staging(self, num_bytes: int) -> None:
        former = self.memory
        try:
            former.give_back()  # first: there may not be memory for both
            self.memory = await asyncio.to_thread(StagingMemory, num_bytes)
        except (MemoryRefused, OSError) as error:
            logger.error("staging stays at %d bytes: %s", former.num_bytes, error)
            await asyncio.to_thread(os.posix_fallocate, former.fd, 0, former.num_bytes)
            self._step(ev.StagingRefused(str(error)))
            return
        former.close()
        logger.info("staging has %d bytes now", num_bytes)
        self._step(ev.StagingMade(self._next_segment(), num_bytes))

    # -- bytes, in pieces, off the event loop

    def _bytes(self, offset: int, num_bytes: int) -> Bytes:
        return np.frombuffer(self.memory.map, np.uint8)[offset : offset + num_bytes]

    async def _copy_out(self, effect: ev.CopyOut) -> None:
        try:
            piece = await asyncio.to_thread(self._bytes(effect.offset, effect.num_bytes).copy)
            self._answer(effect.call_id, piece)
        finally:
            self._step(ev.CopiedOut(effect.call_id))

    async def _fetch(self, effect: ev.StartFetch) -> None:
        source, complete = effect.source, False
        target = self._bytes(effect.offset, source.num_bytes)
        try:
            name = transfer_actor(self._application, source.node_id)
            peer = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
            complete = await fetch(
                lambda first, num_bytes: peer.read.remote(source, first, num_bytes),
                target,
                lambda: effect.fetch_id in self._stopped,
            )
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("ticket %d: cannot fetch from node %s: %s", source.ticket_id, source.node_id, error)
        finally:
            self._stopped.discard(effect.fetch_id)
            self._step(ev.FetchEnded(effect.fetch_id, complete))

    # -- the controller

    async def _report(self, report: ev.Report) -> None:
        try:
            if self._controller is None:
                name = controller_actor(self._application)
                self._controller = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
            message = TransferReport(status=report.status, events=report.events)
            dead = await asyncio.wait_for(self._controller.call.remote(message), REPORT_S)
        except Exception as error:  # Ray's many ways to say that an actor is away
            self._controller = None
            self._step(ev.ReportFailed())
            await self._end_if_orphaned(error)
            return
        self._orphan_since = 0.0
        self._step(ev.ReportAnswered(tuple((int(ticket_id), int(attempt)) for ticket_id, attempt in dead)))

    async def _end_if_orphaned(self, error: Exception) -> None:
        """The controller's name is gone for good and no engine is left here: the application has ended."""
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if isinstance(error, ValueError) and now - self._orphan_since > ORPHAN_S and not self.machine.engines.links:
            await self.close()
            ray.kill(ray.get_runtime_context().current_actor)


class KVTransferActor(KVTransfer):
    """Starts by itself, so that a restarted actor serves its node again without being asked to."""

    async def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        logs.as_component("pageferry_transfer", f"{self._application}_{self.node_id[:12]}")
        await self.start()


def get_or_create(
    node_id: str, staging_bytes_max: int, lease_s: float, application: str, tracing: TracingSpec = OFF
) -> Any:
    """The application's KVTransfer actor of a node; made there if it is not there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(KVTransferActor)
        .options(
            name=transfer_actor(application, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,  # every method may be repeated
            max_concurrency=1000,
            num_cpus=0,
            runtime_env=logs.of_actor(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(node_id, staging_bytes_max, lease_s, application, tracing)
    )
