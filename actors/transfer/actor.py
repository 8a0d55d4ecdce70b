"""The KVTransfer actor: one a node and application. Owns its staging memory and the local socket of its worker halves.

It only carries: who may touch which bytes is `staging`, what a seal is made of is `seals`, and every decision about a
ticket is the controller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from actors import logs
from actors.messages import (
    HandOver,
    Lease,
    LeaseLost,
    Opened,
    OpenedAt,
    Sealed,
    StagingStatus,
    TransferEvent,
    TransferReport,
    Verdict,
)
from actors.transfer.channel import (
    ChannelError,
    Hello,
    PagesOpened,
    PagesSealed,
    WorkerMessage,
    WriterDone,
    create_segment,
    decode_body,
    frame_length,
)
from actors.transfer.seals import SealCollector
from actors.transfer.staging import Key, Region, Staging
from cluster.names import NAMESPACE, controller_actor, file_tag, transfer_actor

logger = logging.getLogger("pageferry.transfer")

REPORT_EVERY_S = 0.5
EXPIRE_EVERY_S = 0.25
REMEMBERED = 1_000
ORPHAN_S = 120.0  # no controller and no engine for this long: the application has ended


class KVTransfer:
    """Run as a Ray actor; see `get_or_create`."""

    def __init__(self, node_id: str, staging_bytes_max: int, lease_s: float, application: str) -> None:
        self.node_id = node_id
        self.incarnation = time.time_ns()
        self.lease_ns = int(lease_s * 1e9)
        self.staging = Staging(staging_bytes_max)
        self.segment, self._memory = create_segment(node_id[:12], self.staging.bytes_max)
        self.seals = SealCollector()
        self.bytes_moved = 0
        self.tokens_moved = 0
        self._application = application
        self._controller: Any = None
        self._events: list[TransferEvent] = []
        self._standing: dict[Key, Sealed] = {}  # sealed, and the lease not released yet
        self._wake = asyncio.Event()
        self._room = asyncio.Condition()
        self._opening: dict[Key, list[Opened]] = {}
        self._links: dict[str, asyncio.StreamWriter] = {}
        self._gone: dict[str, None] = {}  # engines whose connection has ended
        self._refused: dict[Key, None] = {}  # given up before the call that asks for them was done
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._orphan_since = 0.0
        folder = Path(tempfile.gettempdir()) / f"pageferry-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        # The same in every life of this actor, so that worker halves find the next one.
        self.socket_path = str(folder / f"transfer-{file_tag(application)}-{node_id[:12]}.sock")

    # -- set-up

    async def start(self) -> dict[str, Any]:
        """Idempotent; returns what a replica must know to tell its worker halves."""
        if not self._tasks:
            Path(self.socket_path).unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self.socket_path)
            os.chmod(self.socket_path, 0o600)
            self._tasks = [asyncio.create_task(self._report_loop()), asyncio.create_task(self._expire_loop())]
        return {"socket": self.socket_path, "segment": self.segment, "node_id": self.node_id}

    async def pid(self) -> int:
        return os.getpid()

    # -- leases

    async def lease(
        self, ticket_id: int, attempt: int, num_bytes: int, engines: list[str], wait_s: float
    ) -> Lease | None:
        """Staging for a ticket, written by `engines`. Waits for room up to `wait_s`; None when there was none.

        Ray repeats a call whose answer got lost with the actor or the connection: the same ticket gets the same bytes.
        An engine that is gone gets none: nothing would tell when it needs them no more.
        """
        if self._gone.keys() & set(engines):
            return None
        key = (ticket_id, attempt)
        deadline = time.monotonic() + wait_s
        async with self._room:
            while (region := self._grant(key, num_bytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), min(left, 0.5))
        for engine in engines:
            self.staging.open_writer(key, engine)
        return Lease(
            ticket_id=ticket_id,
            attempt=attempt,
            node_id=self.node_id,
            segment=self.segment,
            offset=region.offset,
            num_bytes=num_bytes,
        )

    def _grant(self, key: Key, num_bytes: int) -> Region | None:
        if key in self._refused:
            return None
        held = self.staging.get(key)
        if held is not None and not held.released and held.num_bytes == num_bytes:
            return held
        return self.staging.grant(key, num_bytes, time.monotonic_ns() + self.lease_ns)

    async def drop_writer(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        """The replica knows that these engines never began (or are dead); then the ticket's bytes are released.

        May overtake the `lease` that it takes back, which then gets nothing.
        """
        key = (ticket_id, attempt)
        for engine in engines:
            self.staging.writer_done(key, engine)
        await self._give_up(key)

    async def begin_read(self, hand_over: HandOver, engines: list[str], wait_s: float | None = None) -> Lease | Verdict:
        """Registers `engines` as readers; brings the bytes to this node first when they lie on another one.

        MISSING when that takes longer than `wait_s` (default: the hand-over's deadline).
        """
        key = (hand_over.ticket_id, hand_over.attempt)
        if hand_over.lease.node_id != self.node_id:
            try:
                fetched = await asyncio.wait_for(self._fetch(hand_over), wait_s or hand_over.deadline_s)
            except TimeoutError:
                return Verdict.MISSING
            if isinstance(fetched, Verdict):
                return fetched
            lease = fetched
        else:
            lease = hand_over.lease
            if lease.segment != self.segment:
                return Verdict.MISSING  # of an earlier life of this actor
        if key in self._refused or self._gone.keys() & set(engines):
            return Verdict.STALE
        if not all(self.staging.open_reader(key, engine) for engine in engines):
            for engine in engines:
                self.staging.reader_done(key, engine)
            return Verdict.STALE
        return lease

    async def drop_reader(self, ticket_id: int, attempt: int, engines: list[str]) -> None:
        key = (ticket_id, attempt)
        for engine in engines:
            self.staging.reader_done(key, engine)
        await self._give_up(key)

    async def _give_up(self, key: Key) -> None:
        self._refused[key] = None
        while len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]
        await self.release([key])

    async def release(self, keys: list[Key]) -> None:
        for key in keys:
            self.staging.release(key)
            self.seals.forget(key)
            self._standing.pop(key, None)
            self._opening.pop(key, None)
        async with self._room:
            self._room.notify_all()

    # -- between nodes

    async def read(self, lease: Lease) -> npt.NDArray[np.uint8] | None:
        """The bytes of a lease of this node, for a transfer actor elsewhere; Ray's object store carries them."""
        region = self.staging.get((lease.ticket_id, lease.attempt))
        if region is None or region.released or lease.segment != self.segment:
            return None
        end = region.offset + region.num_bytes
        return np.frombuffer(self._memory, np.uint8)[region.offset : end].copy()

    async def _fetch(self, hand_over: HandOver) -> Lease | Verdict:
        source = hand_over.lease
        try:
            peer = ray.get_actor(transfer_actor(self._application, source.node_id), namespace=NAMESPACE)
            data = await asyncio.wait_for(peer.read.remote(source), hand_over.deadline_s)
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("ticket %d: cannot fetch from node %s: %s", hand_over.ticket_id, source.node_id, error)
            return Verdict.MISSING
        if data is None or data.nbytes != source.num_bytes:
            return Verdict.MISSING
        lease = await self.lease(source.ticket_id, source.attempt, source.num_bytes, [], hand_over.deadline_s)
        if lease is None:
            return Verdict.MISSING
        target = np.frombuffer(self._memory, np.uint8)[lease.offset : lease.offset + lease.num_bytes]
        await asyncio.to_thread(np.copyto, target, data)
        return lease

    # -- worker halves

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = ""
        try:
            while True:
                head = await reader.readexactly(4)
                message = decode_body(await reader.readexactly(frame_length(head)))
                if isinstance(message, Hello):
                    engine = message.engine
                    self._links[engine] = writer
                    self._gone.pop(engine, None)
                elif engine:
                    await self._on_message(engine, message)
                else:
                    raise ChannelError("the first message must be Hello")
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the peer has gone, or this actor is going
        except ChannelError as error:
            logger.error("engine %s: %s; connection closed", engine or "unknown", error)
        finally:
            writer.close()
            if engine and self._links.get(engine) is writer:
                del self._links[engine]
                self._gone[engine] = None
                while len(self._gone) > REMEMBERED:
                    del self._gone[next(iter(self._gone))]
                await self._engine_gone(engine)

    async def _on_message(self, engine: str, message: WorkerMessage) -> None:
        match message:
            case PagesSealed():
                key = (message.ticket_id, message.attempt)
                region = self.staging.get(key)
                if region is None or region.released:
                    self.seals.late += 1  # nobody waits for it any more
                elif (seal := self.seals.add(message)) is not None:
                    lease = Lease(
                        ticket_id=key[0],
                        attempt=key[1],
                        node_id=self.node_id,
                        segment=self.segment,
                        offset=region.offset,
                        num_bytes=region.num_bytes,
                    )
                    self._standing[key] = Sealed(seal=seal, lease=lease)
                    self._event(self._standing[key])
                if message.last:
                    await self._writer_done(key, engine)
            case WriterDone():
                await self._writer_done((message.ticket_id, message.attempt), engine)
            case PagesOpened():
                await self._opened(engine, message)

    async def _writer_done(self, key: Key, engine: str) -> None:
        if self.staging.writer_done(key, engine):
            async with self._room:
                self._room.notify_all()

    async def _opened(self, engine: str, message: PagesOpened) -> None:
        opened = message.opened
        key = (opened.ticket_id, opened.attempt)
        self.staging.reader_done(key, engine)
        parts = self._opening.setdefault(key, [])
        parts.append(opened)
        if len(parts) < message.num_shards:
            return
        verdicts: dict[Verdict, int] = {}
        for part in parts:
            for verdict, count in part.verdicts.items():
                verdicts[verdict] = verdicts.get(verdict, 0) + count
        whole = Opened(
            ticket_id=opened.ticket_id,
            attempt=opened.attempt,
            replica_id=opened.replica_id,
            num_pages=opened.num_pages,
            num_bytes=sum(part.num_bytes for part in parts),
            num_tokens=opened.num_tokens,
            verdicts=verdicts,
            seconds=max(part.seconds for part in parts),
        )
        self.bytes_moved += whole.num_bytes
        self.tokens_moved += whole.num_tokens if whole.ok else 0
        self._event(OpenedAt(opened=whole))
        await self.release([key])

    async def _engine_gone(self, engine: str) -> None:
        half_written = self.staging.peer_gone(engine)
        for ticket_id, attempt in half_written:
            self._event(LeaseLost(ticket_id=ticket_id, attempt=attempt, reason=f"engine {engine} is gone"))
        await self.release(half_written)

    # -- controller

    def _event(self, event: TransferEvent) -> None:
        self._events.append(event)
        self._wake.set()

    def status(self) -> StagingStatus:
        return StagingStatus(
            node_id=self.node_id,
            incarnation=self.incarnation,
            bytes_held=self.staging.bytes_held,
            bytes_max=self.staging.bytes_max,
            leases=len(self.staging),
            held=tuple(region.key for region in self.staging if not region.released),
            bytes_moved=self.bytes_moved,
            tokens_moved=self.tokens_moved,
            breaches=tuple(self.staging.breaches()),
        )

    async def _report_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), REPORT_EVERY_S)
            self._wake.clear()
            events, self._events = self._events, []
            try:
                if self._controller is None:
                    self._controller = ray.get_actor(controller_actor(self._application), namespace=NAMESPACE)
                stale = await self._controller.call.remote(TransferReport(self.status(), tuple(events)))
                self._orphan_since = 0.0
            except (ValueError, ray.exceptions.RayError) as error:
                # Nothing is lost: what could not be told is told again when the controller is back. It may be a new
                # life of it, so it is told of every seal that still waits for its reader.
                untold = [*events, *self._events]
                self._events = [*(seal for seal in self._standing.values() if seal not in untold), *untold]
                self._controller = None
                self._orphaned(error)
                await asyncio.sleep(0.2)
                continue
            if stale:
                await self.release([(int(ticket), int(attempt)) for ticket, attempt in stale])

    def _orphaned(self, error: Exception) -> None:
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if isinstance(error, ValueError) and now - self._orphan_since > ORPHAN_S and not self._links:
            # The controller's name is gone for good and no engine is left here: the application has ended.
            self._close()
            ray.actor.exit_actor()

    async def _expire_loop(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            now_ns = time.monotonic_ns()
            # An engine that died before it came back to this life of the actor has no connection that could end.
            # One that lives connects within a second; a whole lease time later it is gone, or has been replaced.
            for engine in self.staging.users_of(released_before_ns=now_ns - self.lease_ns) - self._links.keys():
                await self._engine_gone(engine)
            expired = self.staging.expire(now_ns)
            for ticket_id, attempt in expired:
                self.seals.forget((ticket_id, attempt))
                self._standing.pop((ticket_id, attempt), None)
                self._event(LeaseLost(ticket_id=ticket_id, attempt=attempt, reason="the staging lease ran out"))
            if expired:
                async with self._room:
                    self._room.notify_all()

    async def close(self) -> None:
        """Ends the loops and unlinks the segment and the socket."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for writer in list(self._links.values()):
            writer.close()
        self._close()

    def _close(self) -> None:
        Path("/dev/shm", self.segment).unlink(missing_ok=True)
        Path(self.socket_path).unlink(missing_ok=True)


class KVTransferActor(KVTransfer):
    """Starts by itself, so that a restarted actor serves its node again without being asked to."""

    async def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        logs.as_component("pageferry_transfer", f"{self._application}_{self.node_id[:12]}")
        await self.start()


def get_or_create(node_id: str, staging_bytes_max: int, lease_s: float, application: str) -> Any:
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
        .remote(node_id, staging_bytes_max, lease_s, application)
    )
