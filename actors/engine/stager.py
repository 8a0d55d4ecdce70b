"""Pages on their way from a device to staging, without a step that waits for them.

A step converts its pages into slots of device memory on its own stream, so that vLLM may give the pages away; a thread
waits for each conversion, copies the slot to the ticket's staging on a stream of its own, and sends the seal once a
job's bytes are all there. `staging_ring` decides; this holds memory, events and the thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.engine.staging_ring import Effect, Job, Key, Seal, StagingRing
from actors.messages import Lease
from actors.transfer.channel import ChannelError
from actors.transfer.link import StagingMap
from kernels import dispatch

logger = logging.getLogger("pageferry.worker")

SLOTS = 4
SLOT_BYTES = 32 << 20
"""A slot takes about a millisecond to copy over PCIe 5: long against a launch, short against a step."""

Convert = Callable[[int, int, torch.Tensor], torch.Tensor]


@dataclass
class _Order:
    """What a job's seal needs."""

    lease: Lease
    sealed: Callable[[list[int]], None]
    digests: dict[int, list[int]] = field(default_factory=dict)  # by the first page of a part


@dataclass(frozen=True)
class _Part:
    begin: int  # of its bytes in the lease
    first: int  # its first page in the job
    pages: torch.Tensor  # uint8 [pages, bytes], in the slot
    digests: torch.Tensor
    ready: Any  # CUDA event behind its conversion


class Stager:
    """`done(key)`: called when no byte of a ticket that has ended will be written any more. Thread-safe."""

    def __init__(
        self,
        device: torch.device,
        staging: StagingMap,
        done: Callable[[Key], None],
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        self._device = device
        self._staging = staging
        self._done = done
        self._slot_bytes = slot_bytes
        self._memory = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self.ring = StagingRing(slots)
        self._parts: dict[int, _Part] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pageferry-copy", daemon=True)
        self._thread.start()

    def stage(
        self,
        key: Key,
        lease: Lease,
        begin: int,
        num_pages: int,
        page_bytes: int,
        convert: Convert,
        sealed: Callable[[list[int]], None],
    ) -> None:
        """`convert(first, count, out)` gives pages `first ...` of the job and their digests, on the step's stream;
        `sealed(digests)` is called when all are in the lease's bytes from `begin` on. Waits only for a slot.

        Raises what `convert` raises; the ticket has ended then.
        """
        each = self._slot_bytes // page_bytes
        with self._changed:
            job = self.ring.begin(key, -(-num_pages // each), _Order(lease, sealed))
        for first in range(0, num_pages, each):
            if (slot := self._take(job)) is None:
                return
            count = min(each, num_pages - first)
            pages = self._memory[slot][: count * page_bytes].view(count, page_bytes)
            try:
                digests = convert(first, count, pages)
            except BaseException:
                with self._changed:
                    self._carry_out(self.ring.failed(slot))
                raise
            with self._changed:
                self._parts[slot] = _Part(begin + first * page_bytes, first, pages, digests, self._behind())
                self.ring.converted(slot)
                self._changed.notify_all()

    def end(self, key: Key) -> None:
        """Nothing more is written for the ticket; `done` follows, at once or behind the copy that is under way."""
        with self._changed:
            self._carry_out(self.ring.end(key))

    def close(self) -> None:
        """Ends behind the copy that is under way; what is not copied is lost with the engine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _take(self, job: Job) -> int | None:
        with self._changed:
            while (slot := self.ring.take(job)) is None and not (job.dead or self._closing):
                self._changed.wait()
            return slot

    def _behind(self) -> Any:
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _carry_out(self, effects: list[Effect]) -> None:
        """Under the lock, so that what is sent is in the ring's order; sending never waits."""
        for effect in effects:
            if isinstance(effect, Seal):
                order: _Order = effect.job.facts
                order.sealed([digest for first in sorted(order.digests) for digest in order.digests[first]])
            else:
                self._done(effect.key)
        self._changed.notify_all()

    # -- the thread

    def _run(self) -> None:
        stream: Any = None
        if self._device.type != "cpu":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while True:
            with self._changed:
                while (slot := self.ring.next_copy()) is None:
                    if self._closing:
                        return
                    self._changed.wait()
                part, job = self._parts.pop(slot), self.ring.part[slot]
            good = self._copy(part, job, stream)
            with self._changed:
                self._carry_out(self.ring.copied(slot) if good else self.ring.copy_failed(slot))
                if self._closing:
                    return

    def _copy(self, part: _Part, job: Job, stream: Any) -> bool:
        order: _Order = job.facts
        try:
            on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
            with self._staging.bytes_of(order.lease) as view, on_stream:
                if view is None:
                    raise ChannelError(f"the staging bytes of {order.lease.segment} are not this ticket's any more")
                if part.ready is not None:
                    part.ready.synchronize()
                host = torch.frombuffer(view, dtype=torch.uint8)[part.begin : part.begin + part.pages.numel()]
                host.view(part.pages.shape).copy_(part.pages)
                order.digests[part.first] = dispatch.digests_to_ints(part.digests.cpu())
                return True
        except Exception as error:
            logger.error("ticket %d: cannot copy to staging: %s", job.key[0], error)
            self._staging.revoke([job.key])  # later pages of the ticket are not written either
            return False
