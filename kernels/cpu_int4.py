"""INT4 packing on the CPU: one pass over the weight, one group at a time, GIL released. Defined by `kernels.int4`."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.cpu_primitives import bits_of, float_of, inline, jit, pointer, widen
from kernels.int4 import PackedInt4, pack_rows_of_nibbles

_U32 = np.uint32
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 to nearest even
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_Q_MIN, _Q_MAX = np.float32(-8.0), np.float32(7.0)
_WORD = np.uint64


def _e4m3_table() -> np.ndarray:
    """float32 [256]: what each code stands for."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return np.ascontiguousarray(codes.view(torch.float8_e4m3fn).to(torch.float32).numpy())


_E4M3 = _e4m3_table()


@inline
def _to_bf16(x):  # type: ignore[no-untyped-def]
    """float32 -> BF16 bits (uint32), nearest even; NaN stays NaN."""
    bits = bits_of(x)
    if _U32(bits & _U32(0x7FFFFFFF)) > _U32(0x7F800000):
        return _U32(0x7FC0)
    return _U32(_U32(_U32(bits + _U32(0x7FFF)) + _U32(_U32(bits >> _U32(16)) & _U32(1))) >> _U32(16))


@inline
def _quantise(w, inverse, zero, q):  # type: ignore[no-untyped-def]
    """q[i] = code + 8 of w[i]; returns E, the sum of squared errors in 1/256 steps."""
    total = np.int32(0)  # below 2^31 by definition
    for i in range(w.size):
        y = w[i] * inverse
        near = min(max(y, np.float32(-32.0)), np.float32(32.0))
        code = min(max(((near + _ROUND) - _ROUND) + zero, _Q_MIN), _Q_MAX)
        error = min(max((code - zero) - y, np.float32(-11.0)), np.float32(11.0)) * np.float32(256.0)
        whole = np.int32((error + _ROUND) - _ROUND)
        total = np.int32(total + np.int32(whole * whole))
        q[i] = np.uint8(np.int32(code) + np.int32(8))
    return total


@inline
def _pack_group(w, symmetric, grid, q, best):  # type: ignore[no-untyped-def]
    """Quantise one group into `best` (codes + 8). Returns (BF16 bits of the scale, zero point)."""
    magnitude = _U32(0)
    low, high = _ZERO, _ZERO
    for i in range(w.size):
        magnitude = max(magnitude, _U32(bits_of(w[i]) & _U32(0x7FFFFFFF)))
    if not symmetric:
        for i in range(w.size):
            low = min(low, w[i])
            high = max(high, w[i])
    least, scale, zero = np.float32(np.inf), _U32(0x7FC0), np.int8(0)
    if magnitude >= _U32(0x7F800000):
        best[:] = np.uint8(8)
        return scale, zero  # NaN or infinity: the caller refuses a scale that is not finite
    largest = float_of(magnitude)
    for k in range(grid.size):
        r = grid[k]
        lo = low * r
        s_bits = _to_bf16((largest * r) / np.float32(7.5) if symmetric else (high * r - lo) / np.float32(15.0))
        if s_bits < _U32(0x0D80):  # below 2^-100
            s_bits = _U32(0x3C00)
        s = float_of(_U32(s_bits << _U32(16)))
        inverse = _ONE / s
        z = _ZERO
        if not symmetric:
            z = min(max(_Q_MIN - lo * inverse, _Q_MIN), _Q_MAX)
            z = (z + _ROUND) - _ROUND
        total = _quantise(w, inverse, z, q if k else best)
        cost = (s * s) * np.float32(total)
        if k == 0 or cost < least:
            least, scale, zero = cost, s_bits, np.int8(z)
            if k:
                best[:] = q
    return scale, zero


@inline
def _store_nibbles(codes, target):  # type: ignore[no-untyped-def]
    """uint8 codes 0..15, 8 to a word, into uint32 words."""
    wide = codes.view(np.uint64)
    for i in range(wide.size):
        x = wide[i]
        x = (x | (x >> _WORD(4))) & _WORD(0x00FF00FF00FF00FF)
        x = (x | (x >> _WORD(8))) & _WORD(0x0000FFFF0000FFFF)
        target[i] = np.uint32((x | (x >> _WORD(16))) & _WORD(0xFFFFFFFF))


