"""What the CPU kernels are made of: raw memory, bit casts, the digest of a block, e4m3 encoders.

Compiled by numba, GIL released, one thread. The encoders are written so that LLVM turns them into vector code (their
rate shows it); the digest's block is spelled out as vector instructions, because LLVM by itself picks half the width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.digest import BLOCK_BYTES, GOLDEN, MIX_A, MIX_B, NH_KEYS

_LANES = 8


def jit(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile for this signature at import, GIL released; kept on disk where a place for it can be written.

    numba's cache watches the file of the function only: after a change of a helper here, touch the file that uses it
    (the tests give every version of the sources a cache of its own).
    """
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except RuntimeError as error:  # no writable cache folder: compile in every process
            if "cache" not in str(error):
                raise
            return numba.njit(signature, **options)(function)

    return wrap


def inline(function: Callable[..., Any]) -> Any:
    """A helper that is compiled into its callers."""
    return numba.njit(function, nogil=True, error_model="numpy", boundscheck=False)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """uint64 address -> void pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """float32 -> its bits as uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """uint32 bits -> the float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def nh_block(typingctx: Any, address: Any, keys: Any) -> Any:
    """(S1, S2) of the full block at `address`; `keys` is the address of `expanded_keys()`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        vector = ir.VectorType(word, _LANES)
        low = ir.Constant(vector, [0xFFFFFFFF] * _LANES)
        half = ir.Constant(vector, [32] * _LANES)

        def load(base: Any, offset: int) -> Any:
            place = builder.add(base, ir.Constant(word, offset))
            return builder.load(builder.inttoptr(place, vector.as_pointer()), align=8)

        def product(x: Any, h: Any, first: int, offset: int) -> Any:
            a = builder.add(x, load(args[1], first * BLOCK_BYTES + offset))
            b = builder.add(h, load(args[1], (first + 1) * BLOCK_BYTES + offset))
            return builder.mul(builder.and_(a, low), builder.and_(b, low))

        sums = [ir.Constant(vector, [0] * _LANES)] * 2
        for offset in range(0, BLOCK_BYTES, 8 * _LANES):
            x = load(args[0], offset)
            h = builder.lshr(x, half)
            sums = [builder.add(total, product(x, h, 2 * i, offset)) for i, total in enumerate(sums)]
        totals = []
        for total in sums:
            value = builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
            for lane in range(1, _LANES):
                value = builder.add(value, builder.extract_element(total, ir.Constant(ir.IntType(32), lane)))
            totals.append(value)
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


@intrinsic
def stream_lines(typingctx: Any, source: Any, target: Any, lines: Any, ahead: Any, step: Any) -> Any:
    """Copy `lines` times 64 bytes past the cache: `target` a multiple of 64, `source` of 16. Ends with a fence.

    A page that is sealed or opened is not read again by this core: written through the cache it would be fetched first
    and push out what is in use. While the lines go out, what is read next is brought in: for line i the two lines at
    ahead + i * step. A prefetch of an address that does not exist does nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, number, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        vector = ir.VectorType(word, _LANES)
        mark = builder.module.add_metadata([ir.Constant(number, 1)])
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(number, flag) for flag in (0, 2, 1)]  # a read, into the second level, data
        with cgutils.for_range(builder, args[2]) as loop:
            offset = builder.mul(loop.index, ir.Constant(word, 64))
            near = builder.add(args[3], builder.mul(loop.index, args[4]))
            for place in (near, builder.add(near, ir.Constant(word, 64))):
                builder.call(prefetch, [builder.inttoptr(place, byte), *flags])
            places = [builder.inttoptr(builder.add(base, offset), vector.as_pointer()) for base in args[:2]]
            store = builder.store(builder.load(places[0], align=16), places[1], align=64)
            store.set_metadata("nontemporal", mark)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 5), generate


def expanded_keys() -> np.ndarray:
    """uint64 [4, 128]: the four 32-bit keys of each word of a block, each in a word of its own."""
    keys = np.array(NH_KEYS, dtype=np.uint64)
    return np.ascontiguousarray(np.stack([keys[i : i + 256 : 2] for i in range(4)]))


@inline
def copy_bytes(source, target, num_bytes, stream, ahead, step):  # type: ignore[no-untyped-def]
    """num_bytes is a multiple of 8; both addresses are multiples of 16; `ahead`, `step`: see `stream_lines`."""
    done = 0
    if stream and (target & np.uint64(63)) == np.uint64(0):
        done = num_bytes // 64 * 64
        stream_lines(source, target, np.uint64(done // 64), ahead, np.uint64(step))
    left = (num_bytes - done) // 8
    src = numba.carray(pointer(source + np.uint64(done)), (left,), np.uint64)
    dst = numba.carray(pointer(target + np.uint64(done)), (left,), np.uint64)
    for i in range(left):
        dst[i] = src[i]


_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@inline
def mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_A)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_B)
    return x ^ (x >> np.uint64(31))


@inline
def layer_digest(address, num_bytes, keys, first_position, seed):  # type: ignore[no-untyped-def]
    """The sum over one layer's blocks, position counted from `first_position` (1 for the first block of a page)."""
    total = np.uint64(0)
    full = num_bytes // BLOCK_BYTES
    for block in range(full):
        s1, s2 = nh_block(address + np.uint64(block * BLOCK_BYTES), np.uint64(keys.ctypes.data))
        position = np.uint64(first_position + block) * np.uint64(GOLDEN)
        total += mix(s2 ^ mix(s1 + seed + position))
    left = (num_bytes - full * BLOCK_BYTES) // 8
    if left:
        words = numba.carray(pointer(address + np.uint64(full * BLOCK_BYTES)), (left,), np.uint64)
        s1 = np.uint64(0)
        s2 = np.uint64(0)
        for i in range(left):
            x = words[i]
            h = x >> _HALF
            s1 += ((x + keys[0, i]) & _LOW) * ((h + keys[1, i]) & _LOW)
            s2 += ((x + keys[2, i]) & _LOW) * ((h + keys[3, i]) & _LOW)
        position = np.uint64(first_position + full) * np.uint64(GOLDEN)
        total += mix(s2 ^ mix(s1 + seed + position))
    return total


