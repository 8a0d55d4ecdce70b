"""The connector's worker half: moves the bytes. Runs in the process that owns the KV cache.

Sealing happens in the step that completed the pages, after its forward and before the step's results leave, so that
the pages are free the moment the prompt is done: nothing in the KV cache waits for a reader. On a GPU the step converts
into a ring of device memory only, and a thread copies to staging (`stager`). Opening happens in a
thread of its own, into pages that belong to the parked request alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from actors.engine import layouts, vllm_patches
from actors.engine.integrity.tag_check import Check, NoCheck
from actors.engine.metadata import FerryMetadata, OpenJob, SealJob
from actors.engine.orders import SealParams
from actors.engine.stager import SLOT_BYTES, Stager
from actors.messages import Opened, Role, Verdict
from actors.transfer.channel import ChannelError, Hello, PagesOpened, PagesSealed, WriterDone
from actors.transfer.link import WorkerLink
from kernels import dispatch
from kernels.arguments import PageCaches
from kernels.layout import LayoutError, PageDtype, PageLayout, SealBinding, check_convertible

logger = logging.getLogger("pageferry.worker")

# A step with no forward would come back at once and spin the core; wait this long for a page to land instead.
EMPTY_STEP_WAIT_S = 0.002


class FerryConnectorWorker:
    """`seals` and `sample_rate`: how much of what is opened is verified (`cluster.spec.IntegritySpec`). `ring`: whether
    prefill's pages go to staging over a `Stager`; None: those of a GPU do."""

    def __init__(
        self,
        replica_id: str,
        role: Role,
        rank: int,
        world: int,
        socket_path: str,
        seals: str = "full",
        sample_rate: float = 1.0,
        ring: bool | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.role = role
        self.rank = rank
        self.world = world
        self.layout: PageLayout | None = None
        self.backend = ""  # vLLM's name of the attention backend
        self.check: Check = NoCheck()
        self._sample_rate = sample_rate
        self.set_seals(seals)
        self._caches: Sequence[torch.Tensor] = ()
        self._wires: dict[str, PageLayout] = {}
        hello = Hello(engine=f"{replica_id}#{rank}", role=role, pid=os.getpid())
        self._link = WorkerLink(socket_path, hello)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pageferry-open")
        self._opening: dict[str, Future[bool]] = {}
        self._cancelled: set[str] = set()
        self._landed = threading.Event()
        self._stream: Any = None  # for opening on a GPU
        self._behind_step: Any = None  # event behind what the step's stream had been given when opening was asked for
        self._ring = ring
        self._stager: Stager | None = None
        self.bytes_sealed = 0
        self.seal_ns = 0
        self.open_ns = 0
        self.pages_verified = 0
        self.pages_unverified = 0

    # -- set-up

    def set_seals(self, seals: str) -> None:
        """`off`, `sampled` or `full`."""
        self._verified_share = {"off": 0.0, "sampled": self._sample_rate, "full": 1.0}[seals]

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, Any],
        cache_dtype: str,
        kv_scales: tuple[float, float],
    ) -> None:
        """The engine's cache, before its first request. Raises `LayoutError` for one without a codec."""
        kv_caches = layouts.in_order(kv_caches, layers)
        if kv_scales != (1.0, 1.0):
            for name in kv_caches:
                if hasattr(layers[name], "_k_scale"):  # index keys carry their own
                    vllm_patches.set_kv_scales(layers[name], *kv_scales)
        self.layout = layouts.describe(kv_caches, layers, cache_dtype)
        if self.layout.scales_by_head and self.world > 1:
            raise LayoutError(f"KV scales by head with {self.world} ranks: pages of all ranks have rank 0's layout")
        self.backend = layers[next(iter(kv_caches))].get_attn_backend().get_name()
        self._caches = PageCaches([layouts.pages_of(cache, self.layout) for cache in kv_caches.values()], self.layout)
        if self._caches[0].device.type == "cpu":
            dispatch.set_threads(min(torch.get_num_threads(), os.cpu_count() or 1))  # those of the engine
        if self.role is Role.PREFILL and (self._caches[0].is_cuda if self._ring is None else self._ring):
            slot_bytes = max(SLOT_BYTES, self.layout.page_bytes)
            self._stager = Stager(self._caches[0].device, self._link.staging, self._send_done, slot_bytes)
        # Loads (at the very first time compiles) the kernels now and not inside the first request's step.
        dispatch.warm_up(self._caches[0].device)
        self._rehearse()

    def _rehearse(self) -> None:
        """Moves vLLM's null page out and back, so that a GPU has compiled what it will run."""
        layout, binding = self.layout, SealBinding(0, 0)
        assert layout is not None
        for wire in (layout, layout.with_dtype(PageDtype.E4M3)) if layout.dtype is PageDtype.BF16 else (layout,):
            out = torch.empty((1, wire.page_bytes), dtype=torch.uint8)
            digests = dispatch.seal_pages(self._caches, layout, wire, [0], out, binding, 0)
            if wire is layout:
                self._open_from(out, dispatch.digests_to_ints(digests), [0], binding, 0)

    def _wire(self, order: SealParams) -> PageLayout:
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
            except (LayoutError, ChannelError, ValueError, MemoryError, torch.OutOfMemoryError) as error:
                # The hand-over ends here and the step goes on. Later pages of the ticket must not be written: the bytes
                # may be another ticket's by then.
                logger.error("ticket %d: cannot seal: %s", job.order.ticket_id, error)
                self._link.staging.revoke([(job.order.ticket_id, job.order.attempt)])
                self._end_writing((job.order.ticket_id, job.order.attempt))
        for key in metadata.abandoned:
            self._end_writing(key)

    def _end_writing(self, key: tuple[int, int]) -> None:
        """Sends that this engine writes no more for the ticket, behind the copy that is under way for it."""
        if self._stager is not None:
            self._stager.end(key)
        else:
            self._send_done(key)

    def _send_done(self, key: tuple[int, int]) -> None:
        self._link.send(WriterDone(ticket_id=key[0], attempt=key[1]))

    def _seal(self, job: SealJob) -> None:
        started = time.perf_counter_ns()
        order, wire = job.order, self._wire(job.order)
        num_pages = len(job.block_ids)
        with self._link.staging.bytes_of(order.lease) as view:
            begin = self._place_of(job, wire, view)
            if self._stager is None:
                assert view is not None
                out = torch.frombuffer(view, dtype=torch.uint8)[begin : begin + num_pages * wire.page_bytes]
                digests = self._convert(job, wire, 0, num_pages, out.view(num_pages, wire.page_bytes))
        convert, sealed = partial(self._convert, job, wire), partial(self._sealed, job, wire)
        if self._stager is not None:
            key = (order.ticket_id, order.attempt)
            self._stager.stage(key, order.lease, begin, num_pages, wire.page_bytes, convert, sealed)
        else:
            sealed(dispatch.digests_to_ints(digests))
        self.bytes_sealed += num_pages * wire.page_bytes
        self.seal_ns += time.perf_counter_ns() - started

    def _sealed(self, job: SealJob, wire: PageLayout, digests: list[int]) -> None:
        """The job's pages are in staging."""
        order = job.order
        message = PagesSealed(
            ticket_id=order.ticket_id,
            attempt=order.attempt,
            shard=self.rank,
            num_shards=self.world,
            first_page=job.first_page,
            digests=digests,
            layout_fingerprint=wire.fingerprint,
            num_tokens=order.num_tokens,
            last=job.last,
        )
        self._send_seal(message)

    def _send_seal(self, message: PagesSealed) -> None:
        self._link.send(message)

    def _place_of(self, job: SealJob, wire: PageLayout, view: memoryview | None) -> int:
        """Where in the lease the job's bytes begin."""
        order = job.order
        if view is None:
            raise ChannelError(f"the staging bytes of {order.lease.segment} are not this ticket's any more")
        num_pages = -(-order.num_tokens // wire.page_tokens)
        if len(view) < self.world * num_pages * wire.page_bytes:
            raise ChannelError(
                f"lease of {len(view)} bytes is too small for {num_pages} pages of {wire.page_bytes} bytes"
            )
        return (self.rank * num_pages + job.first_page) * wire.page_bytes

    def _convert(self, job: SealJob, wire: PageLayout, first: int, count: int, out: torch.Tensor) -> torch.Tensor:
        """Pages `first ...` of the job into `out`; int64 digests. On the step's own stream, so that the next step may
        reuse the pages."""
        assert self.layout is not None
        binding = SealBinding(job.order.ticket_id, job.order.attempt)
        ids = job.block_ids[first : first + count]
        return dispatch.seal_pages(self._caches, self.layout, wire, ids, out, binding, job.first_page + first)

    # -- decode

    def start_opening(self, metadata: FerryMetadata) -> None:
        self._cancelled.update(r for r in metadata.cancelled if r in self._opening)
        if metadata.opens and self._caches[0].is_cuda:
            self._behind_step = torch.cuda.current_stream(self._caches[0].device).record_event()
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
        if seal.layout_fingerprint != layout.fingerprint or len(seal.digests) != self.world:
            return {Verdict.WRONG_LAYOUT: num_pages}, 0
        with self._link.staging.bytes_of(hand_over.lease) as view:
            return self._open_view(job, view)

    def _open_view(self, job: OpenJob, view: memoryview | None) -> tuple[dict[Verdict, int], int]:
        seal, layout, num_pages = job.order.hand_over.seal, self.layout, len(job.block_ids)
        assert layout is not None
        total = -(-seal.num_tokens // layout.page_tokens)
        if view is None or len(seal.digests[self.rank]) != total or len(view) < self.world * total * layout.page_bytes:
            return {Verdict.MISSING: num_pages}, 0
        begin = (self.rank * total + job.first_page) * layout.page_bytes
        pages = torch.frombuffer(view, dtype=torch.uint8)[begin : begin + num_pages * layout.page_bytes]
        pages = pages.view(num_pages, layout.page_bytes)
        verdicts = self._land(job, pages)
        return verdicts, verdicts.get(Verdict.OK, 0) * layout.page_bytes

    def _land(self, job: OpenJob, pages: torch.Tensor) -> dict[Verdict, int]:
        """Verifies and writes. `pages`: uint8 [pages of the job, page_bytes]."""
        seal, layout = job.order.hand_over.seal, self.layout
        assert layout is not None
        if not self.check.still_current(job.block_ids, job.tags):
            # The pages were given to another request since: a landing that comes too late must not touch them.
            return {Verdict.STALE: len(job.block_ids)}
        digests = seal.digests[self.rank]
        num_good = 0
        for first, last, verified in self._runs(seal.ticket_id, job.first_page, len(job.block_ids)):
            part, blocks, ordinal = pages[first:last], job.block_ids[first:last], job.first_page + first
            if not verified:
                self._write_from(part, blocks)
                self.pages_unverified += last - first
                num_good += last - first
                continue
            good = self._open_from(
                part,
                list(digests[ordinal : ordinal + last - first]),
                blocks,
                SealBinding(seal.ticket_id, seal.attempt),
                ordinal,
            )
            self.pages_verified += last - first
            num_good += int(good.sum())
        verdicts = {Verdict.OK: num_good}
        if num_good < len(job.block_ids):
            verdicts[Verdict.MISMATCH] = len(job.block_ids) - num_good
        return verdicts

    def _runs(self, ticket_id: int, first_page: int, num_pages: int) -> Iterator[tuple[int, int, bool]]:
        """Runs (from, to, verified?) that cover a ticket's pages; which are sampled depends on the ticket alone."""
        if self._verified_share in (0.0, 1.0):
            yield 0, num_pages, self._verified_share == 1.0
            return
        chosen = [
            zlib.crc32(b"%d/%d" % (ticket_id, first_page + i)) < self._verified_share * 2**32 for i in range(num_pages)
        ]
        start = 0
        for end in range(1, num_pages + 1):
            if end == num_pages or chosen[end] != chosen[start]:
                yield start, end, chosen[start]
                start = end

    def _open_from(
        self, pages: torch.Tensor, digests: list[int], block_ids: list[int], binding: SealBinding, first_page: int
    ) -> torch.Tensor:
        """Verifies and scatters wire pages (uint8 [n, page_bytes], shared memory); bool [n] on the CPU."""
        layout = self.layout
        assert layout is not None
        device = self._caches[0].device
        if device.type == "cpu":
            return dispatch.open_pages(pages, layout, digests, self._caches, layout, block_ids, binding, first_page)
        # A stream of this thread's own: the pages belong to a parked request, no running step reads them.
        with torch.cuda.stream(self._side_stream(device)):
            good = dispatch.open_pages(
                pages, layout, digests, self._caches, layout, block_ids, binding, first_page
            ).cpu()
            torch.cuda.current_stream(device).synchronize()
        return good

    def _write_from(self, pages: torch.Tensor, block_ids: list[int]) -> None:
        """Scatters wire pages as they are: what `integrity.seals` other than `full` leaves unverified."""
        layout, device = self.layout, self._caches[0].device
        assert layout is not None
        if device.type == "cpu":
            dispatch.write_pages(pages, layout, self._caches, layout, block_ids)
            return
        with torch.cuda.stream(self._side_stream(device)):
            dispatch.write_pages(pages, layout, self._caches, layout, block_ids)
            torch.cuda.current_stream(device).synchronize()

    def _side_stream(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Steps that were launched before may still read what these pages were to another request.
        if self._behind_step is not None:
            self._stream.wait_event(self._behind_step)
        return self._stream

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
        if self._stager is not None:
            self._stager.close()
        self._pool.shutdown(wait=True)
        self._link.close()
