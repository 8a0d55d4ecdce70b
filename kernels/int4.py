"""Group quantisation of weights to INT4 in the compressed-tensors `pack-quantized` layout: definition and reference.

For a weight [N, K] and groups of G values along K (G = 32, 64 or 128):

- `packed`, int32 [N, K / 8]: nibble i (bits 4i..4i+3) of word j of a row is the value 8j + i, stored as q + 8,
  q in -8..7.
- `scale`, bfloat16 [N, K / G].
- `zero_point`, only if asymmetric, int32 [ceil(N / 8), K / G]: nibble i of row j is z + 8 of weight row 8j + i, z in
  -8..7; nibbles past N are 0. (compressed-tensors packs zero points along dimension 0.)
- The weight is (q - z) * scale, z = 0 if symmetric.

In a checkpoint these are `weight_packed`, `weight_scale`, `weight_zero_point`, beside `weight_shape` = int64 [N, K].

How q is chosen, float32 throughout, every step rounded once (no fused multiply-add). For each ratio r of the clip
grid, in order:

  symmetric:   s = bf16(max|w| r / 7.5)                         z = 0
  asymmetric:  lo = min(w, 0) r, hi = max(w, 0) r
               s = bf16((hi - lo) / 15)                         z = rne(clamp(-8 - lo / s, -8, 7))
  s = 2^-7 where that is below 2^-100 (a group of zeros);  y = w (1 / s);  q = clamp(rne(y) + z, -8, 7)

and the r with the least (s s) E is kept, the first of equals, where E = sum of rne(256 clamp(q - z - y, -11, 11))^2
over the group is a whole number below 2^31: the choice does not depend on the order of a sum, so every backend makes
the same.
The grid (1.0,) is plain rounding. 7.5 rather than 7 uses the code -8 (as compressed-tensors does).

Weights are BF16, or e4m3 with one float32 scale for each 128 x 128 block (`weight_scale_inv` of DeepSeek and GLM
checkpoints): w = float32(e4m3) * scale, used as it is, not rounded to BF16 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

GROUP_SIZES: Final = (32, 64, 128)
FP8_BLOCK: Final = 128
SCALE_OF_ZEROS: Final = 2.0**-7
SCALE_MIN: Final = 2.0**-100
CLIP_MIN: Final = 0.5


class PackedInt4(NamedTuple):
    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None


def check_pack(
    weight: Tensor, group_size: int, clip_grid: Sequence[float] | None, block_scale: Tensor | None
) -> tuple[float, ...]:
    """The clip grid as float32 numbers; ValueError for arguments that do not fit."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}, must be one of {GROUP_SIZES}")
    if weight.dim() != 2 or weight.stride(1) != 1 or weight.shape[1] % group_size:
        raise ValueError(
            f"weight is {list(weight.shape)} strides {list(weight.stride())}, must be [N, K] with contiguous rows and"
            f" K a multiple of group_size {group_size}"
        )
    if (weight.dtype is torch.float8_e4m3fn) != (block_scale is not None) or weight.dtype not in (
        torch.bfloat16,
        torch.float8_e4m3fn,
    ):
        raise ValueError(
            f"weight is {weight.dtype} {'with' if block_scale is not None else 'without'} block_scale, must be bfloat16"
            " without, or float8_e4m3fn with block_scale"
        )
    if block_scale is not None:
        wanted = [-(-size // FP8_BLOCK) for size in weight.shape]
        if block_scale.dtype is not torch.float32 or list(block_scale.shape) != wanted:
            raise ValueError(f"block_scale is {block_scale.dtype} {list(block_scale.shape)}, must be float32 {wanted}")
        if block_scale.device != weight.device:
            raise ValueError(f"block_scale is on {block_scale.device}, weight on {weight.device}")
    grid = (1.0,) if clip_grid is None else tuple(float(torch.tensor(r, dtype=torch.float32)) for r in clip_grid)
    if not grid or not all(CLIP_MIN <= r <= 1.0 for r in grid):
        raise ValueError(f"clip_grid is {clip_grid}, must be numbers from {CLIP_MIN} to 1.0")
    return grid


def check_unpack(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}, must be one of {GROUP_SIZES}")
    if packed.dtype is not torch.int32 or packed.dim() != 2 or (8 * packed.shape[1]) % group_size:
        raise ValueError(f"packed is {packed.dtype} {list(packed.shape)}, must be int32 [N, K / 8], K in whole groups")
    rows, groups = packed.shape[0], 8 * packed.shape[1] // group_size
    if scale.dtype is not torch.bfloat16 or tuple(scale.shape) != (rows, groups):
        raise ValueError(f"scale is {scale.dtype} {list(scale.shape)}, must be bfloat16 [{rows}, {groups}]")
    if zero_point is not None and (
        zero_point.dtype is not torch.int32 or tuple(zero_point.shape) != (-(-rows // 8), groups)
    ):
        raise ValueError(
            f"zero_point is {zero_point.dtype} {list(zero_point.shape)}, must be int32 [{-(-rows // 8)}, {groups}]"
        )


def check_finite(scale: Tensor) -> None:
    """A weight with NaN or infinity anywhere shows as a scale that is not finite."""
    if not bool(torch.isfinite(scale).all()):
        row, group = (~torch.isfinite(scale)).nonzero()[0].tolist()
        raise ValueError(f"weight holds NaN or infinity, or overflows BF16, first in row {row}, group {group}")


def pack_int4(
    weight: Tensor, group_size: int, symmetric: bool, grid: tuple[float, ...], block_scale: Tensor | None
) -> PackedInt4:
    """The definition above, in torch, a strip of rows at a time."""
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=weight.device)
    scale = torch.empty(rows, columns // group_size, dtype=torch.bfloat16, device=weight.device)
    zeros = torch.empty(rows, columns // group_size, dtype=torch.int32, device=weight.device)
    strip = FP8_BLOCK
    for start in range(0, rows, strip):
        part = slice(start, min(start + strip, rows))
        values = weight[part].to(torch.float32)
        if block_scale is not None:
            by_column = block_scale[start // FP8_BLOCK].repeat_interleave(FP8_BLOCK)[:columns]
            values = values * by_column
        q, scale[part], zeros[part] = _quantise(values.view(values.shape[0], -1, group_size), symmetric, grid)
        packed[part] = _pack_nibbles(q.view(values.shape[0], -1))
    return PackedInt4(packed, scale, None if symmetric else pack_rows_of_nibbles(zeros))


def pack_rows_of_nibbles(zeros: Tensor) -> Tensor:
    """Zero points int32 [N, m], each -8..7 -> int32 [ceil(N / 8), m], as compressed-tensors keeps them."""
    return _pack_nibbles(zeros.t()).t().contiguous()


def unpack_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> Tensor:
    """bfloat16 [N, K]: (q - z) * scale in float32, rounded once."""
    rows = packed.shape[0]
    q = _unpack_nibbles(packed).view(rows, scale.shape[1], group_size)
    if zero_point is not None:
        q = q - _unpack_nibbles(zero_point.t()).t()[:rows, :, None]
    values = q.to(torch.float32) * scale.to(torch.float32)[:, :, None]
    return values.view(rows, 8 * packed.shape[1]).to(torch.bfloat16)


def _quantise(w: Tensor, symmetric: bool, grid: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """w: float32 [n, groups, G] -> q int32 like w, scale bfloat16 [n, groups], zero point int32 [n, groups]."""
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for r in grid:
        if symmetric:
            s = (w.abs().amax(-1) * r) / torch.full((1,), 7.5, device=w.device)
        else:
            lo, hi = w.amin(-1).clamp_max(0.0) * r, w.amax(-1).clamp_min(0.0) * r
            s = (hi - lo) / torch.full((1,), 15.0, device=w.device)
        s = s.to(torch.bfloat16)
        s = torch.where(s < SCALE_MIN, torch.full_like(s, SCALE_OF_ZEROS), s)
        inverse = torch.ones_like(s, dtype=torch.float32) / s.to(torch.float32)
        z = torch.zeros_like(inverse) if symmetric else (-8.0 - lo * inverse).clamp(-8.0, 7.0).round()
        y = w * inverse[..., None]
        q = (y.round() + z[..., None]).clamp(-8.0, 7.0)
        error = ((q - z[..., None] - y).clamp(-11.0, 11.0) * 256.0).round().nan_to_num().to(torch.int32)
        wide = s.to(torch.float32)
        cost = (wide * wide) * (error * error).sum(-1, dtype=torch.int32).to(torch.float32)
        if best is None:
            best = (cost, q, s, z)
        else:
            better = cost < best[0]
            best = (
                torch.where(better, cost, best[0]),
                torch.where(better[..., None], q, best[1]),
                torch.where(better, s, best[2]),
                torch.where(better, z, best[3]),
            )
    assert best is not None
    _, q, s, z = best
    return q.nan_to_num().to(torch.int32), s, z.nan_to_num().to(torch.int32)


def _pack_nibbles(values: Tensor) -> Tensor:
    """int32 [n, m], each -8..7 -> int32 [n, ceil(m / 8)], missing nibbles 0."""
    n, m = values.shape
    padded = torch.zeros(n, -(-m // 8) * 8, dtype=torch.int32, device=values.device)
    padded[:, :m] = values + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    return (padded.view(n, -(-m // 8), 8) << shifts).sum(-1, dtype=torch.int32)


def _unpack_nibbles(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (((words[:, :, None] >> shifts) & 15) - 8).reshape(words.shape[0], 8 * words.shape[1])
