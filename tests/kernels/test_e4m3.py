"""Every BF16 value through every encoder, against the table of e4m3 values and against vLLM's own cache writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import page_oracle as oracle
import pytest
import torch

from kernels import dispatch, reference
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding

BITS = np.arange(65536, dtype=np.uint16)
BF16 = torch.from_numpy(BITS.view(np.int16)).view(torch.bfloat16)
# Powers of two take a path of their own in the compiled backend; 230 is where 1 / scale rounds across a step.
SCALES = [1.0, 0.5, 4.0, 2.0**-12, 2.0**-64, 2.0**16, 2.0**17, 0.05, 0.013, 0.7, 3.0, 230.0, 1e-3, 1e30, 1e-30]
BACKENDS = ["reference", "numba"]


def encode_all(backend: str, scale: float, rounding: Rounding) -> np.ndarray:
    """The 65,536 codes as a backend's seal writes them, K with `scale` and V with it too."""
    src = PageLayout(1, 128, 1, 256, PageDtype.BF16, PageOrder.CPU_VEC)
    wire = src.with_dtype(PageDtype.E4M3, rounding=rounding, k_scales=(scale,), v_scales=(scale,))
    out = torch.empty(1, wire.page_bytes, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        dispatch.seal_pages([BF16.view(src.cache_shape(1))], src, wire, [0], out, SealBinding(0, 0), 0)
    return np.asarray(out.numpy()[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("scale", SCALES)
def test_all_bf16_values(backend: str, rounding: Rounding, scale: float) -> None:
    expected = oracle.encode(BITS, float(np.float32(scale)), rounding)
    got = encode_all(backend, scale, rounding)
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [(hex(i), hex(got[i]), hex(expected[i])) for i in wrong[:5]]


def test_nearest_even_agrees_with_torch_where_torch_is_defined() -> None:
    """torch's own cast is nearest even; it does not saturate, so within +-448 only."""
    inside = torch.isfinite(BF16) & (BF16.float().abs() <= 448)
    cast = BF16.float().to(torch.float8_e4m3fn).view(torch.uint8)
    ours = reference.encode_e4m3(BF16, 1.0, Rounding.NEAREST_EVEN)
    assert torch.equal(ours[inside], cast[inside])


@pytest.mark.parametrize(
    ("value", "nearest", "truncated"),
    [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x00),
        (448.0, 0x7E, 0x7E),
        (1e30, 0x7E, 0x7E),
        (float("inf"), 0x7E, 0x7E),
        (float("-inf"), 0xFE, 0xFE),
        (float("nan"), 0x7F, 0x7E),
        (-float("nan"), 0x7F, 0x7E),
        (2.0**-9, 0x01, 0x01),
        (2.0**-10, 0x00, 0x00),  # a tie, to even
        (1.5 * 2.0**-9, 0x02, 0x01),  # a tie, to even
        (-(2.0**-40), 0x80, 0x80),
        (1.0625, 0x38, 0x38),  # a tie, to even
        (1.1875, 0x3A, 0x39),  # a tie, to even
        (1.9921875, 0x40, 0x3F),
    ],
)
def test_the_documented_cases(value: float, nearest: int, truncated: int) -> None:
    x = torch.tensor([value], dtype=torch.bfloat16)
    assert reference.encode_e4m3(x, 1.0, Rounding.NEAREST_EVEN).item() == nearest
    assert reference.encode_e4m3(x, 1.0, Rounding.TRUNCATE).item() == truncated


def test_every_code_survives_a_round_trip() -> None:
    """Decoding a code and encoding it again gives the code, for both rules: conversion happens once."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert torch.equal(reference.encode_e4m3(values, 1.0, Rounding.NEAREST_EVEN), codes)
    again = reference.encode_e4m3(values, 1.0, Rounding.TRUNCATE)
    assert torch.equal(again, torch.where(codes == 0x80, 0, codes))


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_a_sealed_page_is_what_the_cpu_cache_writer_would_have_written(isa: str) -> None:
    """All 65,536 inputs, several scales, through the writer of this machine: order, rounding and scaling at once."""
    vllm_ops = pytest.importorskip("vllm._custom_ops")
    from vllm.platforms import current_platform

    from actors.engine.cpu_fp8 import Fp8Operators, is_needed

    current_platform.import_kernels()
    if is_needed():  # vLLM has no writer of FP8 pages here
        if isa == "amx":
            pytest.skip("vLLM's AMX order needs AVX-512")
        vllm_ops = Fp8Operators(vllm_ops)
    order = {"vec": PageOrder.CPU_VEC, "amx": PageOrder.CPU_AMX}[isa]
    heads, tokens, dim, blocks = 2, 128, 64, 4
    k_scales, v_scales = (1.0, 0.05, 230.0, 4.0), (1.0, 0.013, 0.7, 2.0**-12)
    src = PageLayout(4, tokens, heads, dim, PageDtype.BF16, order)
    wire = src.with_dtype(PageDtype.E4M3, rounding=Rounding.TRUNCATE, k_scales=k_scales, v_scales=v_scales)
    order_of_values = torch.randperm(65536, generator=torch.Generator().manual_seed(7))
    k = BF16[order_of_values].view(blocks * tokens, heads, dim)
    v = BF16[order_of_values.flip(0)].view(blocks * tokens, heads, dim)
    bf16 = [torch.zeros(src.cache_shape(blocks), dtype=torch.bfloat16) for _ in k_scales]
    fp8 = [torch.zeros(src.cache_shape(blocks), dtype=torch.uint8) for _ in k_scales]
    for layer, (k_scale, v_scale) in enumerate(zip(k_scales, v_scales, strict=True)):
        for cache, kind in ((bf16[layer], "auto"), (fp8[layer], "fp8")):
            halves = cache.view(blocks, heads, tokens * 2, -1).chunk(2, dim=2)
            vllm_ops.cpu_attn_reshape_and_cache(
                k, v, *halves, torch.arange(blocks * tokens), isa, k_scale=k_scale, v_scale=v_scale, kv_cache_dtype=kind
            )
    out = torch.empty(blocks, wire.page_bytes, dtype=torch.uint8)
    for backend in BACKENDS:
        out.fill_(0xAA)
        with dispatch.use_backend(backend):
            dispatch.seal_pages(bf16, src, wire, list(range(blocks)), out, SealBinding(1, 1), 0)
        by_layer = out.view(blocks, 4, -1)
        for layer in range(4):
            assert torch.equal(by_layer[:, layer], fp8[layer].view(blocks, -1)), (backend, layer)


_NARROW = """
import test_e4m3 as cases
from kernels import cpu_kernels
assert "zmm" not in next(iter(cpu_kernels.seal_straight.inspect_asm().values()))
for rounding in cases.Rounding:
    for scale in (1.0, 4.0, 0.05, 230.0, 2.0**-12):
        cases.test_all_bf16_values(backend="numba", rounding=rounding, scale=scale)
"""


@pytest.mark.soak  # compiles everything anew
def test_a_cpu_with_narrower_vectors_gives_the_same_bytes(tmp_path: Path) -> None:
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+avx,+sse4.2,+bmi2,+fma"}
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    environment = os.environ | narrow | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", _NARROW], env=environment, check=True, timeout=600)
