"""Bytes of a few rows to INT4 and back: the one place that knows the packing kernels' calls and torch's types."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kernels.dispatch import pack_int4
from kernels.int4 import FP8_BLOCK, PackedInt4
from ops.compress.tensorfile import Bytes

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}
CODES = 16
CODE_ROWS = 16  # codes are counted in one row of so many: a picture needs no more
# Resident bytes that one weight in work costs at the peak (8.0 measured, of a copied 8-byte tensor; INT4 takes 2.6).
WORKING_BYTES_PER_WEIGHT = 10


class Rows(NamedTuple):
    """Some rows of a weight as the kernel takes them: bfloat16 [rows, columns] and None, or float8_e4m3fn with the
    float32 scales of the 128 x 128 blocks these rows begin and cover."""

    values: torch.Tensor
    block_scale: torch.Tensor | None


class RowErrors(NamedTuple):
    """Float64 sums over each row of (w - w')^2 and of w^2, the largest |w - w'|, how often each code occurs."""

    squared: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]
    largest: float
    codes: npt.NDArray[np.int64]


def as_tensor(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes seen as a tensor, no copy."""
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).view(shape)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous tensor seen as bytes, no copy."""
    flat: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def plain_rows(values: torch.Tensor) -> Rows:
    """Float rows for the kernel. F16 and F32 are rounded to BF16 first: far below what INT4 rounds away."""
    return Rows(values.to(torch.bfloat16), None)


def dequantise(rows: Rows) -> torch.Tensor:
    """float32 [rows, columns]: FP8 codes times the scale of their block, BF16 as it is."""
    values = rows.values.float()
    if rows.block_scale is None:
        return values
    wide = rows.block_scale.repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[1]]
    for index in range(wide.shape[0]):
        values[index * FP8_BLOCK : (index + 1) * FP8_BLOCK] *= wide[index]
    return values


def pack_rows(rows: Rows, group_size: int, symmetric: bool, clip_grid: tuple[float, ...]) -> PackedInt4:
    """Groups are independent, so any split by rows gives the same bytes. ValueError for NaN and infinity."""
    return pack_int4(rows.values, group_size, symmetric, clip_grid, block_scale=rows.block_scale)


@functools.cache
def _e4m3_values() -> npt.NDArray[np.float32]:
    table: npt.NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return table


@njit(cache=True)
def _read_row(raw: Any, table: Any, block_scale: Any, row: int, bits: Any, values: Any) -> None:
    """One row of stored codes (uint16: bfloat16, uint8: e4m3) as float32 in `values`; `bits` is its uint32 view."""
    if block_scale.shape[0] == 0:
        for column in range(raw.shape[1]):
            bits[column] = np.uint32(raw[row, column]) << np.uint32(16)
    else:
        for column in range(raw.shape[1]):
            values[column] = table[raw[row, column] & 255] * block_scale[row // 128, column // 128]


@njit(cache=True)
def _row_errors(
    raw: Any, table: Any, block_scale: Any, packed: Any, scale: Any, zero: Any, group_size: int,
    squared: Any, energy: Any, codes: Any,
) -> float:  # fmt: skip
    largest = np.float32(0.0)
    bits = np.empty(raw.shape[1], np.uint32)
    values = bits.view(np.float32)
    err, ene = np.empty(8), np.empty(8)
    words_per_group = group_size // 8
    for row in range(packed.shape[0]):
        _read_row(raw, table, block_scale, row, bits, values)
        err[:], ene[:] = 0.0, 0.0
        for group in range(scale.shape[1]):
            step = scale[row, group]
            offset = 8
            if zero.shape[0] > 0:
                offset = (zero[row // 8, group] >> (4 * (row % 8))) & 15
            for word in range(group * words_per_group, (group + 1) * words_per_group):
                word_bits = packed[row, word]
                for lane in range(8):
                    value = values[word * 8 + lane]
                    diff = value - np.float32(((word_bits >> (4 * lane)) & 15) - offset) * step
                    err[lane] += np.float64(diff) * np.float64(diff)
                    ene[lane] += np.float64(value) * np.float64(value)
                    largest = max(largest, abs(diff))
        squared[row], energy[row] = err.sum(), ene.sum()
        if row % 16 == 0:
            for word in range(packed.shape[1]):
                for lane in range(8):
                    codes[(packed[row, word] >> (4 * lane)) & 15] += 1
    return float(largest)


def row_errors(rows: Rows, packed: PackedInt4, group_size: int) -> RowErrors:
    """How far the packed rows are from the stored ones. Decodes both by itself, so it also checks the kernel; sums run
    row by row in one order, so that the figures depend neither on threads nor on how the rows were cut."""
    count = rows.values.shape[0]
    squared, energy, codes = np.zeros(count), np.zeros(count), np.zeros(CODES, np.int64)
    code_type = torch.uint16 if rows.block_scale is None else torch.uint8
    no_scale = np.empty((0, 0), np.float32)
    largest = _row_errors(
        rows.values.view(code_type).numpy(),
        _e4m3_values(),
        no_scale if rows.block_scale is None else rows.block_scale.numpy(),
        packed.packed.numpy(),
        packed.scale.float().numpy(),
        np.empty((0, 0), np.int32) if packed.zero_point is None else packed.zero_point.numpy(),
        group_size, squared, energy, codes,
    )  # fmt: skip
    return RowErrors(squared, energy, largest, codes)
