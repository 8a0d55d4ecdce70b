"""The KVTransfer actor: one a node and application. Owns its staging memory and the local socket of its engines.

It only carries: `actors.transfer.machine` decides, and every decision about a ticket is the controller's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import os
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import ray

from actors import link, logs
from actors.messages import HandOver, Lease, StagingStatus, TransferReport, Verdict
from actors.transfer import events as ev
from actors.transfer.channel import Offer
from actors.transfer.chunks import CHUNK_BYTES, ChunkFetch
from actors.transfer.direct import Grant, PageServer
from actors.transfer.fetch import Bytes, fetch
from actors.transfer.host_calls import HostCalls
from actors.transfer.link_server import LinkServer
from actors.transfer.machine import TransferMachine
from actors.transfer.memory import MemoryRefused, StagingMemory, socket_path
from actors.transfer.spans import OFF, TransferSpans
from actors.transfer.staging import Key, Staging, StagingError
from actors.transfer.ways import Ways
from cluster.frontend_spec import TracingSpec
from cluster.names import NAMESPACE, controller_actor, file_tag, transfer_actor

logger = logging.getLogger("pageferry.transfer")

TICK_S = 0.25
REPORT_S = 10.0  # for the controller's answer
ORPHAN_S = 120.0  # no controller and no engine for this long: the application has ended
FETCHES_MAX = 4  # that move bytes at one time; each has at most a window of chunks under way
PROBE_EVERY_S = 5.0
PROBED_MAX = 16  # nodes that are probed without a fetch from there


class KVTransfer:
    """Run as a Ray actor; see `get_or_create`."""

    def __init__(
        self,
        node_id: str,
        staging_bytes_max: int,
        lease_s: float,
        application: str,
        tracing: TracingSpec = OFF,
        host: str = "127.0.0.1",
    ) -> None:
        self.node_id = node_id
        self._host = host  # where other nodes reach this one
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
        self._stopped_copies: set[int] = set()
        self._granted: dict[int, int | None] = {}  # offset of a copy that is being granted to another node
        self._movers = concurrent.futures.ThreadPoolExecutor(FETCHES_MAX, "fetch")
        self._server: PageServer | None = None
        self._ways: Ways | None = None
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
            self._ways = Ways(asyncio.get_running_loop(), self._get_peer)
            self._server = PageServer(self._host, self._grant_from_thread(asyncio.get_running_loop()))
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
        for task in self._tasks - {asyncio.current_task()}:  # which may be the one that ends an orphan
            task.cancel()
        self.links.close()
        self.hosts.close()
        if self._server is not None and self._ways is not None:
            self._server.close()
            self._ways.close()
        self._stopped.update(self.machine.fetches.running)
        await asyncio.to_thread(self._movers.shutdown, cancel_futures=True)
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
        """These engines never began to write (or are dead). Marks the ticket's bytes: they are given back when no other
        engine holds them. May overtake `lease`."""
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
        """These engines never began to read. Marks the ticket's bytes as `drop_writer`. May overtake `begin_read`."""
        self._step(ev.ReaderDropped((ticket_id, attempt), tuple(engines)))

    async def release(self, keys: list[Key]) -> None:
        self._step(ev.Released(tuple((ticket_id, attempt) for ticket_id, attempt in keys)))

    # -- calls of transfer actors on other nodes

    async def invite(self) -> link.Address:
        """Where that node's bytes are sent from, and a secret for one connection."""
        if self._server is None:
            raise StagingError("it has not started")
        return self._server.invite()

    async def read(self, lease: Lease, first: int, num_bytes: int) -> tuple[Bytes, int] | None:
        """A chunk of a lease of this node and its checksum; Ray's object store carries it."""
        if num_bytes > CHUNK_BYTES:
            raise StagingError(f"a chunk of {num_bytes} bytes was asked for; the most is {CHUNK_BYTES}")
        piece: tuple[Bytes, int] | None = await self._call(lambda call: ev.PieceAsked(call, lease, first, num_bytes))
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
                case ev.CopyOut(call_id, offset):
                    if call_id in self._granted:
                        self._granted[call_id] = offset
                    else:
                        self._spawn(self._copy_out(effect))
                case ev.StopCopy(call_id):
                    self._stopped_copies.add(call_id)
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

    # -- bytes, in chunks, off the event loop

    def _bytes(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self.memory.map)[offset : offset + num_bytes]

    async def _copy_out(self, effect: ev.CopyOut) -> None:
        def copy() -> tuple[Bytes, int]:
            piece = np.frombuffer(self._bytes(effect.offset, effect.num_bytes), np.uint8).copy()
            return piece, zlib.crc32(piece.data)

        try:
            self._answer(effect.call_id, await asyncio.to_thread(copy))
        finally:
            self._copied_out(effect.call_id)

    def _copied_out(self, call_id: int) -> None:
        self._step(ev.CopiedOut(call_id))
        self._stopped_copies.discard(call_id)

    def _grant_from_thread(self, loop: asyncio.AbstractEventLoop) -> Callable[[Lease, int, int], Grant | None]:
        """For the threads that send to other nodes: the machine is asked on its own thread."""

        async def granted(lease: Lease, first: int, num_bytes: int) -> Grant | None:
            call_id = next(self._call_ids)
            self._granted[call_id] = None
            try:
                self._step(ev.PieceAsked(call_id, lease, first, num_bytes))
            finally:
                offset = self._granted.pop(call_id)
            if offset is None:
                return None

            def done() -> None:
                loop.call_soon_threadsafe(self._copied_out, call_id)

            return Grant(
                self._bytes(offset, num_bytes),
                lambda: call_id in self._stopped_copies,
                done,
            )

        return lambda *chunk: asyncio.run_coroutine_threadsafe(granted(*chunk), loop).result()

    def _get_peer(self, node_id: str) -> Any:
        return ray.get_actor(transfer_actor(self._application, node_id), namespace=NAMESPACE)

    async def _fetch(self, effect: ev.StartFetch) -> None:
        source, ways = effect.source, self._ways
        target = self._bytes(effect.offset, source.num_bytes)
        measured = ev.Measured(source.node_id, "", False, 0, 0, reason="the fetch itself has failed")
        try:
            assert ways is not None, "calls come after `start`"
            plan, of_node = ChunkFetch(source.num_bytes, 2), ways.of(source.node_id)
            measured = await asyncio.get_running_loop().run_in_executor(
                self._movers, lambda: fetch(source, target, of_node, lambda: effect.fetch_id in self._stopped, plan)
            )
            if measured.reason or measured.asked_again:
                logger.warning("ticket %d, from node %s: %s", source.ticket_id, source.node_id, measured)
                ways.forget(source.node_id)
        finally:
            self._stopped.discard(effect.fetch_id)
            self._step(ev.FetchEnded(effect.fetch_id, measured))

    async def probe(self, node_id: str) -> bool:
        """Measures the best way to another node. False: no transfer actor is there yet."""
        assert self._ways is not None, "calls come after `start`"
        if (found := await asyncio.to_thread(self._ways.probe, node_id)) is not None:
            self._step(found)
        return found is not None

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
        super().__init__(*args, host=ray.util.get_node_ip_address())
        logs.as_component("pageferry_transfer", f"{self._application}_{self.node_id[:12]}")
        await self.start()
        self._spawn(self._probe_loop())

    async def _probe_loop(self) -> None:
        """At the start, so that the first request is not placed by a guess."""
        probed: set[str] = {self.node_id}
        while len(probed) <= PROBED_MAX:
            try:
                nodes = [node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
                for node_id in nodes:
                    if node_id not in probed and len(probed) <= PROBED_MAX and await self.probe(node_id):
                        probed.add(node_id)
            except Exception:
                logger.exception("other nodes cannot be probed")
            await asyncio.sleep(PROBE_EVERY_S)


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
