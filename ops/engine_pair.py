"""A prefill and a decode engine with a real transfer actor's code between them, in one process tree and without Ray.

For engine tests, accuracy, fault injection and ferry benchmarks: everything that concerns pages is the product's own
(hosts, connector, staging, seals); only Serve, the controller and HTTP are left out.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actors.controller.page_book import PageBook
from actors.engine.config import set_environment
from actors.engine.decode import DecodeServer
from actors.engine.prefill import PrefillServer
from actors.messages import (
    Announcement,
    HandOver,
    HeartbeatReply,
    Join,
    LeaseLost,
    Opened,
    OpenedAt,
    PrefillDone,
    ReplicaHeartbeat,
    Request,
    Role,
    Sealed,
    StagingStatus,
    Ticket,
    TransferEvent,
    TransferReport,
    Verdict,
)
from actors.transfer.actor import KVTransfer
from cluster.spec import ClusterSpec


def _with_environment(environment: dict[str, str], run: Any, arguments: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    run(**arguments)


class _EngineCores:
    """A `multiprocessing` context that forks EngineCores from one process that has imported vLLM: to import it in each
    of them takes 8 s of a core."""

    def __init__(self) -> None:
        self._server = multiprocessing.get_context("forkserver")
        preload = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "actors.engine.connector"]
        self._server.set_forkserver_preload(preload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def Process(self, target: Any, name: str, kwargs: dict[str, Any]) -> Any:
        arguments = (dict(os.environ), target, kwargs)  # the server has the environment of its own start
        return self._server.Process(target=_with_environment, name=name, args=arguments)


_engine_cores = _EngineCores()


class LocalHandle:
    """Makes a plain object look like an actor handle: `handle.method.remote(...)` is a coroutine."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Call:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
                async def call() -> Any:
                    result = method(*args, **kwargs)
                    return await result if asyncio.iscoroutine(result) else result

                return call()

        return Call


class FakeController:
    """Stands where the controller stands: keeps proofs and what opening found; admits everything."""

    def __init__(self, tagged: bool = False) -> None:
        self.tagged = tagged
        self.sealed: dict[tuple[int, int], asyncio.Future[Sealed]] = {}
        self.opened: dict[tuple[int, int], Opened] = {}
        self.lost: dict[tuple[int, int], str] = {}
        self.unawaited: set[tuple[int, int]] = set()  # seals that came when they were not waited for any more
        self.joined: dict[str, Announcement] = {}
        self.heartbeats: dict[str, ReplicaHeartbeat] = {}
        self.staging: StagingStatus | None = None
        self.books: dict[str, PageBook] = {}
        self.pages_reported = 0
        self.page_problems: list[str] = []

    def seal_of(self, key: tuple[int, int]) -> asyncio.Future[Sealed]:
        return self.sealed.setdefault(key, asyncio.get_running_loop().create_future())

    async def call(self, message: Request[Any]) -> Any:
        match message:
            case Join(announcement):
                self.joined[announcement.replica_id] = announcement
                return HeartbeatReply(epoch=1, known=True)
            case ReplicaHeartbeat():
                self.heartbeats[message.replica_id] = message
                self._take_pages(message)
                return HeartbeatReply(epoch=1, known=True)
            case TransferReport():
                self._transfer_report(message.status, message.events)
                return []
        return None

    def _take_pages(self, heartbeat: ReplicaHeartbeat) -> None:
        replica = self.joined[heartbeat.replica_id]
        if heartbeat.pages_whole or replica.replica_id not in self.books:
            self.books[replica.replica_id] = PageBook.of(replica, self.tagged)
        for delta in heartbeat.pages:
            self.pages_reported += len(delta.added)
            self.page_problems += self.books[replica.replica_id].apply(delta, replica.blocks_total)

    def _transfer_report(self, status: StagingStatus, events: tuple[TransferEvent, ...]) -> None:
        self.staging = status
        for event in events:
            match event:
                case Sealed():
                    future = self.seal_of((event.seal.ticket_id, event.seal.attempt))
                    if future.done():
                        self.unawaited.add((event.seal.ticket_id, event.seal.attempt))
                    else:
                        future.set_result(event)
                case OpenedAt():
                    self.opened[(event.opened.ticket_id, event.opened.attempt)] = event.opened
                case LeaseLost():
                    self.lost[(event.ticket_id, event.attempt)] = event.reason


