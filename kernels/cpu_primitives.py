"""What the CPU kernels are made of: raw memory, bit casts, the digest of a layer, e4m3 encoders of one value.

Compiled by numba, GIL released, one thread. What passes over whole lines of 64 bytes is in `kernels.cpu_lines`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu_lines import hash_blocks, hash_lines
from kernels.digest import BLOCK_BYTES, GOLDEN, MIX_A, MIX_B, NH_KEYS

PREFETCH_BYTES = 4096
"""How far before its use a line is brought in: the hardware does not look past the end of a 4 KiB page."""


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


def expanded_keys() -> np.ndarray:
    """uint64 [4, 128]: the four 32-bit keys of each word of a block, each in a word of its own."""
    keys = np.array(NH_KEYS, dtype=np.uint64)
    return np.ascontiguousarray(np.stack([keys[i : i + 256 : 2] for i in range(4)]))


_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@inline
def mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_A)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_B)
    return x ^ (x >> np.uint64(31))


@inline
def seed_of(base, ordinal):  # type: ignore[no-untyped-def]
    return mix((base ^ np.uint64(ordinal)) + np.uint64(GOLDEN))


@inline
def layer_digest(address, num_bytes, keys, first_position, seed):  # type: ignore[no-untyped-def]
    """The sum over one layer's blocks, position counted from `first_position` (1 for the first block of a page)."""
    key, zero, one = np.uint64(keys.ctypes.data), np.uint64(0), np.float32(1)
    # Whole lines, then, if there is a last block with an odd end, that block.
    full = num_bytes if num_bytes % 64 == 0 else num_bytes // BLOCK_BYTES * BLOCK_BYTES
    ahead = address + np.uint64(PREFETCH_BYTES)
    position = np.uint64(first_position)
    total = hash_blocks(address, address, key, np.uint64(full // 64), ahead, position, seed, zero, zero, one)
    if full < num_bytes:
        start = address + np.uint64(full)
        size = num_bytes - full
        s1, s2 = hash_lines(start, start, key, np.uint64(size // 64), start, zero, zero, one)
        words = numba.carray(pointer(start), (size // 8,), np.uint64)
        for i in range(size // 64 * 8, size // 8):
            x = words[i]
            h = x >> _HALF
            s1 += ((x + keys[0, i]) & _LOW) * ((h + keys[1, i]) & _LOW)
            s2 += ((x + keys[2, i]) & _LOW) * ((h + keys[3, i]) & _LOW)
        total += block_hash(s1, s2, position + np.uint64(full // BLOCK_BYTES), seed)
    return total


@inline
def block_hash(s1, s2, position, seed):  # type: ignore[no-untyped-def]
    return mix(s2 ^ mix(s1 + seed + position * np.uint64(GOLDEN)))


_U32 = np.uint32


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
