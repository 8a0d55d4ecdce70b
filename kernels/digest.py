"""The page digest: 64 bits over every wire byte, its position, and what the page was sealed for.

Definition. All arithmetic is modulo 2^64; `mix` is the splitmix64 finaliser; G = 0x9E3779B97F4A7C15.

1. `seed` of a page: s = 0, then s = mix((s ^ v) + G) for v in layout fingerprint (64 bits), ticket hash, attempt,
   ordinal.
2. Each layer's page is cut into blocks of 1,024 bytes (the last one of a layer may be shorter), numbered
   p = layer * blocks_per_layer + block. A block is little-endian 64-bit words w_j = lo_j + 2^32 hi_j, and with the
   fixed 32-bit keys k_i (sums of a word and a key are modulo 2^32):
     S1 = sum_j (lo_j + k_2j)   * (hi_j + k_2j+1)
     S2 = sum_j (lo_j + k_2j+2) * (hi_j + k_2j+3)
3. digest = mix(seed ^ sum over blocks of mix(S2 ^ mix(S1 + seed + (p + 1) G))).
4. A page of several regions has such a digest d for each, with the whole page's fingerprint in the seed and p counted
   anew; its own is the last s of s = 0, then s = mix((s ^ d) + G) for d of each region in order.

S1, S2 are NH with Toeplitz keys (Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and secure message
authentication", CRYPTO 1999, theorem 1 and its Toeplitz form): two different blocks have equal (S1, S2) for at most
2^-64 of all keys. A pair of different pages therefore has the same digest with a probability of at most 2^-64 over
the keys, plus 2^-64 for the mixing of 128 bits to 64 (taken as a random function). Blocks enter the sum with their
number, so moved, swapped and permuted bytes are different pages; two seeds that differ in one field are never equal
(every step of 1. is a bijection), and with several fields different they are with 2^-64.

What it is not: a MAC. The keys are public constants, so an attacker can compute a collision. It finds wrong,
stale, torn, moved and permuted bytes, not forgeries; a connection that an attacker can write to needs TLS.

One pass, no order between blocks, 32 x 32 -> 64 bit products only: the same bits from torch, numba and Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kernels.layout import PageLayout, SealBinding

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_A: Final = 0xBF58476D1CE4E5B9
MIX_B: Final = 0x94D049BB133111EB
BLOCK_BYTES: Final = 1024
BLOCK_WORDS: Final = BLOCK_BYTES // 8
_MASK: Final = (1 << 64) - 1


def mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014); a bijection of 64-bit numbers."""
    x = ((x ^ (x >> 30)) * MIX_A) & _MASK
    x = ((x ^ (x >> 27)) * MIX_B) & _MASK
    return x ^ (x >> 31)


def _make_keys() -> tuple[int, ...]:
    """2 * BLOCK_WORDS + 2 keys: the halves of the splitmix64 sequence from state 0."""
    keys: list[int] = []
    for i in range(BLOCK_WORDS + 1):
        word = mix(((i + 1) * GOLDEN) & _MASK)
        keys += [word & 0xFFFFFFFF, word >> 32]
    return tuple(keys)


NH_KEYS: Final = _make_keys()


def blocks_per_layer(layout: PageLayout) -> int:
    return -(-layout.layer_page_bytes // BLOCK_BYTES)


@lru_cache(maxsize=256)
def _fingerprint(layout: PageLayout) -> int:
    return layout.fingerprint_u64


def base_seed(wire: PageLayout, binding: SealBinding) -> int:
    """The seed of step 1 before the ordinal; the same for all pages of a ticket's attempt."""
    seed = 0
    for value in (_fingerprint(wire), binding.ticket_hash, binding.attempt):
        seed = mix(((seed ^ value) + GOLDEN) & _MASK)
    return seed


def to_signed(value: int) -> int:
    """Unsigned 64 bits as the int64 of the same bits, as torch keeps digests."""
    return value - (1 << 64) if value >> 63 else value


def to_unsigned(value: int) -> int:
    return value & _MASK
