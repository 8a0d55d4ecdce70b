"""Pages through the ring to staging, on a CPU: two worker halves and the real transfer actor's code between them.

`ring=True` gives a CPU engine what a GPU's has; a test holds copies back through `StagingMap.bytes_of`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine import stager as module
from actors.engine.metadata import FerryMetadata, SealJob
from actors.engine.orders import SealParams
from actors.engine.stager import Stager
from actors.messages import Lease, Role, Verdict
from kernels.layout import Rounding
from kernels.reference import encode_e4m3
from ops.worker_pair import EngineCache, WorkerPair

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 16, 32, 24
PAGE = LAYERS * HEADS * TOKENS * 2 * DIM  # bytes of an FP8 page


def layer() -> Any:
    return SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
        _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0), _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip


def a_pair() -> WorkerPair:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    names = [f"layer{i}" for i in range(LAYERS)]
    source = {name: torch.randn(shape).bfloat16() for name in names}
    target = {name: torch.zeros(shape, dtype=torch.uint8) for name in names}
    layers = {name: layer() for name in names}
    return WorkerPair(EngineCache(source, layers, "auto"), EngineCache(target, dict(layers), "fp8_e4m3"), ring=True)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three FP8 pages a slot: a BF16 page is twice as long, and the slot at least that."""
    monkeypatch.setattr("actors.engine.worker_half.SLOT_BYTES", 3 * PAGE)


class Gate:
    """Holds copies back: each waits until the test lets it begin."""

    def __init__(self, stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)
        inner, copying = stager._staging.bytes_of, stager._thread

        @contextlib.contextmanager
        def bytes_of(lease: Lease) -> Iterator[memoryview | None]:
            with inner(lease) as view:
                if threading.current_thread() is copying:
                    self.begun.release()
                    assert self.let.acquire(timeout=20)
                yield view

        monkeypatch.setattr(stager._staging, "bytes_of", bytes_of)


async def begin(pair: WorkerPair, ticket: int, pages: int) -> SealParams:
    layout = pair.decode.layout
    assert layout is not None
    lease = await pair.transfer.lease(ticket, 1, pages * layout.page_bytes, ["p#0"], 30.0)
    assert isinstance(lease, Lease)
    return SealParams(ticket_id=ticket, attempt=1, num_tokens=pages * TOKENS, wire_layout=layout.to_dict(), lease=lease)


async def sealed(pair: WorkerPair, ticket: int) -> Any:
    return await asyncio.wait_for(pair.controller.seal_of((ticket, 1)), 10)


async def test_pages_are_the_same_as_without_a_ring() -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None and pair.decode._stager is None, "decode opens; only prefill has a ring"
        ids = torch.randperm(BLOCKS)[:20].tolist()
        for ticket, chunk in ((1, 7), (2, 20), (3, 1)):
            seal = await pair.seal(ticket, 20 * TOKENS - 3, ids, chunk_pages=chunk)
            assert await pair.open(seal, ids) == {Verdict.OK: 20}
            for name, cache in pair.caches[Role.PREFILL].caches.items():
                expected = encode_e4m3(cache[ids], 1.0, Rounding.NEAREST_EVEN)
                assert torch.equal(pair.caches[Role.DECODE].caches[name][ids], expected)
                pair.caches[Role.DECODE].caches[name].zero_()
        assert stager.ring.idle() and len(pair.transfer.machine.staging) == 0


async def test_a_step_goes_on_and_its_pages_may_change_while_copies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None
        gate = Gate(stager, monkeypatch)
        order = await begin(pair, 5, 9)
        source = pair.caches[Role.PREFILL].caches
        kept = {name: cache.clone() for name, cache in source.items()}
        pair.prefill.seal(FerryMetadata(seals=[SealJob(order, list(range(9)), 0, True)]))  # nothing was copied yet
        for cache in source.values():
            cache.zero_()  # the pages are other requests' by now
        assert not pair.controller.seal_of((5, 1)).done()
        for _ in range(3):
            gate.let.release()
        assert await pair.open(await sealed(pair, 5), list(range(9))) == {Verdict.OK: 9}
        for name, cache in kept.items():
            expected = encode_e4m3(cache[:9], 1.0, Rounding.NEAREST_EVEN)
            assert torch.equal(pair.caches[Role.DECODE].caches[name][:9], expected)


async def test_a_full_ring_stops_the_step_until_a_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None
        gate = Gate(stager, monkeypatch)
        pages = 3 * (module.SLOTS + 2)
        order = await begin(pair, 6, pages)
        job = SealJob(order, list(range(pages)), 0, True)
        step = asyncio.create_task(asyncio.to_thread(pair.prefill.seal, FerryMetadata(seals=[job])))
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
        await asyncio.sleep(0.1)
        assert not step.done() and stager.ring.waits > 0
        for _ in range(module.SLOTS + 2):
            gate.let.release()
        await asyncio.wait_for(step, 10)
        assert await pair.open(await sealed(pair, 6), list(range(pages))) == {Verdict.OK: pages}


async def test_a_ticket_that_is_given_up_is_done_behind_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None
        gate, done = Gate(stager, monkeypatch), []
        monkeypatch.setattr(stager, "_done", lambda key: done.append(key))
        order = await begin(pair, 7, 9)
        pair.prefill.seal(FerryMetadata(seals=[SealJob(order, list(range(6)), 0, False)]))
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
        pair.prefill.seal(FerryMetadata(abandoned=[(7, 1)]))
        assert done == [] and stager.ring.slots.count("free") == module.SLOTS - 1
        gate.let.release()
        while not stager.ring.idle():
            await asyncio.sleep(0.01)
        assert done == [(7, 1)]


async def test_bytes_that_were_taken_away_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None
        gate, done = Gate(stager, monkeypatch), []
        monkeypatch.setattr(stager, "_done", lambda key: done.append(key))
        order = await begin(pair, 8, 9)
        pair.prefill.seal(FerryMetadata(seals=[SealJob(order, list(range(6)), 0, False)]))
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
        stager._staging.revoke([(8, 1)])
        for _ in range(4):
            gate.let.release()
        while not stager.ring.idle():
            await asyncio.sleep(0.01)
        begin_at = order.lease.offset
        written = bytes(pair.transfer.memory.map[begin_at + 3 * PAGE : begin_at + 6 * PAGE])
        assert done == [(8, 1)] and not any(written), "the second part was copied after its lease was revoked"
        pair.prefill.seal(FerryMetadata(seals=[SealJob(order, [6, 7, 8], 6, True)]))
        assert stager.ring.idle() and not pair.controller.seal_of((8, 1)).done()


async def test_a_conversion_that_fails_ends_its_ticket_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair() as pair:
        stager = pair.prefill._stager
        assert stager is not None
        done: list[tuple[int, int]] = []
        monkeypatch.setattr(stager, "_done", lambda key: done.append(key))
        convert = pair.prefill._convert

        def fails_late(job: SealJob, wire: Any, first: int, count: int, out: torch.Tensor) -> torch.Tensor:
            if job.order.ticket_id == 9 and first:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return convert(job, wire, first, count, out)

        monkeypatch.setattr(pair.prefill, "_convert", fails_late)
        orders = [await begin(pair, ticket, 6) for ticket in (9, 10)]
        pair.prefill.seal(FerryMetadata(seals=[SealJob(order, list(range(6)), 0, True) for order in orders]))
        assert await pair.open(await sealed(pair, 10), list(range(6))) == {Verdict.OK: 6}
        assert set(done) == {(9, 1)} and not pair.controller.seal_of((9, 1)).done()
