"""CPU figures of the kernels: rates against a memory copy of the same bytes, extra memory, the tag check, INT4.

One thread. Each figure is the median of interleaved repetitions (operator, copy, operator, copy ...), so that what else
the machine does falls on both alike. A figure is printed only after the operator gave the right bytes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding
from ops.kernels import vectors

BINDING = SealBinding(1, 1)
DEMO = PageLayout(30, 128, 3, 64, PageDtype.BF16, PageOrder.CPU_VEC)
"""Geometry of SmolLM2-135M with the CPU backend's default block."""


@dataclass(frozen=True)
class PageFigure:
    """Sizes in MiB, times in ms, rates in GB/s of the bytes named, ratios against a copy of those bytes.

    `chain_share`: copying the source pages once, over sealing and opening them (bytes that stay in shared memory move
    for free); `chain_traffic_share`: the same over copying what the chain reads and writes.
    """

    backend: str
    format: str
    pages: int
    source_mib: float
    wire_mib: float
    seal_ms: float
    open_ms: float
    copy_source_ms: float
    copy_wire_ms: float
    seal_source_gb_s: float
    open_wire_gb_s: float
    seal_share: float
    open_share: float
    chain_share: float
    chain_traffic_share: float


@dataclass(frozen=True)
class TagFigure:
    rows: int
    tokens: int
    page_tokens: int
    columns: int
    backend: str
    microseconds: float
    bytes_touched: int
    gb_s: float
    memory_limit_share: float


def interleaved(runs: list[Callable[[], Any]], repetitions: int) -> list[float]:
    """Median seconds of each, run in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repetitions):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]


def formats() -> dict[str, PageLayout]:
    return {
        "bf16->e4m3 scale 1": DEMO.with_dtype(PageDtype.E4M3, rounding=Rounding.TRUNCATE),
        "bf16->e4m3 scale 0.05": DEMO.with_dtype(
            PageDtype.E4M3, rounding=Rounding.TRUNCATE, k_scales=(0.05,), v_scales=(0.05,)
        ),
        "bf16->bf16": DEMO,
    }


def page_figures(backend: str, counts: list[int], repetitions: int) -> list[PageFigure]:
    figures = []
    for pages in counts:
        blocks = 2 * pages
        generator = torch.Generator().manual_seed(pages)
        caches = [torch.randn(DEMO.cache_shape(blocks), generator=generator).to(torch.bfloat16) for _ in range(30)]
        ids = torch.randperm(blocks, generator=generator)[:pages]
        figures += [_page_figure(backend, name, wire, caches, ids, repetitions) for name, wire in formats().items()]
    return figures


def _page_figure(
    backend: str, name: str, wire: PageLayout, caches: list[torch.Tensor], ids: torch.Tensor, repetitions: int
) -> PageFigure:
    n = len(ids)
    kind = torch.uint8 if wire.dtype is PageDtype.E4M3 else torch.bfloat16
    targets = [torch.zeros(wire.cache_shape(caches[0].shape[0]), dtype=kind) for _ in caches]
    out = torch.zeros(n, wire.page_bytes, dtype=torch.uint8)
    a, b = (torch.ones(n * DEMO.page_bytes, dtype=torch.uint8) for _ in range(2))
    wire_a, wire_b = a[: out.numel()], b[: out.numel()]
    with dispatch.use_backend(backend):
        digests = dispatch.seal_pages(caches, DEMO, wire, ids, out, BINDING, 0)
        seal, opened, copy_source, copy_wire = interleaved(
            [
                lambda: dispatch.seal_pages(caches, DEMO, wire, ids, out, BINDING, 0),
                lambda: dispatch.open_pages(out, wire, digests, targets, wire, ids, BINDING, 0),
                lambda: b.copy_(a),
                lambda: wire_b.copy_(wire_a),
            ],
            repetitions,
        )
        if not dispatch.open_pages(out, wire, digests, targets, wire, ids, BINDING, 0).all():
            raise AssertionError("a page that was just sealed does not open")
    source_bytes, wire_bytes = n * DEMO.page_bytes, n * wire.page_bytes
    # Read and written: seal S + W, open W + W; a copy of B bytes is 2 B.
    traffic = (source_bytes + 3 * wire_bytes) / (2 * source_bytes) * copy_source
    return PageFigure(
        backend,
        name,
        n,
        source_bytes / 2**20,
        wire_bytes / 2**20,
        seal * 1e3,
        opened * 1e3,
        copy_source * 1e3,
        copy_wire * 1e3,
        source_bytes / seal / 1e9,
        wire_bytes / opened / 1e9,
        copy_source / seal,
        copy_wire / opened,
        copy_source / (seal + opened),
        traffic / (seal + opened),
    )


def peak_extra_mib(backend: str, pages: int) -> dict[str, float]:
    """Resident memory that seal and open take beyond their arguments, by the kernel's high-water mark (VmHWM)."""
    wire = formats()["bf16->e4m3 scale 1"]
    caches = [torch.randn(DEMO.cache_shape(pages)).to(torch.bfloat16) for _ in range(30)]
    targets = [torch.ones(wire.cache_shape(pages), dtype=torch.uint8) for _ in range(30)]
    out = torch.ones(pages, wire.page_bytes, dtype=torch.uint8)
    ids = list(range(pages))
    found = {"source_mib": pages * DEMO.page_bytes / 2**20, "float32_copy_mib": pages * DEMO.page_bytes * 2 / 2**20}
    with dispatch.use_backend(backend):
        dispatch.seal_pages(caches, DEMO, wire, ids[:1], out[:1], BINDING, 0)  # compiled, tables made
        dispatch.open_pages(
            out[:1], wire, dispatch.page_digests(out[:1], wire, BINDING, 0), targets, wire, ids[:1], BINDING, 0
        )
        before = _restart_high_water()
        digests = dispatch.seal_pages(caches, DEMO, wire, ids, out, BINDING, 0)
        found["seal_extra_mib"] = _status("VmHWM") - before
        before = _restart_high_water()
        dispatch.open_pages(out, wire, digests, targets, wire, ids, BINDING, 0)
        found["open_extra_mib"] = _status("VmHWM") - before
    return found


