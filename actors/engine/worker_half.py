"""The connector's worker half: moves the bytes. Runs in the process that owns the KV cache.

Sealing happens in the step that completed the pages, after its forward and before the step's results leave, so that
the pages are free the moment the prompt is done: nothing in the KV cache waits for a reader. Opening happens in a
thread of its own, into pages that belong to the parked request alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from actors.engine import layouts
from actors.engine.integrity_worker import Check, NoCheck
from actors.engine.metadata import FerryMetadata, OpenJob, SealJob
from actors.engine.orders import SealOrder
from actors.nouns import Opened, Role, Verdict
from actors.transfer.channel import ChannelError, Hello, PagesOpened, PagesSealed, Segments, WorkerLink, WriterDone
from kernels import dispatch
from kernels.layout import LayoutError, PageLayout, SealBinding, check_convertible

logger = logging.getLogger("pageferry.worker")

# A step with no forward would come back at once and spin the core; wait this long for a page to land instead.
EMPTY_STEP_WAIT_S = 0.002


class WorkerHalf:
    def __init__(self, replica_id: str, role: Role, rank: int, world: int, socket_path: str) -> None:
        self.replica_id = replica_id
        self.role = role
        self.rank = rank
        self.world = world
        self.layout: PageLayout | None = None
        self.check: Check = NoCheck()
        self._caches: list[torch.Tensor] = []
        self._wires: dict[str, PageLayout] = {}
        self._segments = Segments()
        hello = Hello(engine=f"{replica_id}#{rank}", role=role, pid=os.getpid())
        self._link = WorkerLink(socket_path, hello)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pageferry-open")
        self._opening: dict[str, Future[bool]] = {}
        self._cancelled: set[str] = set()
        self._landed = threading.Event()
        self.bytes_sealed = 0
        self.seal_ns = 0
        self.open_ns = 0

    # -- set-up

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, Any],
        cache_dtype: str,
        kv_scales: tuple[float, float],
    ) -> None:
        if kv_scales != (1.0, 1.0):
            for name in kv_caches:
                _set_scales(layers[name], *kv_scales)
        self.layout = layouts.describe(kv_caches, layers, cache_dtype)
        self._caches = list(kv_caches.values())
        # Loads (at the very first time compiles) the kernels now and not inside the first request's step.
        page = torch.zeros((1, self.layout.page_bytes), dtype=torch.uint8, device=self._caches[0].device)
        dispatch.page_digests(page, self.layout, SealBinding(0, 0), 0)

    def _wire(self, order: SealOrder) -> PageLayout:
        key = repr(order.wire_layout)
        wire = self._wires.get(key)
        if wire is None:
            assert self.layout is not None
            wire = PageLayout.from_dict(order.wire_layout)
            check_convertible(self.layout, wire)
            self._wires[key] = wire
        return wire

    # -- prefill

    def seal(self, metadata: FerryMetadata) -> None:
        for job in metadata.seals:
            try:
                self._seal(job)
            except (LayoutError, ChannelError, ValueError) as error:
                # The ticket ends as MISSING and decode computes the prompt itself; the step goes on.
                logger.error("ticket %d: cannot seal: %s", job.order.ticket_id, error)
                self._link.send(WriterDone(ticket_id=job.order.ticket_id, attempt=job.order.attempt))
        for ticket_id, attempt in metadata.abandoned:
            self._link.send(WriterDone(ticket_id=ticket_id, attempt=attempt))

    def _seal(self, job: SealJob) -> None:
        started = time.perf_counter_ns()
        order, wire = job.order, self._wire(job.order)
        assert self.layout is not None
        view = self._segments.view(order.lease)
        if view is None:
            raise ChannelError(f"staging segment {order.lease.segment} is gone")
        num_pages = -(-order.num_tokens // wire.page_tokens)
        if len(view) < self.world * num_pages * wire.page_bytes:
            raise ChannelError(
                f"lease of {len(view)} bytes is too small for {num_pages} pages of {wire.page_bytes} bytes"
            )
        begin = (self.rank * num_pages + job.first_page) * wire.page_bytes
        out = torch.frombuffer(view, dtype=torch.uint8)[begin : begin + len(job.block_ids) * wire.page_bytes]
        binding = SealBinding(order.ticket_id, order.attempt)
        digests = dispatch.seal_pages(
            self._caches,
            self.layout,
            wire,
            job.block_ids,
            out.view(len(job.block_ids), wire.page_bytes),
            binding,
            job.first_page,
        )
        self.bytes_sealed += out.numel()
        self.seal_ns += time.perf_counter_ns() - started
        self._link.send(
            PagesSealed(
                ticket_id=order.ticket_id,
                attempt=order.attempt,
                shard=self.rank,
                num_shards=self.world,
                first_page=job.first_page,
                digests=_as_u64(digests),
                layout_fingerprint=wire.fingerprint,
                num_tokens=order.num_tokens,
                last=job.last,
            )
        )

    # -- decode

    def start_opening(self, metadata: FerryMetadata) -> None:
        self._cancelled.update(r for r in metadata.cancelled if r in self._opening)
        for job in metadata.opens:
            if job.block_ids:
                self._opening[job.request_id] = self._pool.submit(self._open, job)
            else:
                self._report(job, {}, 0, 0.0)

    def _open(self, job: OpenJob) -> bool:
        started = time.perf_counter_ns()
        try:
            verdicts, num_bytes = self._open_pages(job)
        except (ChannelError, ValueError) as error:
            logger.error("ticket %d: cannot open: %s", job.order.hand_over.ticket_id, error)
            verdicts, num_bytes = {Verdict.MISSING: len(job.block_ids)}, 0
        except BaseException:
            logger.exception("ticket %d: opening failed", job.order.hand_over.ticket_id)
            verdicts, num_bytes = {Verdict.MISSING: len(job.block_ids)}, 0
        elapsed = time.perf_counter_ns() - started
        self.open_ns += elapsed
        self._report(job, verdicts, num_bytes, elapsed / 1e9)
        good = all(verdict is Verdict.OK for verdict, count in verdicts.items() if count)
        self._landed.set()
        return good

    def _open_pages(self, job: OpenJob) -> tuple[dict[Verdict, int], int]:
        hand_over = job.order.hand_over
        seal, layout, num_pages = hand_over.seal, self.layout, len(job.block_ids)
        assert layout is not None
        if job.request_id in self._cancelled or (seal.ticket_id, seal.attempt) != (
            hand_over.ticket_id,
            hand_over.attempt,
        ):
            return {Verdict.STALE: num_pages}, 0
        if not self.check.same_lives(job.block_ids, job.tags):
            # The pages were given to somebody else since: a landing that comes too late must not touch them.
            return {Verdict.STALE: num_pages}, 0
        if seal.layout_fingerprint != layout.fingerprint or len(seal.digests) != self.world:
            return {Verdict.WRONG_LAYOUT: num_pages}, 0
        digests = seal.digests[self.rank]
        total = -(-seal.num_tokens // layout.page_tokens)
        view = self._segments.view(hand_over.lease)
        if view is None or len(digests) != total or len(view) < self.world * total * layout.page_bytes:
            return {Verdict.MISSING: num_pages}, 0
        begin = (self.rank * total + job.first_page) * layout.page_bytes
        pages = torch.frombuffer(view, dtype=torch.uint8)[begin : begin + num_pages * layout.page_bytes]
        good = dispatch.open_pages(
            pages.view(num_pages, layout.page_bytes),
            layout,
            list(digests[job.first_page : job.first_page + num_pages]),
            self._caches,
            layout,
            job.block_ids,
            SealBinding(seal.ticket_id, seal.attempt),
            job.first_page,
        )
        num_good = int(good.sum())
        verdicts = {Verdict.OK: num_good}
        if num_good < num_pages:
            verdicts[Verdict.MISMATCH] = num_pages - num_good
        return verdicts, num_good * layout.page_bytes

    def _report(self, job: OpenJob, verdicts: dict[Verdict, int], num_bytes: int, seconds: float) -> None:
        hand_over = job.order.hand_over
        opened = Opened(
            ticket_id=hand_over.ticket_id,
            attempt=hand_over.attempt,
            replica_id=self.replica_id,
            num_pages=len(job.block_ids),
            num_bytes=num_bytes,
            num_tokens=job.num_tokens,
            verdicts=verdicts,
            seconds=seconds,
        )
        self._link.send(PagesOpened(opened=opened, shard=self.rank, num_shards=self.world))

    def landed(self, empty_step: bool) -> tuple[set[str], set[str]]:
        """Requests whose pages have all been dealt with, and those among them that failed."""
        if not self._opening:
            return set(), set()
        if empty_step and not any(f.done() for f in self._opening.values()):
            self._landed.wait(EMPTY_STEP_WAIT_S)
        self._landed.clear()
        finished = {request_id for request_id, future in self._opening.items() if future.done()}
        failed = {request_id for request_id in finished if not self._opening[request_id].result()}
        for request_id in finished:
            del self._opening[request_id]
            self._cancelled.discard(request_id)
        return finished, failed

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._link.close()


def _set_scales(layer: Any, k_scale: float, v_scale: float) -> None:
    layer._k_scale.fill_(k_scale)
    layer._v_scale.fill_(v_scale)
    layer._k_scale_float = k_scale
    layer._v_scale_float = v_scale


def _as_u64(digests: Any) -> list[int]:
    return [int(d) & 0xFFFF_FFFF_FFFF_FFFF for d in digests.tolist()]
