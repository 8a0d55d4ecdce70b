"""The finaliser of `kernels.digest` on tensors."""

from __future__ import annotations

from torch import Tensor

from kernels.digest import MIX_A, MIX_B, to_signed


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 bit patterns."""
    x = (x ^ _shift_right(x, 30)) * to_signed(MIX_A)
    x = (x ^ _shift_right(x, 27)) * to_signed(MIX_B)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