_U16 = np.uint16
_U32 = np.uint32


@inline
def encode_truncate_shift(src, dst, top, edge, bias, shift):  # type: ignore[no-untyped-def]
    """BF16 bits -> e4m3, `truncate`, 1 / scale a power of two 2^k: all in 16-bit integers.

    With q = 128 k: top = 0x43E0 - q (448 / 2^k), edge = 0x3C80 - q (2^-6 / 2^k), bias = 960 - 8 k, shift = 125 - k.
    """
    for i in range(src.size):
        x = src[i]
        magnitude = _U16(x & _U16(0x7FFF))
        clamped = min(magnitude, top)
        normal = _U16(_U16(clamped >> _U16(4)) - bias)
        right = min(_U16(shift - _U16(clamped >> _U16(7))), _U16(15))
        subnormal = _U16(_U16(_U16(clamped & _U16(0x7F)) | _U16(0x80)) >> right)
        code = subnormal if clamped < edge else normal
        # Neither zero nor NaN: those lose the sign.
        sign = _U16(_U16(x >> _U16(8)) & _U16(0x80)) if _U16(magnitude - _U16(1)) < _U16(0x7F80) else _U16(0)
        dst[i] = np.uint8(_U16(code | sign))


@inline
def encode_nearest_shift(src, dst, top, edge, bias, shift):  # type: ignore[no-untyped-def]
    """BF16 bits -> e4m3, nearest even, 1 / scale a power of two: as `encode_truncate_shift`, and with its arguments."""
    for i in range(src.size):
        x = src[i]
        magnitude = _U16(x & _U16(0x7FFF))
        clamped = min(magnitude, top)
        cut = _U16(clamped >> _U16(4))
        normal = _U16(_U16(_U16(_U16(clamped + _U16(7)) + _U16(cut & _U16(1))) >> _U16(4)) - bias)
        # 5 to 15 places: at 9 and more nothing of the eight bits is left, whatever the sum.
        right = min(_U16(shift - _U16(clamped >> _U16(7))), _U16(15))
        full = _U16(_U16(clamped & _U16(0x7F)) | _U16(0x80))
        half = _U16(_U16(_U16(1) << _U16(right - _U16(1))) - _U16(1))
        subnormal = _U16(_U16(_U16(full + half) + _U16(_U16(full >> right) & _U16(1))) >> right)
        code = _U16(subnormal if clamped < edge else normal)
        code = _U16(code | _U16(_U16(x >> _U16(8)) & _U16(0x80)))
        dst[i] = np.uint8(_U16(0x7F) if magnitude > _U16(0x7F80) else code)


@inline
def truncate_one(y):  # type: ignore[no-untyped-def]
    bits = bits_of(y)
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    clamped = min(magnitude, _U32(0x43E00000))
    normal = _U32(_U32(clamped >> _U32(20)) - _U32(960))
    subnormal = _U32(_U32(bits_of(float_of(clamped) + np.float32(0.015625)) - _U32(0x3C800000)) >> _U32(20))
    code = subnormal if clamped < _U32(0x3C800000) else normal
    kept = _U32(magnitude - _U32(1)) < _U32(0x7F800000)
    sign = _U32(_U32(bits >> _U32(24)) & _U32(0x80)) if kept else _U32(0)
    return np.uint8(_U32(code | sign))


@inline
def nearest_one(y):  # type: ignore[no-untyped-def]
    bits = bits_of(y)
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    clamped = min(magnitude, _U32(0x43E00000))
    odd = _U32(_U32(clamped >> _U32(20)) & _U32(1))
    normal = _U32(_U32(_U32(_U32(clamped + _U32(0x7FFFF)) + odd) >> _U32(20)) - _U32(960))
    subnormal = _U32(bits_of(float_of(clamped) + np.float32(16384.0)) - _U32(0x46800000))
    code = subnormal if clamped < _U32(0x3C800000) else normal
    code = _U32(code | _U32(_U32(bits >> _U32(24)) & _U32(0x80)))
    return np.uint8(_U32(0x7F) if magnitude > _U32(0x7F800000) else code)


@inline
def widen(x):  # type: ignore[no-untyped-def]
    """BF16 bits -> float32."""
    return float_of(_U32(_U32(x) << _U32(16)))


@inline
def encode_truncate(src, dst, inverse):  # type: ignore[no-untyped-def]
    for i in range(src.size):
        dst[i] = truncate_one(widen(src[i]) * inverse)


@inline
def encode_nearest(src, dst, scale):  # type: ignore[no-untyped-def]
    for i in range(src.size):
        dst[i] = nearest_one(widen(src[i]) / scale)
