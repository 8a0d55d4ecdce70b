"""How fast each kernel is (median, L2 flushed between runs), against a plain device copy that moves as many bytes, and
against what vLLM and FlashInfer have for the same work where they can be imported."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding
from ops.gpu_check.plan import Options, Row

BINDING = SealBinding(1, 1)
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One thing to time. `touched`: bytes that must be read and written at least once; `aim`: share of the copy rate,
    or microseconds where `aim_us`."""

    name: str
    run: Run
    touched: int
    aim: float | None = None
    aim_us: float | None = None


def page_cases(device: torch.device, mib: int, layers: int) -> list[Case]:
    """Seal and open of `mib` MiB of BF16 source pages, for a GQA shard and for MLA; 0: one small page."""
    gqa, mla = PageOrder.KV_PACKED, PageOrder.MLA
    layouts = {
        "gqa h1 d128 n16": PageLayout(layers, 16, 1, 128, PageDtype.BF16, gqa),
        "mla n64": PageLayout(layers, 64 if mib else 2, 1, 576, PageDtype.BF16, mla),
    }
    if mib:
        layouts["gqa h8 d128 n64"] = PageLayout(layers, 64, 8, 128, PageDtype.BF16, gqa)
    cases = []
    for name, src in layouts.items():
        n = max(1, (mib << 20) // src.page_bytes)
        wires = {"bf16": src, "e4m3": src.with_dtype(PageDtype.E4M3, k_scales=(0.5,))}
        if src.order is PageOrder.MLA:
            wires["ds_mla"] = PageLayout(layers, src.page_tokens, 1, 576, PageDtype.E4M3, PageOrder.FP8_DS_MLA)
        caches = [torch.randn(src.cache_shape(n + 1), device=device).to(torch.bfloat16) for _ in range(layers)]
        ids = torch.randperm(n + 1, device=device)[:n]
        for to, wire in wires.items():
            out = torch.empty(n, wire.page_bytes, dtype=torch.uint8, device=device)
            kind = torch.bfloat16 if wire.dtype is PageDtype.BF16 else torch.uint8
            targets = [torch.zeros(wire.cache_shape(n + 1), dtype=kind, device=device) for _ in range(layers)]
            digests = dispatch.seal_pages(caches, src, wire, ids, out, BINDING, 0)
            aim = 0.8 if mib >= 64 else None
            seal = partial(dispatch.seal_pages, caches, src, wire, ids, out, BINDING, 0)
            opened = partial(dispatch.open_pages, out, wire, digests, targets, wire, ids, BINDING, 0)
            cases.append(Case(f"seal {name} bf16->{to} {mib} MiB", seal, n * (src.page_bytes + wire.page_bytes), aim))
            cases.append(Case(f"open {name} {to} {mib} MiB source", opened, 2 * n * wire.page_bytes, aim))
    return cases


def tag_cases(device: torch.device, small: bool) -> list[Case]:
    cases = []
    for rows, columns in ((2, 40),) if small else ((64, 512), (64, 8192), (256, 2048)):
        pool = rows * columns + 1
        tags = torch.randint(1, 1 << 62, (pool,), device=device)
        table = torch.randperm(pool, device=device)[: rows * columns].view(rows, columns).to(torch.int32)
        expected = tags[table.long()]
        lengths = torch.full((rows,), columns * 64, dtype=torch.int32, device=device)
        row = torch.arange(rows + 1, dtype=torch.int32, device=device)
        slot_mapping, answer = torch.arange(rows, device=device), torch.empty(2, rows, dtype=torch.int32, device=device)
        run = partial(dispatch.check_tags, tags, table, lengths, 64, expected, row[:rows], row, slot_mapping, answer)
        aim = 10.0 if (rows, columns) == (64, 8192) else None
        cases.append(Case(f"check_tags {rows} x {columns} pages", run, rows * columns * 20, aim_us=aim))
    return cases


def weight_cases(device: torch.device, small: bool) -> list[Case]:
    rows, columns = (4, 128) if small else (8192, 8192)
    weight = (torch.randn(rows, columns, device=device) * 0.02).to(torch.bfloat16)
    codes = (weight.float() / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
    block_scale = torch.full((-(-rows // 128), -(-columns // 128)), 0.001, device=device)
    cases = []
    for name, values, scales in (("bf16", weight, None), ("fp8 blocks", codes, block_scale)):
        for symmetric in (True, False):
            for grid in ((1.0,),) if small else ((1.0,), (1.0, 0.95, 0.9, 0.85)):
                run = partial(_pack, values, symmetric, grid, scales)
                packed = run()
                written = packed.packed.numel() * 4 + packed.scale.numel() * 2
                touched = values.numel() * values.element_size() + written
                label = f"pack_int4 {name} g64 {'sym' if symmetric else 'asym'} {len(grid)} ratios"
                cases.append(Case(label, run, touched, 0.5 if len(grid) == 1 else None))
    packed = dispatch.pack_int4(weight, 64, True)
    unpack = partial(dispatch.unpack_int4, packed.packed, packed.scale, None, 64)
    cases.append(Case("unpack_int4 g64", unpack, weight.numel() * 2 + packed.packed.numel() * 4))
    return cases


def _pack(values: Tensor, symmetric: bool, grid: tuple[float, ...], scales: Tensor | None) -> Any:
    """The kernel alone: dispatch would wait for the check of NaN and infinity after every call."""
    backend = importlib.import_module("kernels.triton_backend")
    return backend.pack_int4(values, 64, symmetric, grid, scales)


def other_cases(
    device: torch.device, mib: int, makers: tuple[tuple[str, Callable[[Tensor], tuple[Run, int]]], ...]
) -> tuple[list[Case], list[str]]:
    """What others have for parts of this work. Returns the cases that can run and, for the rest, why not."""
    src = PageLayout(1, 16, 8, 128, PageDtype.BF16, PageOrder.KV_PACKED)
    n = max(1, (mib << 20) // src.page_bytes)
    cache = torch.randn(src.cache_shape(n + 1), device=device).to(torch.bfloat16)
    ids = torch.randperm(n + 1, device=device)[:n]
    size = n * src.page_bytes
    cases = [
        Case(
            "torch: index_select, clamp, to(float8), no digest",
            lambda: cache.index_select(0, ids).float().clamp(-448, 448).to(torch.float8_e4m3fn),
            size + size // 2,
        )
    ]
    missing = []
    for name, make in makers:
        try:
            run, touched = make(cache)
            run()
            cases.append(Case(f"{name} (conversion or writing only, no gather by layer, no digest)", run, touched))
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return cases, missing


def _vllm_convert(cache: Tensor) -> tuple[Run, int]:
    ops = importlib.import_module("vllm._custom_ops")
    target = torch.empty(cache.shape, dtype=torch.uint8, device=cache.device)
    run = partial(ops.convert_fp8, target.view(target.shape[0], -1), cache.view(cache.shape[0], -1), 1.0, "fp8")
    return run, cache.numel() * 3


def _flashinfer_append(cache: Tensor) -> tuple[Run, int]:
    flashinfer = importlib.import_module("flashinfer")
    pages, heads, tokens, _ = cache.shape
    k = torch.randn(pages * tokens, heads, 128, device=cache.device).to(torch.bfloat16)
    v = torch.randn_like(k)
    target = torch.empty(pages, 2, tokens, heads, 128, dtype=torch.bfloat16, device=cache.device)
    number = torch.arange(pages * tokens, dtype=torch.int32, device=cache.device)
    indptr = torch.tensor([0, pages], dtype=torch.int32, device=cache.device)
    last = torch.tensor([tokens], dtype=torch.int32, device=cache.device)
    index = torch.arange(pages, dtype=torch.int32, device=cache.device)
    run = partial(flashinfer.append_paged_kv_cache, k, v, torch.zeros_like(number), number, target, index, indptr, last)
    return run, 8 * k.numel()


OTHERS = (("vLLM convert_fp8", _vllm_convert), ("FlashInfer append_paged_kv_cache", _flashinfer_append))


def median_ms(case: Case, dry: bool) -> float:
    """Of a dry run one call, which says nothing of a GPU."""
    if dry:
        began = time.perf_counter()
        case.run()
        return (time.perf_counter() - began) * 1e3
    from triton.testing import do_bench

    return float(do_bench(case.run, warmup=50, rep=150, return_mode="median"))


def time_case(case: Case, options: Options) -> Row:
    """Median time, and the rate of a device copy that reads and writes as many bytes. An aim that is not met is a
    figure, not a failure."""
    a = torch.empty(max(1, case.touched // 2), dtype=torch.uint8, device=options.device)
    b = torch.empty_like(a)
    milliseconds = median_ms(case, options.dry)
    copy = median_ms(Case("copy", lambda: b.copy_(a), case.touched), options.dry)
    row: Row = {
        "case": case.name,
        "us": milliseconds * 1e3,
        "gb_s": case.touched / milliseconds / 1e6,
        "copy_gb_s": case.touched / copy / 1e6,
        "share_of_copy": copy / milliseconds,
        "aim": f">= {case.aim:.0%} of copy" if case.aim else f"< {case.aim_us} us" if case.aim_us else "",
    }
    met = row["share_of_copy"] >= case.aim if case.aim else row["us"] < case.aim_us if case.aim_us else None
    return {**row, "aim_met": None if options.dry else met}


def run(options: Options) -> Iterator[Row]:
    device, dry = torch.device(options.device), options.dry
    # Of others' work only what is torch: their packages take longer to be imported than a dry run.
    others, missing = other_cases(device, 0 if dry else 256, () if dry else OTHERS)
    yield from ({"not_here": reason} for reason in missing)
    makers: list[Callable[[], list[Case]]] = [partial(tag_cases, device, dry), partial(weight_cases, device, dry)]
    makers += [partial(page_cases, device, mib, 1 if dry else 16) for mib in ((0,) if dry else (64, 512))]
    makers.append(lambda: others)
    with dispatch.use_backend("triton"):
        for make in makers:
            for case in make():
                yield time_case(case, options)