@jit(
    "void(uint64,int64,int64,int64,int64,boolean,boolean,float32[:,::1],float32[::1],float32[::1],"
    "uint32[:,::1],uint16[:,::1],int8[:,::1])"
)
def _pack(  # type: ignore[no-untyped-def]
    weight, stride, rows, columns, group, symmetric, fp8, block_scale, table, grid, packed, scale, zeros
):
    """weight: address of BF16 bits or e4m3 codes, stride in values."""
    w = np.empty(group, dtype=np.float32)
    q = np.empty(group, dtype=np.uint8)
    best = np.empty(group, dtype=np.uint8)
    for row in range(rows):
        for index in range(columns // group):
            at = row * stride + index * group
            if fp8:
                codes = numba.carray(pointer(weight + np.uint64(at)), (group,), np.uint8)
                factor = block_scale[row // 128, index * group // 128]
                for i in range(group):
                    w[i] = table[codes[i]] * factor
            else:
                bits = numba.carray(pointer(weight + np.uint64(2 * at)), (group,), np.uint16)
                for i in range(group):
                    w[i] = widen(bits[i])
            s, z = _pack_group(w, symmetric, grid, q, best)
            scale[row, index] = np.uint16(s)
            zeros[row if not symmetric else 0, index] = z
            _store_nibbles(best, packed[row, index * group // 8 : (index + 1) * group // 8])


@jit("void(uint32[:,::1],uint16[:,::1],uint32[:,::1],boolean,int64,uint16[:,::1])")
def _unpack(packed, scale, zero_point, symmetric, group, out):  # type: ignore[no-untyped-def]
    per = group // 8
    for row in range(packed.shape[0]):
        for index in range(scale.shape[1]):
            s = widen(scale[row, index])
            z = np.int32(8)
            if not symmetric:
                nibble = _U32(zero_point[row // 8, index] >> _U32(4 * (row % 8)))
                z = np.int32(_U32(nibble & _U32(15)))
            for j in range(per):
                word = packed[row, index * per + j]
                for i in range(8):
                    code = np.int32(_U32(_U32(word >> _U32(4 * i)) & _U32(15)))
                    out[row, (index * per + j) * 8 + i] = np.uint16(_to_bf16(np.float32(code - z) * s))


def pack_int4(
    weight: Tensor, group_size: int, symmetric: bool, grid: tuple[float, ...], block_scale: Tensor | None
) -> PackedInt4:
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 8, dtype=torch.int32)
    scale = torch.empty(rows, columns // group_size, dtype=torch.bfloat16)
    zeros = torch.empty(1 if symmetric else rows, scale.shape[1], dtype=torch.int8)
    by_block = np.ones((1, 1), dtype=np.float32) if block_scale is None else block_scale.contiguous().numpy()
    if rows and columns:
        _pack(
            np.uint64(weight.data_ptr()),
            weight.stride(0),
            rows,
            columns,
            group_size,
            symmetric,
            block_scale is not None,
            by_block,
            _E4M3,
            np.array(grid, dtype=np.float32),
            packed.numpy().view(np.uint32),
            scale.view(torch.int16).numpy().view(np.uint16),
            zeros.numpy(),
        )
    return PackedInt4(packed, scale, None if symmetric else pack_rows_of_nibbles(zeros.to(torch.int32)))


def unpack_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> Tensor:
    rows, words = packed.shape
    out = torch.empty(rows, words * 8, dtype=torch.bfloat16)
    zeros = torch.zeros(1, 1, dtype=torch.int32) if zero_point is None else zero_point.contiguous()
    _unpack(
        packed.contiguous().numpy().view(np.uint32),
        scale.contiguous().view(torch.int16).numpy().view(np.uint16),
        zeros.numpy().view(np.uint32),
        zero_point is None,
        group_size,
        out.view(torch.int16).numpy().view(np.uint16),
    )
    return out
