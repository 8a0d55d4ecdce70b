"""How fast pages are ferried, without an engine: seal + move + open against plain copying in as many threads.

Two roads. `kernels`: the seal and open operators alone. `product`: two real worker halves with a real transfer actor's
code between them, as `actors.engine` runs them: lease, seal in chunks, proof by its own road, begin_read, open.

The measure. For every byte of a page's wire form (FP8) sealing must read two (BF16) and write one, opening must read
one and write one: five bytes of memory traffic. Moving costs none on one node, since both sides map the same staging.
A plain copy of n bytes makes 2 n bytes of traffic. `share` is the ferry's traffic a second divided by that of `memmove`
over as many bytes, both cycling through memory, measured alternately. At a share of 1 converting, digesting, proving
and placing would cost nothing beside touching the memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from actors.engine.metadata import FerryMetadata, OpenJob, SealJob
from actors.engine.orders import OpenParams, SealParams
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import HandOver, Lease, Role, Sealed
from actors.transfer.actor import KVTransfer
from kernels import dispatch
from kernels.arguments import PageCaches
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding, name_hash
from ops.bench import stats
from ops.bench.facts import cpu_features
from ops.engine_pair import FakeController, LocalHandle

PAGE_COUNTS = (1, 4, 16, 64, 256, 1024)
CHUNK_TOKENS = 2048  # what an engine computes, and so seals, in one step by default
TRAFFIC = 5  # bytes of memory traffic a wire byte, BF16 -> FP8
BATCH_S, PAIRS = 0.03, 12
COPY_POOL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A model's pages: `wire` is what decode keeps, `source` the same in BF16."""

    name: str
    wire: PageLayout
    backend: str  # attention backend as vLLM names it

    @property
    def source(self) -> PageLayout:
        return self.wire.with_dtype(PageDtype.BF16)


def cases() -> tuple[Case, ...]:
    """The demo model as this machine's CPU engine lays it out, and two large models as GPU engines do."""
    order = PageOrder.CPU_AMX if "amx_bf16" in cpu_features() else PageOrder.CPU_VEC
    e4m3, near, cut = PageDtype.E4M3, Rounding.NEAREST_EVEN, Rounding.TRUNCATE
    return (
        Case(f"SmolLM2-135M ({order})", PageLayout(30, 32, 3, 64, e4m3, order, cut), "CPU_ATTN"),
        Case("Kimi K2 (MLA)", PageLayout(61, 64, 1, 576, e4m3, PageOrder.MLA, near), "FLASHMLA"),
        Case("GLM 4.5 (GQA)", PageLayout(92, 32, 8, 128, e4m3, PageOrder.KV_PACKED, near), "FLASH_ATTN"),
    )