@dataclass(slots=True)
class Generation:
    """What came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per token: token id -> logprob, top-k
    prompt_logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0
    opened: Opened | None = None


class EnginePair:
    """`await EnginePair.start(spec)`; then `generate`, with the prompt handed over or computed by decode alone."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.controller = FakeController(tagged=spec.integrity.mode == "check")
        self._tickets = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self.prefill: PrefillServer | None = None
        self.decode: DecodeServer
        self.transfer: KVTransfer
        self._reader: asyncio.Task[None] | None = None
        self._hosts: list[PrefillServer | DecodeServer] = []

    @classmethod
    async def start(cls, spec: ClusterSpec) -> EnginePair:
        pair = cls(spec)
        node_id = uuid.uuid4().hex
        controller = LocalHandle(pair.controller)
        pair.transfer = KVTransfer(node_id, spec.transfer.staging_bytes_max, spec.transfer.lease_s, "")
        pair.transfer._controller = controller
        place = await pair.transfer.start()
        wiring: dict[str, Any] = {
            "node_id": node_id,
            "get_transfer": lambda: LocalHandle(pair.transfer),
            "socket_path": place["socket"],
            "get_controller": lambda: controller,
        }
        try:
            await pair._start_engines(spec, wiring)
        except BaseException:
            await pair.close()
            raise
        pair._reader = asyncio.create_task(pair._read())
        return pair

    async def _start_engines(self, spec: ClusterSpec, wiring: dict[str, Any]) -> None:
        """What vLLM reads from the environment is read when its engine process starts."""
        from actors.engine.vllm_patches import engine_cores_from

        if spec.pools.prefill.replicas:
            set_environment(spec, Role.PREFILL)
            self.prefill = PrefillServer(spec, replica_id=f"prefill-{os.getpid()}", **wiring)
            self._hosts.append(self.prefill)
            with engine_cores_from(_engine_cores):
                await self.prefill.start()
        set_environment(spec, Role.DECODE)
        self.decode = DecodeServer(spec, replica_id=f"decode-{os.getpid()}", **wiring)
        self._hosts.append(self.decode)
        with engine_cores_from(_engine_cores):
            await self.decode.start()

    async def _read(self) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        decoder = MsgpackDecoder(EngineCoreOutputs)
        async for frames in self.decode.outputs("rig"):
            if frames:
                for output in decoder.decode(frames).outputs:
                    if (queue := self._queues.get(output.request_id)) is not None:
                        queue.put_nowait(output)

    def num_unread(self, request_id: str) -> int:
        """Outputs that decode has sent for the request and that are not taken yet."""
        queue = self._queues.get(request_id)
        return queue.qsize() if queue is not None else 0

    def ticket(self, request_id: str, num_prompt_tokens: int) -> Ticket:
        """For a prompt that prefill computes and decode takes over."""
        assert self.prefill is not None
        return msgspec.structs.replace(
            self.alone(request_id),
            prefill=self.prefill.replica_id,
            wire_layout=self.decode.layout.to_dict(),
            num_prompt_tokens=num_prompt_tokens,
            deadline_s=self.spec.transfer.hand_over_s,
        )

    def frames(self, request_id: str, prompt: list[int], params: Any, cache_salt: str | None = None) -> list[bytes]:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackEncoder

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=cache_salt,
            data_parallel_rank=None,
        )
        return [bytes(frame) for frame in MsgpackEncoder().encode(request)]

    async def seal(
        self, ticket: Ticket, prompt: list[int], cache_salt: str | None = None
    ) -> tuple[HandOver, PrefillDone]:
        """Prefills and seals; the seal comes back by its own path."""
        from vllm.sampling_params import SamplingParams

        assert self.prefill is not None
        frames = self.frames(ticket.request_id, prompt, SamplingParams(max_tokens=1, temperature=0.0), cache_salt)
        done = await self.prefill.prefill(ticket, frames)
        sealed = await asyncio.wait_for(self.controller.seal_of((ticket.ticket_id, ticket.attempt)), ticket.deadline_s)
        hand_over = HandOver(
            ticket_id=ticket.ticket_id,
            attempt=ticket.attempt,
            seal=sealed.seal,
            lease=sealed.lease,
            deadline_s=ticket.deadline_s,
        )
        return hand_over, done

    async def stream(
        self,
        request_id: str,
        prompt: list[int],
        params: Any,
        ticket: Ticket,
        hand_over: HandOver | None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Any]:
        """`EngineCoreOutput`s of one request, in order."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request_id] = queue
        try:
            frames = self.frames(request_id, prompt, params, cache_salt)
            await self.decode.submit("rig", frames, ticket, hand_over)
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._queues[request_id]

    async def generate(
        self,
        prompt: list[int],
        params: Any,
        *,
        hand_over: bool = True,
        then: Sequence[int] = (),
        kind: str = "",
        cache_salt: str | None = None,
    ) -> Generation:
        """`then`: tokens after the prompt that are out already; decode goes on behind them. `kind`: what the request's
        id begins with, before a slash."""
        request_id = f"{kind}/{uuid.uuid4().hex}" if kind else uuid.uuid4().hex
        made = Generation()
        if hand_over:
            ticket = self.ticket(request_id, len(prompt))
            over, _ = await self.seal(ticket, prompt, cache_salt)
        else:
            ticket = msgspec.structs.replace(self.alone(request_id), num_prompt_tokens=len(prompt))
            over = None
        async for output in self.stream(request_id, [*prompt, *then], params, ticket, over, cache_salt):
            made.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                lists = output.new_logprobs
                for ids, values in zip(lists.logprob_token_ids, lists.logprobs):
                    made.logprobs.append({int(i): float(v) for i, v in zip(ids, values)})
            if output.prefill_stats is not None:
                made.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                made.finish_reason = str(output.finish_reason)
        if hand_over:
            made.opened = await self.wait_opened((ticket.ticket_id, ticket.attempt))
        return made

    def alone(self, request_id: str) -> Ticket:
        """A ticket for a prompt that decode computes itself."""
        return Ticket(
            ticket_id=next(self._tickets),
            attempt=1,
            request_id=request_id,
            frontend_id="rig",
            epoch=1,
            decode=self.decode.replica_id,
        )

    async def wait_opened(self, key: tuple[int, int], timeout_s: float = 5.0) -> Opened | None:
        for _ in range(int(timeout_s / 0.01)):
            if key in self.controller.opened:
                return self.controller.opened[key]
            await asyncio.sleep(0.01)
        return None

    async def idle_breaches(self) -> list[str]:
        """What is left although nothing runs; empty when every page, lease and order has been given back."""
        await asyncio.sleep(0.05)
        machine = self.transfer.machine
        found = machine.violations()
        if len(machine.staging):
            found.append(f"{len(machine.staging)} staging leases left: {[r.key for r in machine.staging]}")
        for host in (self.prefill, self.decode):
            if host is None:
                continue
            audit = (await host.audit())["scheduler"]
            if audit["requests"] or not audit["idle"]:
                found.append(f"{host.replica_id}: {audit['requests']} requests, idle {audit['idle']}")
            if audit["blocks_held"]:
                found.append(f"{host.replica_id}: {audit['blocks_held']} blocks held")
        return found

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        for host in self._hosts:
            host.shutdown()
        await self.transfer.close()


__all__ = ["EnginePair", "FakeController", "Generation", "LocalHandle", "Verdict"]
