"""The one place where faults are put into a running engine. Loaded by engines only where `faults.kinds` names kinds.

`pageferry chaos`, tests and `POST /faults` (`app.api.fault_injection`) use it, and nothing else does. A fault names its
kind, its victim and a trial number; with the configured seed these decide every choice in it (position, bit, page), so
a run can be repeated. What was done comes back as plain data. Faults of the tables are done between steps; those of the
transfer wait for their ticket.

Every worker and every scheduler has a `Faults` of its own. `cluster.fault_kinds.Side` has the three places in which a
kind can work: decode's worker, prefill's worker, the scheduler.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from actors.engine.connector import FerryConnector
from actors.engine.integrity.tracker import Proof
from actors.engine.metadata import OpenJob
from actors.engine.orders import SealParams
from actors.engine.runner_view import RunnerView
from actors.engine.utilities import FerryWorkerExtension, connector_of_this_worker
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import Verdict
from actors.transfer.channel import PagesSealed, WriterDone
from cluster.fault_kinds import FaultError, PageFault, page_fault
from kernels.layout import PageLayout
from kernels.reference import element_offsets

LATE_SEALS = (PageFault.SEAL_LOST, PageFault.SEAL_LATE, PageFault.SEAL_DUPLICATED)
IN_STAGING = (
    PageFault.REPLAYED_PAGE,
    PageFault.BIT_FLIP,
    PageFault.PAGE_PERMUTATION,
    PageFault.TOKEN_PERMUTATION,
    PageFault.TRUNCATED_PAGE,
)


@dataclass(frozen=True, slots=True)
class Armed:
    kind: str
    rng: random.Random
    delay_s: float  # of a seal that comes late


@dataclass(slots=True)
class _Held:
    job: Any
    pages: torch.Tensor  # copies of the wire bytes


@dataclass(slots=True)
class Faults:
    kinds: tuple[str, ...]
    seed: int
    log: list[dict[str, Any]] = field(default_factory=list)
    _tickets: dict[int, Armed] = field(default_factory=dict)
    _held: dict[int, _Held] = field(default_factory=dict)
    _earlier: torch.Tensor | None = None
    _blind_until: float = 0.0  # on the monotonic clock

    @classmethod
    def of(cls, config: dict[str, Any]) -> Faults | None:
        """From `faults` of the configuration; None when it names no kinds."""
        kinds = tuple(config.get("kinds") or ())
        return cls(tuple(page_fault(kind) for kind in kinds), int(config.get("seed", 0))) if kinds else None

    def rng(self, kind: str, trial: int) -> random.Random:
        if kind not in self.kinds:
            raise FaultError(f"fault {kind!r} is not allowed here; faults.kinds allows {', '.join(self.kinds)}")
        return random.Random(f"{self.seed}/{kind}/{trial}")

    def _did(self, kind: str, **more: Any) -> dict[str, Any]:
        """It goes to another process, so with the fault's plain name."""
        what = {"kind": str(kind), **more}
        self.log.append(what)
        return what

    # -- block tables and tags, between steps, in the worker

    def on_tables(
        self, kind: str, trial: int, victim: str, view: RunnerView, check: Any, first: int = 0
    ) -> dict[str, Any]:
        """Spoils one entry of the victim's row, at a position from `first` on."""
        rng = self.rng(kind, trial)
        pages = view.pages(victim)
        if not pages:
            return self._did(kind=kind, fired=False, why=f"{victim} is not in the batch")
        computed = view.num_computed(victim)
        # `num_computed` may be that before the last step that ran; with the last token sampled nothing reads again.
        if computed >= view.max_tokens(victim) - 2:
            return self._did(kind=kind, fired=False, why=f"{victim} has had its last step")
        # Only pages that hold tokens already: attention reads those in the next step.
        used = range(first, min(len(pages), -(-computed // view.page_tokens)))
        if not used:
            return self._did(kind=kind, fired=False, why=f"{victim} has no page from position {first} on")
        position = rng.choice(used)
        before = pages[position]
        if kind in (PageFault.STALE_TAG, PageFault.TAG_BUMPED):
            page_tags = getattr(check, "page_tags", None)
            if page_tags is None:
                return self._did(kind=kind, fired=False, why="there are no tags with integrity.mode: off")
            page_tags[before] += 1 if kind == PageFault.TAG_BUMPED else -rng.randint(1, 1000)
            return self._did(kind=kind, fired=True, victim=victim, position=position, page=before)
        after = self._other_page(kind, rng, view, victim, pages, position)
        if after is None:
            return self._did(kind=kind, fired=False, why="there is no such page now")
        view.set_page(victim, position, after)
        return self._did(kind=kind, fired=True, victim=victim, position=position, page=before, after=after)

    @staticmethod
    def _other_page(
        kind: str, rng: random.Random, view: RunnerView, victim: str, pages: Sequence[int], position: int
    ) -> int | None:
        held = {request_id: view.pages(request_id) for request_id in view.request_ids()}
        if kind == PageFault.TABLE_OWN_PAGE:
            choices = [page for page in pages if page != pages[position]]
        elif kind == PageFault.TABLE_OTHER_REQUEST:
            choices = [page for r, those in held.items() if r != victim for page in those if page not in pages]
        elif kind == PageFault.TABLE_FREE_PAGE:
            taken = {page for those in held.values() for page in those}
            choices = [page for page in range(1, view.num_pages) if page not in taken]
        else:
            raise FaultError(f"fault {kind!r} is none of the block tables")
        return rng.choice(choices) if choices else None

    def lose_proofs(self, kind: str, trial: int, seconds: float) -> dict[str, Any]:
        """No step is proven for so long."""
        self.rng(kind, trial)
        self._blind_until = time.monotonic() + seconds
        return self._did(kind=kind, fired=True, seconds=seconds)

    @property
    def loses_proofs(self) -> bool:
        return time.monotonic() < self._blind_until

    # -- the transfer, in the workers

    def arm(self, kind: str, trial: int, ticket_id: int, delay_s: float = 0.0) -> dict[str, Any]:
        """The fault happens when this ticket passes."""
        self._tickets[ticket_id] = Armed(kind, self.rng(kind, trial), delay_s)
        return {"kind": kind, "armed": ticket_id}

    def _take(self, ticket_id: int, *kinds: str) -> Armed | None:
        armed = self._tickets.get(ticket_id)
        if armed is None or armed.kind not in kinds:
            return None
        return self._tickets.pop(ticket_id)

    def on_wire_layout(self, ticket_id: int, wire: PageLayout) -> PageLayout:
        """Prefill, before it converts."""
        armed = self._take(ticket_id, PageFault.WRONG_SCALE)
        if armed is None:
            return wire
        factor = armed.rng.choice((0.5, 2.0, 4.0))
        self._did(kind=armed.kind, fired=True, ticket_id=ticket_id, factor=factor)
        return wire.with_dtype(
            wire.dtype,
            rounding=wire.rounding,
            k_scales=tuple(s * factor for s in wire.k_scales),
            v_scales=wire.v_scales,
        )

    def on_sealed(self, message: PagesSealed, send: Any) -> bool:
        """Prefill, before the seal leaves; False: it must not be sent."""
        armed = self._take(message.ticket_id, *LATE_SEALS) if message.last else None
        if armed is None:
            return True
        self._did(kind=armed.kind, fired=True, ticket_id=message.ticket_id)
        if armed.kind == PageFault.SEAL_DUPLICATED:
            send(message)
            return True
        if armed.kind == PageFault.SEAL_LOST:
            # The seal is lost, not the engine's word that it has let go of the staging bytes.
            send(WriterDone(ticket_id=message.ticket_id, attempt=message.attempt))
        if armed.kind == PageFault.SEAL_LATE:
            threading.Timer(armed.delay_s, send, (message,)).start()
        return False

    def on_staging(self, job: Any, pages: torch.Tensor, layout: PageLayout) -> None:
        """Decode, before pages are verified. `pages`: uint8 [n, page_bytes], the staging memory itself."""
        ticket_id = job.order.hand_over.ticket_id
        armed = self._take(ticket_id, *IN_STAGING)
        earlier, self._earlier = self._earlier, pages.clone() if PageFault.REPLAYED_PAGE in self.kinds else None
        if armed is None:
            return
        rng, num_pages = armed.rng, pages.shape[0]
        page = rng.randrange(num_pages)
        done: dict[str, Any] = {"kind": armed.kind, "fired": True, "ticket_id": ticket_id, "page": page}
        if armed.kind == PageFault.REPLAYED_PAGE:
            if earlier is None:
                done |= {"fired": False, "why": "no ticket was opened before"}
            else:
                page = done["page"] = rng.randrange(min(num_pages, earlier.shape[0]))
                done["fired"] = not torch.equal(pages[page], earlier[page])
                pages[page] = earlier[page]
        elif armed.kind == PageFault.BIT_FLIP:
            at, bit = rng.randrange(layout.page_bytes), rng.randrange(8)
            pages[page, at] ^= 1 << bit
            done |= {"byte": at, "bit": bit}
        elif armed.kind == PageFault.PAGE_PERMUTATION:
            other = rng.choice([p for p in range(num_pages) if p != page]) if num_pages > 1 else page
            done |= {"with": other, "fired": not torch.equal(pages[page], pages[other])}
            pages[[page, other]] = pages[[other, page]]
        elif armed.kind == PageFault.TOKEN_PERMUTATION:
            done["tokens"] = swap_tokens(pages[page], layout, rng)
        elif armed.kind == PageFault.TRUNCATED_PAGE:
            keep = rng.randrange(layout.page_bytes)
            done |= {"bytes_kept": keep, "fired": bool(pages[page, keep:].any())}
            pages[page, keep:] = 0
        else:
            raise FaultError(f"fault {armed.kind!r} is in IN_STAGING and is not made here")
        self._did(**done)

    def revokes(self, ticket_id: int) -> bool:
        """Decode, before it looks at the bytes; True: they are not this ticket's any more."""
        if self._take(ticket_id, PageFault.STAGING_REVOKED) is None:
            return False
        self._did(kind=PageFault.STAGING_REVOKED, fired=True, ticket_id=ticket_id)
        return True

    def hold_landing(self, job: Any, pages: torch.Tensor, cancelled: Any) -> None:
        """Decode, before pages are verified: keeps a copy of the landing and waits until its request is aborted."""
        ticket_id = job.order.hand_over.ticket_id
        if self._take(ticket_id, PageFault.LATE_LANDING) is None:
            return
        self._held[ticket_id] = _Held(job, pages.clone())
        self._did(kind=PageFault.LATE_LANDING, held=ticket_id)
        until = time.monotonic() + 5.0
        while job.request_id not in cancelled and time.monotonic() < until:
            time.sleep(0.001)

    def land_late(self, ticket_id: int, land: Any) -> dict[str, Any]:
        """Lands what `hold_landing` kept, now; `land(job, pages)` gives the verdicts."""
        held = self._held.pop(ticket_id, None)
        if held is None:
            return self._did(kind=PageFault.LATE_LANDING, fired=False, why="nothing is held")
        verdicts = land(held.job, held.pages)
        done = {"fired": True, "ticket_id": ticket_id, "pages": list(held.job.block_ids)}
        return self._did(PageFault.LATE_LANDING, **done, verdicts={str(v): n for v, n in verdicts.items() if n})

    # -- the pool, between steps, in the scheduler

    def on_pool(self, kind: str, trial: int, victim: str, manager: Any, guard: Any) -> dict[str, Any]:
        """Spoils the pool's account of one full page of the victim. `guard`: the ledger's, None with mode off."""
        rng = self.rng(kind, trial)
        pool = manager.block_pool
        blocks = list(manager.coordinator.single_type_managers[0].req_to_blocks.get(victim) or ())
        shared = kind == PageFault.SHARED_PAGE_FREED_EARLY
        # The last page is still being written; what is wanted is one that is only read.
        choices = [b for b in blocks[:-1] if (b.ref_cnt > 1 if shared else b.ref_cnt == 1)]
        if not choices:
            return self._did(
                kind=kind, fired=False, why=f"{victim} has no {'shared' if shared else 'private'} full page"
            )
        block = rng.choice(choices)
        # Without its hash a free page is the next to be taken.
        pool.evict_blocks({block.block_id})
        if shared:
            block.ref_cnt -= 1
        else:
            # Below the ledger, as a fault in the pool itself would be.
            (pool.free_blocks if guard is None else guard.pool_free)([block])
            if kind == PageFault.PAGE_FREED_AND_TAKEN and guard is not None:
                guard.blind_to.add(block.block_id)
        return self._did(kind=kind, fired=True, victim=victim, page=block.block_id, references=block.ref_cnt)


def swap_tokens(page: torch.Tensor, layout: PageLayout, rng: random.Random) -> list[int]:
    """Swaps two tokens of a wire page in every layer, K and V. Returns their numbers."""
    one, other = rng.sample(range(layout.page_tokens), 2)
    width = layout.dtype.num_bytes
    for layer in range(layout.num_layers):
        flat = page[layer * layout.layer_page_bytes : (layer + 1) * layout.layer_page_bytes]
        values = flat.view(torch.int16) if width == 2 else flat
        if layout.order.is_latent:
            rows = values.view(layout.page_tokens, -1)
            rows[[one, other]] = rows[[other, one]]
            continue
        offsets = element_offsets(layout)
        kept = values[offsets[one]].clone()
        values[offsets[one]] = values[offsets[other]]
        values[offsets[other]] = kept
    return [one, other]


class FaultyWorker(FerryConnectorWorker):
    faults: Faults

    def _wire(self, order: SealParams) -> PageLayout:
        return self.faults.on_wire_layout(order.ticket_id, super()._wire(order))

    def _send_seal(self, message: PagesSealed) -> None:
        if self.faults.on_sealed(message, super()._send_seal):
            super()._send_seal(message)

    def _open_view(self, job: OpenJob, view: memoryview | None) -> tuple[dict[Verdict, int], int]:
        return super()._open_view(job, None if self.faults.revokes(job.order.hand_over.ticket_id) else view)

    def _land(self, job: OpenJob, pages: torch.Tensor) -> dict[Verdict, int]:
        assert self.layout is not None
        self.faults.on_staging(job, pages, self.layout)
        self.faults.hold_landing(job, pages, self._cancelled)
        if job.request_id in self._cancelled:
            return {Verdict.STALE: len(job.block_ids)}
        return super()._land(job, pages)

    def land_late(self, ticket_id: int) -> dict[str, Any]:
        """A landing that was held back happens now."""

        def land(job: OpenJob, pages: torch.Tensor) -> dict[Verdict, int]:
            verdicts = super(FaultyWorker, self)._land(job, pages)
            self._report(job, verdicts, 0, 0.0)
            return verdicts

        return self.faults.land_late(ticket_id, land)


class FaultInjectingConnector(FerryConnector):
    worker_class = FaultyWorker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        faults = Faults.of(vllm_config.kv_transfer_config.get_from_extra_config("faults", {}))
        if faults is None:
            raise FaultError("faults are off: faults.kinds is empty")
        self.faults = faults
        super().__init__(vllm_config, role, kv_cache_config)
        if isinstance(self.worker, FaultyWorker):
            self.worker.faults = faults

    def build_connector_worker_meta(self) -> Proof | None:
        proof = super().build_connector_worker_meta()
        return None if self.faults.loses_proofs else proof

    def utilities(self) -> dict[str, Callable[..., Any]]:
        scheduler = self.scheduler
        assert scheduler is not None

        def pageferry_fault(core: Any, kind: str, trial: int, victim: str) -> dict[str, Any]:
            """Spoils the pool's account of a page of `victim`."""
            guard = getattr(scheduler.tracker, "guard", None)
            return self.faults.on_pool(kind, trial, victim, core.scheduler.kv_cache_manager, guard)

        return super().utilities() | {"pageferry_fault": pageferry_fault}


class FaultInjectingExtension(FerryWorkerExtension):
    def pageferry_fault(self, kind: str, trial: int, target: str | int, more: float = 0) -> dict[str, Any]:
        """`target`: a request id (block tables, tags; `more` is the first position to spoil; proofs; `more` is
        the seconds for which they are lost), or a ticket id (what is on its way; `more` is a late seal's delay in
        seconds)."""
        connector = _connector()
        if isinstance(target, str):
            assert connector.view is not None and connector.worker is not None
            if kind == PageFault.PROOF_LOST:
                return connector.faults.lose_proofs(kind, trial, more)
            return connector.faults.on_tables(kind, trial, target, connector.view, connector.worker.check, int(more))
        return connector.faults.arm(kind, trial, target, more)

    def pageferry_land_late(self, ticket_id: int) -> dict[str, Any]:
        worker = _connector().worker
        assert isinstance(worker, FaultyWorker)
        return worker.land_late(ticket_id)

    def pageferry_fault_log(self) -> list[dict[str, Any]]:
        """What faults did in this worker since the last call."""
        faults = _connector().faults
        log, faults.log = faults.log, []
        return log


def _connector() -> FaultInjectingConnector:
    connector = connector_of_this_worker()
    assert isinstance(connector, FaultInjectingConnector)
    return connector