class Copier:
    """`memmove` over a pool of memory, a new place each time, in one thread or several."""

    def __init__(self, pool_bytes: int = COPY_POOL_BYTES, threads: int = 1) -> None:
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._parts = threads
        self._source = torch.ones(pool_bytes, dtype=torch.uint8)
        self._target = torch.ones(pool_bytes, dtype=torch.uint8)
        self._move = ctypes.CDLL(None).memmove
        self._move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._at = 0

    def copy(self, num_bytes: int) -> None:
        pool = self._source.numel()
        while num_bytes:
            part = min(num_bytes, pool - self._at)
            edges = [self._at + part * i // self._parts for i in range(self._parts + 1)]
            waiting = [self._helpers.submit(self._copy, *each) for each in pairwise(edges[1:])] if self._helpers else []
            self._copy(edges[0], edges[1])
            for each in waiting:
                each.result()
            self._at = (self._at + part) % pool
            num_bytes -= part

    def _copy(self, first: int, last: int) -> None:
        self._move(self._target.data_ptr() + first, self._source.data_ptr() + first, last - first)


class Pool:
    """Source and target caches of a case, and a cycle through their blocks in a shuffled order."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(num_blocks)
        shape, wire_shape = case.source.cache_shape(num_blocks), case.wire.cache_shape(num_blocks)
        # One layer's random values for all layers: making them must not take longer than measuring.
        values = torch.randn(shape, generator=generator).bfloat16()
        self.source = [values.clone() for _ in range(case.wire.num_layers)]
        self.target = [torch.zeros(wire_shape, dtype=torch.uint8) for _ in range(case.wire.num_layers)]
        # Checked once, as a worker half does.
        self.prepared = PageCaches(self.source, case.source), PageCaches(self.target, case.wire)
        self._blocks = itertools.cycle(torch.randperm(num_blocks, generator=generator).tolist())

    def blocks(self, count: int) -> list[int]:
        return list(itertools.islice(self._blocks, count))


@dataclass(slots=True)
class Parts:
    """Seconds of one or more hand-overs."""

    seal: float = 0.0
    move: float = 0.0
    open: float = 0.0

    @property
    def total(self) -> float:
        return self.seal + self.move + self.open

    def add(self, other: Parts) -> None:
        self.seal += other.seal
        self.move += other.move
        self.open += other.open


class KernelRoad:
    name = "kernels"

    def __init__(self, pool: Pool, pages_max: int) -> None:
        self._pool = pool
        self._staging = torch.zeros(pages_max, pool.case.wire.page_bytes, dtype=torch.uint8)

    def __enter__(self) -> KernelRoad:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def hand_over(self, pages: int) -> Parts:
        pool, case, binding = self._pool, self._pool.case, SealBinding(1, 1)
        blocks = pool.blocks(pages)
        out = self._staging[:pages]
        began = time.perf_counter()
        digests = dispatch.seal_pages(pool.prepared[0], case.source, case.wire, blocks, out, binding, 0)
        sealed = time.perf_counter()
        good = dispatch.open_pages(out, case.wire, digests, pool.prepared[1], case.wire, blocks, binding, 0)
        opened = time.perf_counter()
        if not bool(good.all()):
            raise RuntimeError(f"{case.name}: {int((~good).sum())} of {pages} pages did not open")
        return Parts(sealed - began, 0.0, opened - sealed)


class ProductRoad:
    """The transfer actor's code in a thread of its own, as it is a process of its own in the service."""

    name = "product"

    def __init__(self, pool: Pool, pages_max: int) -> None:
        self._pool = pool
        self._tickets = itertools.count(1)
        self._notary = FakeController()
        staging = (pages_max + 1) * pool.case.wire.page_bytes + (1 << 20)
        self._transfer = KVTransfer(uuid.uuid4().hex, staging, 60.0, "")
        self._transfer._controller = LocalHandle(self._notary)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._chunk = max(1, CHUNK_TOKENS // pool.case.wire.page_tokens)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __enter__(self) -> ProductRoad:
        self._thread.start()
        path = self._call(self._transfer.start())["socket"]
        case, names = self._pool.case, [f"layer{i}" for i in range(self._pool.case.wire.num_layers)]
        self._prefill = FerryConnectorWorker("p", Role.PREFILL, 0, 1, path)
        self._decode = FerryConnectorWorker("d", Role.DECODE, 0, 1, path)
        self._prefill.register(dict(zip(names, self._pool.source)), _layers(case, names), "auto", (1.0, 1.0))
        self._decode.register(dict(zip(names, self._pool.target)), _layers(case, names), "fp8_e4m3", (1.0, 1.0))
        self._wire = replace(case.wire, layer_names=name_hash(names))
        if self._decode.layout != self._wire:
            raise RuntimeError(f"{case.name}: the worker half sees {self._decode.layout}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prefill.close()
        self._decode.close()
        self._call(self._transfer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if left := asyncio.all_tasks(self._loop):  # cancelled, and not yet ended
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def hand_over(self, pages: int) -> Parts:
        wire, ticket = self._wire, next(self._tickets)
        blocks, num_tokens = self._pool.blocks(pages), pages * wire.page_tokens
        began = time.perf_counter()
        lease = self._call(self._transfer.lease(ticket, 1, pages * wire.page_bytes, ["p#0"], 5.0))
        assert isinstance(lease, Lease)
        order = SealParams(ticket_id=ticket, attempt=1, num_tokens=num_tokens, wire_layout=wire.to_dict(), lease=lease)
        leased = time.perf_counter()
        for first in range(0, pages, self._chunk):
            part = blocks[first : first + self._chunk]
            job = SealJob(order, part, first, last=first + len(part) == pages)
            self._prefill.seal(FerryMetadata(seals=[job]))
        sealed_at = time.perf_counter()
        sealed: Sealed = self._call(_wait(self._notary, (ticket, 1)))
        over = HandOver(ticket_id=ticket, attempt=1, seal=sealed.seal, lease=sealed.lease, deadline_s=5.0)
        here = self._call(self._transfer.begin_read(over, ["d#0"]))
        assert isinstance(here, Lease)
        moved = time.perf_counter()
        job_in = OpenJob(str(ticket), OpenParams(hand_over=over), blocks, 0, num_tokens)
        self._decode.start_opening(FerryMetadata(opens=[job_in]))
        while not (landed := self._decode.landed(empty_step=True))[0]:
            pass
        opened = time.perf_counter()
        if landed[1]:
            raise RuntimeError(f"{self._pool.case.name}: a page of ticket {ticket} did not open")
        del self._notary.sealed[(ticket, 1)]
        return Parts(sealed_at - leased, (leased - began) + (moved - sealed_at), opened - moved)


async def _wait(controller: FakeController, key: tuple[int, int]) -> Sealed:
    return await controller.seal_of(key)


def _layers(case: Case, names: Sequence[str]) -> dict[str, Any]:
    """The attributes of vLLM's attention layers that say how their cache is laid out."""
    backend = SimpleNamespace(get_name=lambda: case.backend)
    isa = {PageOrder.CPU_AMX: "amx", PageOrder.CPU_VEC: "vec"}.get(case.wire.order)
    one = torch.ones(1)
    scales = {"_k_scale": one, "_v_scale": one, "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    return {name: SimpleNamespace(get_attn_backend=lambda: backend, isa=isa, **scales) for name in names}


def page_counts(case: Case, wanted: Sequence[int], memory_bytes: int) -> list[int]:
    """Those of `wanted` whose caches (BF16, FP8) and staging fit into `memory_bytes`."""
    return [pages for pages in wanted if 4 * case.wire.page_bytes * pages <= memory_bytes]


def _batches(road: KernelRoad | ProductRoad, copier: Copier, pages: int) -> Iterator[tuple[Parts, float, int]]:
    """(ferry, seconds of copying the same traffic, hand-overs) of pairs measured one beside the other."""
    half_traffic = TRAFFIC * pages * road._pool.case.wire.page_bytes // 2
    one = road.hand_over(pages).total
    count = max(1, round(BATCH_S / one))
    for pair in range(PAIRS):
        parts, copied = Parts(), 0.0
        for turn in (0, 1) if pair % 2 else (1, 0):
            if turn:
                for _ in range(count):
                    parts.add(road.hand_over(pages))
            else:
                began = time.perf_counter()
                for _ in range(count):
                    copier.copy(half_traffic)
                copied = time.perf_counter() - began
        yield parts, copied, count


def measure_case(
    case: Case, counts: Sequence[int], say: Callable[[str], None], threads: Sequence[int] = (1,)
) -> list[dict[str, Any]]:
    rows = []
    pool = Pool(case, max(counts))
    for number in threads:
        copier = Copier(threads=number)
        for make in (KernelRoad, ProductRoad):
            with make(pool, max(counts)) as road:
                dispatch.set_threads(number)
                for pages in counts:
                    made = list(_batches(road, copier, pages))
                    rows.append(_row(case, road.name, pages, made) | {"threads": number})
                    share = rows[-1]["share"].text()
                    say(f"{case.name}, {road.name}, {pages} pages, {number} threads: share {share}")
    dispatch.set_threads(1)
    return rows


def _row(case: Case, road: str, pages: int, made: Sequence[tuple[Parts, float, int]]) -> dict[str, Any]:
    wire = pages * case.wire.page_bytes
    each = {
        part: stats.p50([getattr(parts, part) / count for parts, _, count in made])
        for part in ("seal", "move", "open", "total")
    }
    return {
        "layout": case.name,
        "road": road,
        "pages": pages,
        "wire_bytes": wire,
        "share": stats.paired_ratio([(copied, parts.total) for parts, copied, _ in made]),
        "seconds": each,
        "raw": [[copied, parts.seal, parts.move, parts.open, count] for parts, copied, count in made],
        "wire_gb_per_s": wire / each["total"] / 1e9,
        "traffic_gb_per_s": TRAFFIC * wire / each["total"] / 1e9,
        "copy_traffic_gb_per_s": TRAFFIC * wire * stats.p50([count / copied for _, copied, count in made]) / 1e9,
    }


def measure_limits(case: Case, pages: int) -> dict[str, float]:
    """What the parts of the work reach by themselves, GB/s of wire bytes: digest alone, and copy + digest alone."""
    pool, binding = Pool(case, pages), SealBinding(1, 1)
    blocks = pool.blocks(pages)
    plain = torch.zeros(pages, case.source.page_bytes, dtype=torch.uint8)
    wire = torch.zeros(pages, case.wire.page_bytes, dtype=torch.uint8)

    def best(work: Callable[[], Any], num_bytes: int) -> float:
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return num_bytes / min(seconds) / 1e9

    return {
        "digest": best(lambda: dispatch.page_digests(wire, case.wire, binding, 0), wire.numel()),
        "copy_and_digest": best(
            lambda: dispatch.seal_pages(pool.source, case.source, case.source, blocks, plain, binding, 0), plain.numel()
        ),
        "convert_and_digest": best(
            lambda: dispatch.seal_pages(pool.source, case.source, case.wire, blocks, wire, binding, 0), wire.numel()
        ),
    }


def measure(
    wanted: Sequence[int], memory_bytes: int, say: Callable[[str], None], only: Sequence[Case] | None = None
) -> dict[str, Any]:
    """All cases on both roads, with one thread and with two where there are two cores. torch is set to one."""
    torch.set_num_threads(1)
    rows, limits = [], {}
    for case in only or cases():
        counts = page_counts(case, wanted, memory_bytes)
        if not counts:
            raise ValueError(f"{case.name}: one page needs {4 * case.wire.page_bytes} bytes, --memory-gib allows less")
        rows += measure_case(case, counts, say, (1, 2) if (os.cpu_count() or 1) > 1 else (1,))
        limits[case.name] = measure_limits(case, min(64, max(counts)))
    return {"backend": dispatch.backend_name(), "rows": rows, "limits": limits, "traffic_per_wire_byte": TRAFFIC}


def table(report: dict[str, Any]) -> str:
    lines = [
        "| layout | road | threads | pages | wire MB | seal ms | move ms | open ms "
        "| wire GB/s | traffic GB/s | copy GB/s | share |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        parts = " | ".join(f"{row['seconds'][part] * 1e3:.2f}" for part in ("seal", "move", "open"))
        lines.append(
            f"| {row['layout']} | {row['road']} | {row['threads']} | {row['pages']} | {row['wire_bytes'] / 1e6:.1f} "
            f"| {parts} | {row['wire_gb_per_s']:.2f} | {row['traffic_gb_per_s']:.1f} "
            f"| {row['copy_traffic_gb_per_s']:.1f} | {row['share'].text()} |"
        )
    lines += ["", "| layout | digest alone GB/s | copy + digest GB/s | convert + digest GB/s |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {limit['digest']:.2f} | {limit['copy_and_digest']:.2f} | {limit['convert_and_digest']:.2f} |"
        for name, limit in report["limits"].items()
    ]
    lines += [
        "",
        f"Share: traffic of the ferry ({TRAFFIC} bytes a wire byte: seal reads 2, writes 1; open reads 1, writes 1) a "
        "second over that of memmove in as many threads, paired; 95 % interval, Student's t. Limits: bytes of the "
        "result.",
    ]
    return "\n".join(lines)


__all__ = ["Case", "Copier", "KernelRoad", "ProductRoad", "cases", "measure", "measure_case", "table"]