def _restart_high_water() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> float:
    """MiB from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def tag_figures(backend: str, repetitions: int) -> list[TagFigure]:
    figures = []
    for rows, tokens in ((64, 8192), (256, 32768)):
        for page_tokens in (16, 32, 64, 128):
            columns = tokens // page_tokens
            pool = 2 * rows * columns
            generator = torch.Generator().manual_seed(1)
            tags = torch.randint(1, 1 << 62, (pool,), generator=generator)
            pages = torch.randperm(pool, generator=generator)[: rows * columns].view(rows, columns)
            table, expected = pages.to(torch.int32), tags[pages]
            lengths = torch.full((rows,), columns, dtype=torch.int32)
            # A row: its ids, expected tags and the tags it points at; then one copy of as many bytes.
            touched = rows * columns * (4 + 8 + 8) + rows * (4 + 4 + 1)
            a, b = (torch.ones(touched // 2, dtype=torch.uint8) for _ in range(2))
            with dispatch.use_backend(backend):
                bad, _ = dispatch.check_tags(tags, table, lengths, expected)
                if bad.any():
                    raise AssertionError("a correct table was called bad")
                check = partial(dispatch.check_tags, tags, table, lengths, expected)
                seconds, copy = interleaved([check, partial(b.copy_, a)], repetitions)
            figures.append(
                TagFigure(
                    rows,
                    tokens,
                    page_tokens,
                    columns,
                    backend,
                    seconds * 1e6,
                    touched,
                    touched / seconds / 1e9,
                    copy / seconds,
                )
            )
    return figures


def int4_figures(backend: str, repetitions: int) -> list[dict[str, Any]]:
    weight = (torch.randn(1024, 4096, generator=torch.Generator().manual_seed(2)) * 0.02).to(torch.bfloat16)
    codes = (weight.float() / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
    block_scale = torch.full((8, 32), 0.001)
    copy_target = torch.empty_like(weight)
    rows: list[dict[str, Any]] = []
    for name, values, scales in (("bf16", weight, None), ("fp8 blocks", codes, block_scale)):
        for symmetric in (True, False):
            for grid in ((1.0,), (1.0, 0.95, 0.9, 0.85)):
                with dispatch.use_backend(backend):
                    packed = dispatch.pack_int4(values, 64, symmetric, grid, block_scale=scales)
                    pack, unpack, copy = interleaved(
                        [
                            partial(dispatch.pack_int4, values, 64, symmetric, grid, block_scale=scales),
                            partial(dispatch.unpack_int4, packed.packed, packed.scale, packed.zero_point, 64),
                            partial(copy_target.copy_, weight),
                        ],
                        repetitions,
                    )
                rows.append(
                    {
                        "backend": backend,
                        "weight": name,
                        "symmetric": symmetric,
                        "ratios": len(grid),
                        "pack_million_weights_s": weight.numel() / pack / 1e6,
                        "unpack_million_weights_s": weight.numel() / unpack / 1e6,
                        "pack_share_of_bf16_copy": copy / pack,
                    }
                )
    return rows


def run(quick: bool = False) -> dict[str, Any]:
    """All figures; `quick` for tests. Raises AssertionError if the kernels do not give the vectors' bytes."""
    torch.set_num_threads(1)
    backends = ["numba", "reference"] if dispatch.backend_name("cpu") == "numba" else ["reference"]
    for backend in backends:
        if wrong := vectors.verify(backend):
            raise AssertionError(f"no figures: {', '.join(wrong)}")
    repetitions = 3 if quick else 21
    figures: dict[str, Any] = {
        "machine": {"cpu": _cpu_name(), "cpus": os.cpu_count(), "torch": torch.__version__, "threads": 1},
        "note": "CPU only. GPU figures come from `make gpu-check` on a machine with a GPU; none are in this report.",
    }
    pages, tags, packs, memory = [], [], [], {}
    for backend in backends:
        fast = backend != "reference"
        counts = [1, 4] if quick else [1, 4, 16, 64] if fast else [1, 4]
        pages += [asdict(each) for each in page_figures(backend, counts, repetitions if fast else 3)]
        memory[backend] = peak_extra_mib(backend, 2 if quick else 32 if fast else 8)
        tags += [asdict(each) for each in tag_figures(backend, repetitions)]
        packs += int4_figures(backend, 1 if quick else 5)
    return {**figures, "pages": pages, "peak_memory": memory, "check_tags": tags, "int4": packs}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def report(figures: dict[str, Any]) -> str:
    lines = [f"{figures['machine']['cpu']}, torch {figures['machine']['torch']}, 1 thread. {figures['note']}", ""]
    lines.append("seal and open (share: time of a memory copy of the same bytes / time of the operator)")
    lines.append(
        f"{'backend':10s}{'format':23s}{'pages':>6s}{'src MiB':>9s}{'seal ms':>9s}{'GB/s':>7s}{'share':>7s}"
        f"{'open ms':>9s}{'GB/s':>7s}{'share':>7s}{'chain/copy':>12s}{'by traffic':>12s}"
    )
    lines += [
        f"{p['backend']:10s}{p['format']:23s}{p['pages']:6d}{p['source_mib']:9.1f}{p['seal_ms']:9.2f}"
        f"{p['seal_source_gb_s']:7.2f}{p['seal_share']:7.2f}{p['open_ms']:9.2f}{p['open_wire_gb_s']:7.2f}"
        f"{p['open_share']:7.2f}{p['chain_share']:12.2f}{p['chain_traffic_share']:12.2f}"
        for p in figures["pages"]
    ]
    lines += ["", "memory beyond the arguments (a float32 copy of the source pages would be the last column)"]
    lines += [
        f"{name:10s} source {m['source_mib']:.1f} MiB: seal +{m['seal_extra_mib']:.2f},"
        f" open +{m['open_extra_mib']:.2f}, float32 copy {m['float32_copy_mib']:.1f} MiB"
        for name, m in figures["peak_memory"].items()
    ]
    lines += ["", "check_tags (share: a memory copy that reads and writes as many bytes / the check)"]
    lines += [
        f"{t['backend']:10s}{t['rows']:4d} rows x {t['tokens']:6d} tokens, page {t['page_tokens']:4d}:"
        f" {t['microseconds']:9.1f} us {t['bytes_touched'] / 2**20:8.2f} MiB {t['gb_s']:6.2f} GB/s"
        f" {t['memory_limit_share']:6.2f}"
        for t in figures["check_tags"]
    ]
    lines += ["", "INT4, group 64"]
    lines += [
        f"{i['backend']:10s}{i['weight']:11s}{'' if i['symmetric'] else 'a'}symmetric, {i['ratios']} ratios:"
        f" pack {i['pack_million_weights_s']:7.0f} M/s ({i['pack_share_of_bf16_copy']:.2f} of a copy),"
        f" unpack {i['unpack_million_weights_s']:7.0f} M/s"
        for i in figures["int4"]
    ]
    return "\n".join(lines)
