"""The Triton kernels against the torch reference, byte for byte. Needs torch and triton only.

    python -m ops.kernels.checks            on a GPU
    TRITON_INTERPRET=1 python -m ops.kernels.checks --device cpu --small

Each `check_*` function raises AssertionError with what differs. The same functions run under pytest (tests/gpu), in the
interpreter (tests/kernels) and before any GPU figure is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import dispatch, reference
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding

BINDING = SealBinding((1 << 63) + 12345, 3)
E4M3, BF16 = PageDtype.E4M3, PageDtype.BF16


@dataclass(frozen=True)
class Bench:
    """Where to run and how big; `small` is for the interpreter."""

    device: torch.device
    small: bool


def random_caches(layout: PageLayout, blocks: int, seed: int, device: torch.device) -> list[Tensor]:
    """Any bit pattern, NaN and infinities included; the layers of all regions."""
    if layout.further_regions:
        regions = enumerate(layout.regions)
        return [each for i, region in regions for each in random_caches(region, blocks, seed + 100 * i, device)]
    generator = torch.Generator().manual_seed(seed)
    shape = layout.cache_shape(blocks)
    if layout.dtype is BF16:
        draws = (
            torch.randint(0, 65536, shape, generator=generator, dtype=torch.int32) for _ in range(layout.num_layers)
        )
        return [each.to(torch.int16).view(torch.bfloat16).to(device) for each in draws]
    draws = (torch.randint(0, 256, shape, generator=generator, dtype=torch.int32) for _ in range(layout.num_layers))
    return [each.to(torch.uint8).to(device) for each in draws]


def same(what: str, got: Tensor, expected: Tensor) -> None:
    """Bit equality of two tensors of the same dtype."""
    got, expected = got.cpu().contiguous(), expected.cpu().contiguous()
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{what}: {got.shape} {got.dtype}"
    a, b = (each.view(torch.uint8) if each.dtype is not torch.bool else each for each in (got, expected))
    wrong = (a != b).nonzero()
    assert len(wrong) == 0, f"{what}: {len(wrong)} bytes differ, first at {wrong[0].tolist()}"


def round_trip(
    bench: Bench,
    src: PageLayout,
    wire: PageLayout,
    dst: PageLayout,
    src_ids: list[int],
    n: int,
    dst_ids: list[int],
    blocks: int = 9,
) -> None:
    """Seal and open by both backends on the same bits; the last page but one is damaged before it is opened."""
    name = f"{src.describe()} -> {wire.describe()}"
    caches = random_caches(src, blocks, 0, bench.device)
    results = {}
    for backend in ("reference", "triton"):
        out = torch.full((n, wire.page_bytes), 0xAA, dtype=torch.uint8, device=bench.device)
        target = random_caches(dst, blocks, 1, bench.device)
        with dispatch.use_backend(backend):
            digests = dispatch.seal_pages(caches, src, wire, src_ids, out, BINDING, 7)
            again = dispatch.page_digests(out, wire, BINDING, 7)
            damaged = out.clone()
            damaged[-1 if n == 1 else -2, wire.page_bytes // 2] ^= 1
            good = dispatch.open_pages(damaged, wire, digests, target, dst, dst_ids, BINDING, 7)
        results[backend] = [out, digests, again, good, *target]
    labels = ["wire bytes", "digests of seal", "digests of pages", "verdicts"]
    for i, (got, expected) in enumerate(zip(results["triton"], results["reference"], strict=True)):
        same(f"{name}: {labels[i] if i < 4 else f'cache {i - 4}'}", got, expected)
    assert results["triton"][3].tolist().count(False) == 1


def check_all_bf16_values(bench: Bench) -> None:
    """All 65,536 inputs, both rules, scales that divide exactly and that do not."""
    src = PageLayout(1, 128, 1, 256, BF16, PageOrder.KV_PACKED)
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    cache = bits.view(src.cache_shape(1)).to(bench.device)
    scales = (
        [1.0, 0.05, 230.0] if bench.small else [1.0, 0.5, 4.0, 2.0**-64, 2.0**17, 0.05, 0.7, 3.0, 230.0, 1e30, 1e-30]
    )
    for rounding in Rounding:
        for scale in scales:
            wire = src.with_dtype(E4M3, rounding=rounding, k_scales=(scale,), v_scales=(scale,))
            got = torch.empty(1, wire.page_bytes, dtype=torch.uint8, device=bench.device)
            with dispatch.use_backend("triton"):
                dispatch.seal_pages([cache], src, wire, [0], got, BINDING, 0)
            expected = reference.encode_e4m3(bits, wire.k_scale(0), rounding)
            same(f"{rounding} scale {scale}", got.view(-1), expected)


def check_gqa(bench: Bench) -> None:
    kv = PageLayout(2, 16, 3, 32, BF16, PageOrder.KV_PACKED)
    for wire in (
        kv,
        kv.with_dtype(E4M3),
        kv.with_dtype(E4M3, k_scales=(0.05, 2.0), v_scales=(1.0, 0.3)),
        kv.with_dtype(E4M3, rounding=Rounding.TRUNCATE, k_scales=(0.05, 2.0), v_scales=(1.0, 0.3)),
    ):
        round_trip(bench, kv, wire, wire, [4, 0, 8], 3, [7, 2, 5])
    fp8 = kv.with_dtype(E4M3)
    round_trip(bench, fp8, fp8, fp8, [4, 0], 2, [7, 2])
    if not bench.small:
        for page_tokens, heads, dim in ((16, 1, 128), (64, 8, 128), (128, 3, 64), (32, 5, 80), (16, 2, 256)):
            src = PageLayout(3, page_tokens, heads, dim, BF16, PageOrder.KV_PACKED)
            wire = src.with_dtype(E4M3, k_scales=(0.3,), v_scales=(2.0,))
            round_trip(bench, src, wire, wire, [4, 0, 8, 1, 7], 5, [7, 2, 5, 0, 1])


def check_page_sizes(bench: Bench) -> None:
    kv = PageLayout(2, 16, 4, 16, BF16, PageOrder.KV_PACKED)
    cases = [(16, 32, 64, 2, 3), (32, 16, 48, 1, 2), (48, 32, 16, 4, 2), (64, 16, 64, 2, 1)]
    for src_tokens, wire_tokens, dst_tokens, heads, num_src in cases:
        src = replace(kv, page_tokens=src_tokens, num_kv_heads=heads)
        wire = replace(src, page_tokens=wire_tokens).with_dtype(E4M3, k_scales=(0.25,))
        dst = replace(wire, page_tokens=dst_tokens)
        n = -(-num_src * src_tokens // wire_tokens)
        num_dst = -(-n * wire_tokens // dst_tokens)
        ids = [8, 3, 5, 0, 7, 1, 2, 4]
        round_trip(bench, src, wire, dst, ids[:num_src], n, ids[:num_dst])


def check_mla(bench: Bench) -> None:
    layers, tokens = (2, 4) if bench.small else (3, 64)
    mla = PageLayout(layers, tokens, 1, 576, BF16, PageOrder.MLA)
    rows = PageLayout(layers, tokens, 1, 576, E4M3, PageOrder.FP8_DS_MLA)
    scales = (0.1, 3.0, 1.0)[:layers]
    for wire in (mla, mla.with_dtype(E4M3), mla.with_dtype(E4M3, k_scales=scales), rows):
        round_trip(bench, mla, wire, wire, [4, 0], 2, [7, 2])
    round_trip(bench, rows, rows, rows, [4, 0], 2, [7, 2])
    wide = replace(rows, page_tokens=4 * tokens)
    round_trip(bench, mla, wide, wide, [4, 0, 1], 1, [7])


def check_regions(bench: Bench) -> None:
    """Latent rows that are converted, with index keys that are copied, in the FP8 forms of both kinds of GPU; scales
    by head."""
    layers, tokens = (2, 4) if bench.small else (3, 64)
    index = PageLayout(1, tokens, 1, 132, PageDtype.UINT8, PageOrder.BYTES)
    mla = PageLayout(layers, tokens, 1, 576, BF16, PageOrder.MLA, further_regions=(index,))
    rows = replace(mla, dtype=E4M3, order=PageOrder.FP8_DS_MLA)
    for wire in (mla, mla.with_dtype(E4M3), rows):
        round_trip(bench, mla, wire, wire, [4, 0], 2, [7, 2])
    round_trip(bench, rows, rows, rows, [4, 0], 2, [7, 2])
    kv = PageLayout(2, 16, 3, 32, BF16, PageOrder.KV_PACKED)
    by_head = kv.with_dtype(E4M3, k_scales=(0.05, 2.0, 1.0, 0.3, 0.7, 4.0), v_scales=(0.5,))
    round_trip(bench, kv, by_head, by_head, [4, 0, 8], 3, [7, 2, 5])


def check_strides(bench: Bench) -> None:
    """Token-major storage seen as (blocks, heads, tokens, 2D), layers side by side in a block."""
    src = PageLayout(2, 16, 2, 16, BF16, PageOrder.KV_PACKED)
    flat = random_caches(replace(src, num_layers=1, num_kv_heads=4), 5, 3, bench.device)[0].reshape(5, 2, 16, 2, 32)
    caches = [flat[:, layer].permute(0, 2, 1, 3) for layer in range(2)]
    wire = src.with_dtype(E4M3)
    outputs = []
    for backend in ("reference", "triton"):
        out = torch.empty(2, wire.page_bytes, dtype=torch.uint8, device=bench.device)
        memory = torch.zeros(5, 2, 16, 2, 32, dtype=torch.uint8, device=bench.device)
        targets = [memory[:, layer].view(torch.float8_e4m3fn).permute(0, 2, 1, 3) for layer in range(2)]
        with dispatch.use_backend(backend):
            digests = dispatch.seal_pages(caches, src, wire, [4, 1], out, BINDING, 0)
            assert dispatch.open_pages(out, wire, digests, targets, wire, [0, 3], BINDING, 0).all()
        outputs.append((out, digests, memory))
    for name, got, expected in zip(("wire", "digests", "cache"), outputs[1], outputs[0], strict=True):
        same(name, got, expected)


def check_far_blocks(bench: Bench) -> None:
    """Blocks 2^31 elements apart: offsets need 64 bits."""
    if bench.device.type == "cuda" and torch.cuda.mem_get_info(bench.device)[0] < (10 << 30):
        return
    src = PageLayout(1, 16, 1, 16, BF16, PageOrder.KV_PACKED)
    stride = (1 << 31) + 64
    storage = torch.empty(2 * stride, dtype=torch.bfloat16, device=bench.device)
    cache = torch.as_strided(storage, src.cache_shape(2), (stride, 512, 32, 1))
    cache[1] = torch.arange(512, dtype=torch.float32, device=bench.device).view(1, 16, 32)
    wire = src.with_dtype(E4M3)
    out = torch.empty(1, wire.page_bytes, dtype=torch.uint8, device=bench.device)
    with dispatch.use_backend("triton"):
        dispatch.seal_pages([cache], src, wire, [1], out, BINDING, 0)
    same("far block", out.view(-1), reference.encode_e4m3(cache[1].cpu().reshape(-1), 1.0, Rounding.NEAREST_EVEN))


def check_ids_on_the_device_are_bounded(bench: Bench) -> None:
    """Ids that the host has not seen: a page that cannot be read cannot be opened; nothing outside is written."""
    if bench.device.type != "cuda":
        return  # host ids are refused before the kernel
    src = PageLayout(1, 16, 1, 32, E4M3, PageOrder.KV_PACKED)
    caches = random_caches(src, 4, 0, bench.device)
    out = torch.empty(3, src.page_bytes, dtype=torch.uint8, device=bench.device)
    ids = torch.tensor([1, 4, -1], device=bench.device)
    digests = dispatch.seal_pages(caches, src, src, ids, out, BINDING, 0)
    assert (digests == dispatch.page_digests(out, src, BINDING, 0)).tolist() == [True, False, False]
    ids = torch.tensor([0, 1, 2], device=bench.device)
    digests = dispatch.seal_pages(caches, src, src, ids, out, BINDING, 0)
    targets = random_caches(src, 4, 1, bench.device)
    bad_ids = torch.tensor([3, 4, 1 << 40], device=bench.device)
    assert dispatch.open_pages(out, src, digests, targets, src, bad_ids, BINDING, 0).tolist() == [True, False, False]


def check_tags(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [(5, 300), (3, 1)] if bench.small else [(64, 8192), (256, 2048), (1, 1), (3, 5000)]
    for rows, columns in shapes:
        pages = rows * columns + 7
        tags = torch.randint(-(2**62), 2**62, (pages,), generator=generator)
        table = torch.randperm(pages, generator=generator)[: rows * columns].view(rows, columns).to(torch.int32)
        slots = torch.randperm(rows + 2, generator=generator)[:rows].to(torch.int32)
        expected = torch.zeros(rows + 2, columns, dtype=torch.int64)
        expected[slots.long()] = tags[table.long()]
        lengths = torch.randint(0, 16 * columns + 1, (rows,), generator=generator, dtype=torch.int32)
        lengths[-1] = 16 * columns
        table[-1, columns // 2] = -3
        expected[slots[0], -1] += 1 << 33
        query_start = torch.arange(0, 3 * rows + 1, 3, dtype=torch.int32)
        outcomes = []
        for backend in ("reference", "triton"):
            answer, mapping = torch.empty(2, rows, dtype=torch.int32), torch.arange(3 * rows + 5)
            tensors = (tags, table.clone(), lengths, expected, slots, query_start, mapping, answer)
            known, masked, used, wanted, places, starts, mapping, answer = (t.to(bench.device) for t in tensors)
            with dispatch.use_backend(backend):
                dispatch.check_tags(known, masked, used, 16, wanted, places, starts, mapping, answer)
            outcomes.append((masked, mapping, answer))
        for name, one, other in zip(("masked tables", "masked slots", "answers"), *outcomes, strict=True):
            same(name, other, one)
        assert int(outcomes[1][2][0, -1]) == columns // 2 and not outcomes[1][0][-1].any()


def check_int4(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, columns = (19, 256) if bench.small else (515, 1152)
    weight = (torch.randn(rows, columns, generator=generator) * 0.03).to(torch.bfloat16)
    weight[3, :64] = 0
    weight[4], weight[5] = weight[4].abs(), -weight[5].abs()
    weight[6, :128] *= 1e-37
    weight[7, :2] = torch.tensor([1e38, 1e-40])
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.int32).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 0.01
    inputs = ((weight, None), (codes.view(torch.float8_e4m3fn), scales))
    for group in (32, 64, 128):
        for symmetric in (True, False):
            for grid in ((1.0, 0.9, 0.5),) if bench.small else ((1.0,), (1.0, 0.9, 0.8, 0.5)):
                for values, by_block in inputs:
                    outcomes = []
                    for backend in ("reference", "triton"):
                        block_scale = None if by_block is None else by_block.to(bench.device)
                        with dispatch.use_backend(backend):
                            packed = dispatch.pack_int4(
                                values.to(bench.device), group, symmetric, grid, block_scale=block_scale
                            )
                            outcomes.append([*packed, dispatch.unpack_int4(*packed, group)])
                    for name, got, expected in zip(
                        ("packed", "scale", "zero", "weight"), *reversed(outcomes), strict=True
                    ):
                        assert (got is None) == (expected is None)
                        if got is not None and expected is not None:
                            same(f"{name} g{group} symmetric={symmetric} {grid}", got, expected)


CHECKS: dict[str, Callable[[Bench], None]] = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}


def run_all(bench: Bench, only: str = "") -> int:
    """Run every check, print one line each, return the number that failed."""
    failed = 0
    for name, check in CHECKS.items():
        if only not in name:
            continue
        start = time.perf_counter()
        try:
            check(bench)
            verdict = "ok"
        except AssertionError as error:
            verdict, failed = f"FAILED: {error}", failed + 1
        print(f"check {name}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    return failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.kernels.checks", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, for the interpreter")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    args = parser.parse_args(argv)
    return 1 if run_all(Bench(torch.device(args.device), args.small), args.only) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
