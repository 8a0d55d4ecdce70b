"""INT4 packing: the definition against a scalar oracle, the layout against compressed-tensors, backends bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels import dispatch, int4

BACKENDS = ["reference", "numba"]
F = np.float32


def bf16(x: Any) -> Any:
    """float32 -> the nearest BF16, ties to even, as float32."""
    bits = np.float32(x).view(np.uint32)
    return np.uint32(((int(bits) + 0x7FFF + (int(bits) >> 16 & 1)) >> 16) << 16).view(np.float32)


def oracle_group(w: Any, symmetric: bool, grid: tuple[float, ...]) -> tuple[list[int], float, int]:
    """One group, one float32 operation at a time: (codes, scale, zero point)."""
    best = None
    low, high = min(F(0), w.min()), max(F(0), w.max())
    for ratio in map(F, grid):
        if symmetric:
            s = bf16(F(np.abs(w).max() * ratio) / F(7.5))
        else:
            s = bf16(F(F(high * ratio) - F(low * ratio)) / F(15))
        if s < 2.0**-100:
            s = F(2.0**-7)
        inverse = F(1) / s
        z = 0 if symmetric else int(np.rint(np.clip(F(-8) - F(F(low * ratio) * inverse), -8, 7)))
        codes, total = [], 0
        for value in w:
            y = F(value * inverse)
            q = int(np.clip(np.rint(y) + z, -8, 7))
            codes.append(q)
            total += int(np.rint(F(np.clip(F(F(q - z) - y), -11, 11)) * F(256))) ** 2
        cost = F(F(s * s) * F(total))
        if best is None or cost < best[0]:
            best = (cost, codes, float(s), z)
    assert best is not None
    return best[1], best[2], best[3]


def weights(rows: int = 13, columns: int = 256) -> torch.Tensor:
    w = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.03).to(torch.bfloat16)
    w[1, :64] = 0
    w[2], w[3] = w[2].abs(), -w[3].abs()
    w[4, :32] *= 1e-37
    w[5, :3] = torch.tensor([1e38, -1e38, 1e-40])
    w[6, ::7] *= 30  # outliers: clipping is worth it
    return w


def fp8_weights(rows: int = 131, columns: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.int32).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes.view(torch.float8_e4m3fn), torch.rand(-(-rows // 128), 2, generator=generator) * 0.01


@pytest.mark.parametrize("grid", [(1.0,), (1.0, 0.9, 0.75, 0.5)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_definition(group: int, symmetric: bool, grid: tuple[float, ...]) -> None:
    w = weights()
    with dispatch.use_backend("reference"):
        packed, scale, zero = dispatch.pack_int4(w, group, symmetric, grid)
    values, words = w.float().numpy(), packed.numpy().view(np.uint32)
    np.seterr(over="ignore")  # the cost of weights near 1e38 is infinite, in every backend
    for row in range(w.shape[0]):
        for index in range(w.shape[1] // group):
            codes, s, z = oracle_group(values[row, index * group : (index + 1) * group], symmetric, grid)
            stored = [
                int(words[row, (index * group + i) // 8] >> 4 * (i % 8) & 15) - 8 for i in range(group)
            ]  # fmt: skip
            assert stored == codes, (row, index)
            assert float(scale[row, index]) == s
            if zero is not None:
                assert (int(zero[row // 8, index].item()) >> 4 * (row % 8) & 15) - 8 == z


@pytest.mark.parametrize("grid", [(1.0,), (1.0, 0.95, 0.9, 0.85, 0.5)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_compiled_backend_makes_the_same_bits(
    kind: str, group: int, symmetric: bool, grid: tuple[float, ...]
) -> None:
    w, scales = (weights(), None) if kind == "bf16" else fp8_weights()
    results = []
    for backend in BACKENDS:
        with dispatch.use_backend(backend):
            packed = dispatch.pack_int4(w, group, symmetric, grid, block_scale=scales)
            results.append([*packed, dispatch.unpack_int4(*packed, group)])
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None) == (symmetric and got is None)
        if got is not None and expected is not None:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_reads_it(backend: str, symmetric: bool) -> None:
    """The library that loads these checkpoints unpacks the same weight from the same tensors."""
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    w = weights(rows=21, columns=192)[:, :192]
    w[5, :3] = 0  # the library multiplies in BF16, where this group would differ by its own rounding
    with dispatch.use_backend(backend):
        packed = dispatch.pack_int4(w, 64, symmetric, (1.0, 0.9))
        ours = dispatch.unpack_int4(*packed, 64)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(
            num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=64
        ),
    )
    state = {
        "weight_packed": packed.packed,
        "weight_scale": packed.scale,
        "weight_shape": torch.tensor(w.shape),
    }
    if packed.zero_point is not None:
        state["weight_zero_point"] = packed.zero_point
    theirs = pack_quantized.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert theirs.shape == w.shape
    assert torch.equal(theirs.to(torch.bfloat16), ours)


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_within_half_a_step_and_clipping_helps(backend: str) -> None:
    w = (torch.randn(64, 1024, generator=torch.Generator().manual_seed(3)) * 0.02).to(torch.bfloat16)
    squares = []
    with dispatch.use_backend(backend):
        for grid in ((1.0,), (1.0, 0.95, 0.9, 0.85)):
            packed = dispatch.pack_int4(w, 32, False, grid)
            error = (dispatch.unpack_int4(*packed, 32).float() - w.float()).abs()
            squares.append(float(error.square().mean()))
            if grid == (1.0,):
                step = packed.scale.float().repeat_interleave(32, 1)
                assert bool((error <= step * 0.51 + w.float().abs() * 2.0**-7).all())
    assert squares[1] < squares[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_can_be_packed_in_runs(backend: str, symmetric: bool) -> None:
    w, scales = fp8_weights(rows=300)
    with dispatch.use_backend(backend):
        whole = dispatch.pack_int4(w, 64, symmetric, (1.0, 0.9), block_scale=scales)
        runs = [
            dispatch.pack_int4(w[i : i + 128], 64, symmetric, (1.0, 0.9), block_scale=scales[i // 128 :][:1])
            for i in range(0, 300, 128)
        ]
    for name in ("packed", "scale", "zero_point"):
        expected = getattr(whole, name)
        if expected is None:
            assert symmetric
        else:
            assert torch.equal(torch.cat([getattr(run, name) for run in runs]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_with_their_place(backend: str, symmetric: bool, value: float) -> None:
    w = weights()
    w[7, 70] = value
    with dispatch.use_backend(backend), pytest.raises(ValueError, match="first in row 7, group 1"):
        dispatch.pack_int4(w, 64, symmetric)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    with dispatch.use_backend(backend):
        packed = dispatch.pack_int4(torch.zeros(0, 64, dtype=torch.bfloat16), 32, False)
        assert [list(t.shape) for t in packed if t is not None] == [[0, 8], [0, 2], [0, 2]]
        assert dispatch.unpack_int4(*packed, 32).shape == (0, 64)


def test_arguments_that_do_not_fit_are_named() -> None:
    w, (f8, scales) = weights(), fp8_weights()
    for words, call in {
        "group_size is 48": lambda: dispatch.pack_int4(w, 48, True),
        "K a multiple of group_size 128": lambda: dispatch.pack_int4(w[:, :64], 128, True),
        "bfloat16 without": lambda: dispatch.pack_int4(w.float(), 32, True),
        "with block_scale": lambda: dispatch.pack_int4(f8, 32, True),
        r"must be float32 \[2, 2\]": lambda: dispatch.pack_int4(f8, 32, True, block_scale=scales[:1]),
        "clip_grid is": lambda: dispatch.pack_int4(w, 32, True, (1.0, 0.2)),
        r"clip_grid is \(\)": lambda: dispatch.pack_int4(w, 32, True, ()),
        "packed is": lambda: dispatch.unpack_int4(torch.zeros(2, 3), torch.zeros(2, 1).bfloat16(), None, 32),
        r"scale is torch.bfloat16 \[2, 1\]": lambda: dispatch.unpack_int4(
            torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 1).bfloat16(), None, 32
        ),
        "zero_point is": lambda: dispatch.unpack_int4(
            torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 2).bfloat16(), torch.zeros(2, 2).int(), 32
        ),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[no-untyped-call]
    assert int4.check_pack(w, 32, None, None) == (1.0,)
