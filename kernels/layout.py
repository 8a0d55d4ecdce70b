"""What the bytes of a KV page mean: the page layout, its fingerprint, and which pairs can be converted.

A *page* is one block of the block table over all layers: `page_tokens` tokens. A cache is one tensor a layer; the
*wire form* of a page is contiguous, `[layer][bytes of that layer's page]`, with the bytes in the destination's order.
Where layers keep different things (latent rows and the index keys of sparse attention), a page is several *regions*,
one after another in its wire form, each with layers, order and format of its own.

Orders (N = page_tokens, H = num_kv_heads, D = head_dim; every order is row-major as written):

| order | one layer's page |
|---|---|
| `kv_packed` | `[H][N][K(D) then V(D)]`; the cache tensor is the logical view `(blocks, H, N, 2D)`, any strides |
| `cpu_vec` | `[H]` of: K as `[D][N]`, then V as `[N][D]`; cache `(blocks, H, N, 2D)`, contiguous |
| `cpu_amx` | `[H]` of: K as `[N/16][D/2][16 tokens][2 dims]`, then V as `[D/16][N/2][16 dims][2 tokens]`; same cache |
| `mla` | `[N][D]`, one latent row a token (512 latent + 64 rope for DeepSeek and GLM); cache `(blocks, N, D)` |
| `fp8_ds_mla` | `[N]` rows of 656 bytes: 512 e4m3 latent, 4 float32 tile scales, 64 BF16 rope |
| `bytes` | N x D bytes without a meaning here, moved as they are (index keys: D = 132); cache `(blocks, N, D)`, uint8 |

`cpu_vec` and `cpu_amx` are what the CPU attention backend of vLLM 0.32 writes for `layer.isa` "vec" and "amx"; the
machine decides which (AMX where the CPU has it). A page means nothing to a reader of the other, so the order is part
of the layout. BF16 and FP8 pages of one order share the permutation.

This module uses the standard library only; every part of the product may import it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

DS_MLA_LATENT: Final = 512
DS_MLA_ROPE: Final = 64
DS_MLA_TILE: Final = 128
DS_MLA_ROW_BYTES: Final = 656
"""512 e4m3 bytes + 4 float32 scales + 64 BF16 values."""

E4M3_MAX: Final = 448.0
PAGE_ALIGN: Final = 16
"""A layer's page is a whole number of 16-byte words: vector loads and the digest rely on it."""

MAX_REGIONS: Final = 7
"""Further regions of a page that a peer may announce."""
NAME_HASH_DIGITS: Final = 16

_OPTIONAL: Final = ("layer_names", "further_regions")
_U64: Final = (1 << 64) - 1


class LayoutError(ValueError):
    """A layout that cannot exist, or a pair of layouts that cannot be converted."""


class PageOrder(StrEnum):
    CPU_VEC = "cpu_vec"
    CPU_AMX = "cpu_amx"
    KV_PACKED = "kv_packed"
    MLA = "mla"
    FP8_DS_MLA = "fp8_ds_mla"
    BYTES = "bytes"

    @property
    def is_latent(self) -> bool:
        """One row a token instead of K and V by head."""
        return self in (PageOrder.MLA, PageOrder.FP8_DS_MLA, PageOrder.BYTES)


class PageDtype(StrEnum):
    BF16 = "bfloat16"
    E4M3 = "float8_e4m3fn"
    UINT8 = "uint8"  # of order `bytes`, and of it alone

    @property
    def num_bytes(self) -> int:
        return 2 if self is PageDtype.BF16 else 1


class Rounding(StrEnum):
    """How a value becomes an e4m3 byte. Both saturate at +-448; all arithmetic is IEEE float32, subnormals kept.

    `nearest_even`, the GPU cache writers: y = x / scale, round to nearest, ties to even; +-inf -> +-448;
    any NaN -> 0x7F; the sign of zero is kept (0x80).

    `truncate`, vLLM's CPU cache writer: y = x * float32(1 / scale); y == +-0 -> 0x00; any NaN -> 0x7E (+448);
    +-inf -> +-448; |y| >= 2^-6: the mantissa is cut; |y| < 2^-6: y is first rounded to nearest even at 2^-29 (the
    writer multiplies by 2^-120, and that is where a float32 subnormal ends), then cut at 2^-9; a negative y that
    ends at zero is 0x80.
    """

    NEAREST_EVEN = "nearest_even"
    TRUNCATE = "truncate"


@lru_cache(maxsize=64)
def _regions(layout: PageLayout) -> tuple[PageLayout, ...]:
    return (replace(layout, further_regions=()), *layout.further_regions)


def name_hash(names: Iterable[str]) -> str:
    """Of the names of a region's layers in wire order; what stands before `layers.` is left out, since a checkpoint of
    the text model alone calls the same layers by shorter names."""
    short = [name[max(name.find("layers."), 0) :] for name in names]
    return hashlib.sha256("\n".join(short).encode()).hexdigest()[:NAME_HASH_DIGITS]


@dataclass(frozen=True, slots=True)
class SealBinding:
    """What a digest is bound to besides bytes, position and layout.

    `ticket_hash`: any unsigned 64-bit hash of the ticket id; `attempt`: 0 <= attempt < 2^32.
    """

    ticket_hash: int
    attempt: int

    def __post_init__(self) -> None:
        if not 0 <= self.ticket_hash <= _U64:
            raise ValueError(f"ticket_hash is {self.ticket_hash}, must be an unsigned 64-bit number")
        if not 0 <= self.attempt < 1 << 32:
            raise ValueError(f"attempt is {self.attempt}, must be 0 <= attempt < 2^32")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Geometry and number format of a page. `head_dim` is the latent row length for MLA orders (`num_kv_heads` = 1).

    `k_scales`, `v_scales`: what a stored e4m3 value is multiplied with to give the real one; one number, one a layer,
    or one a layer and head (`[layer][head]`). They are kept as the nearest float32 and collapsed to fewer where those
    say the same, so that equal layouts have equal fingerprints. BF16 has scales 1.0, and `rounding` says nothing there
    and is kept as `nearest_even`. MLA e4m3 uses `k_scales` for the whole row. `fp8_ds_mla` has no static scale.

    `layer_names`: hash of the layers' names in wire order (`name_hash`), "" where they have none: both sides must mean
    the same layers. `further_regions`: what else belongs to the page, each a layout without further regions.

    Raises `LayoutError` with the field, the value and what is allowed.
    """

    num_layers: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: PageDtype
    order: PageOrder
    rounding: Rounding = Rounding.NEAREST_EVEN
    k_scales: tuple[float, ...] = (1.0,)
    v_scales: tuple[float, ...] = (1.0,)
    layer_names: str = ""
    further_regions: tuple[PageLayout, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_tokens", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"{name} is {value!r}, must be a whole number >= 1")
        object.__setattr__(self, "dtype", _member(PageDtype, "dtype", self.dtype))
        object.__setattr__(self, "order", _member(PageOrder, "order", self.order))
        object.__setattr__(self, "rounding", _member(Rounding, "rounding", self.rounding))
        for name in ("k_scales", "v_scales"):
            scales = _canonical_scales(name, getattr(self, name), self.num_layers, self.num_kv_heads)
            object.__setattr__(self, name, scales)
        _check_order(self)
        _check_regions(self)
        if self.dtype is not PageDtype.E4M3:
            object.__setattr__(self, "rounding", Rounding.NEAREST_EVEN)
        if self.layer_page_bytes % PAGE_ALIGN:
            raise LayoutError(
                f"a layer's page is {self.layer_page_bytes} bytes, must be a multiple of {PAGE_ALIGN}:"
                f" {self.describe()}"
            )

    @property
    def values_per_token(self) -> int:
        """Logical values of one token in one layer, K and V together."""
        return self.head_dim if self.order.is_latent else 2 * self.num_kv_heads * self.head_dim

    @property
    def layer_page_bytes(self) -> int:
        if self.order is PageOrder.FP8_DS_MLA:
            return self.page_tokens * DS_MLA_ROW_BYTES
        return self.page_tokens * self.values_per_token * self.dtype.num_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and regions: the length of its wire form."""
        return self.num_layers * self.layer_page_bytes + sum(each.page_bytes for each in self.further_regions)

    @property
    def regions(self) -> tuple[PageLayout, ...]:
        """The page's regions in wire order, each without further ones."""
        return _regions(self) if self.further_regions else (self,)

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache tensor."""
        if self.order is PageOrder.FP8_DS_MLA:
            return (num_blocks, self.page_tokens, DS_MLA_ROW_BYTES)
        if self.order.is_latent:
            return (num_blocks, self.page_tokens, self.head_dim)
        return (num_blocks, self.num_kv_heads, self.page_tokens, 2 * self.head_dim)

    @property
    def scales_by_head(self) -> bool:
        return max(len(self.k_scales), len(self.v_scales)) > self.num_layers

    def k_scale(self, layer: int, head: int = 0) -> float:
        return self._scale(self.k_scales, layer, head)

    def v_scale(self, layer: int, head: int = 0) -> float:
        return self._scale(self.v_scales, layer, head)

    def _scale(self, scales: tuple[float, ...], layer: int, head: int) -> float:
        if len(scales) == 1:
            return scales[0]
        return scales[layer if len(scales) == self.num_layers else layer * self.num_kv_heads + head]

    def with_dtype(
        self,
        dtype: PageDtype,
        *,
        rounding: Rounding = Rounding.NEAREST_EVEN,
        k_scales: tuple[float, ...] = (1.0,),
        v_scales: tuple[float, ...] = (1.0,),
    ) -> PageLayout:
        return replace(self, dtype=dtype, rounding=rounding, k_scales=k_scales, v_scales=v_scales)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; floats are exact (float32 values). `layer_names` and `further_regions` only where it has some."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _OPTIONAL:
            if not out[name]:
                del out[name]
        if self.further_regions:
            out["further_regions"] = [each.to_dict() for each in self.further_regions]
        for name in ("dtype", "order", "rounding"):
            out[name] = str(out[name])
        for name in ("k_scales", "v_scales"):
            out[name] = list(out[name])
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PageLayout:
        """The inverse of `to_dict`. What it always has must be there and nothing else: a peer sent this."""
        if not isinstance(data, Mapping):
            raise LayoutError(f"page layout is {data!r}, must be an object")
        names = {f.name for f in fields(cls)}
        if missing := names - set(data) - set(_OPTIONAL):
            raise LayoutError(f"page layout lacks {', '.join(sorted(missing))}")
        if unknown := set(data) - names:
            raise LayoutError(f"page layout has unknown {', '.join(sorted(map(repr, unknown)))}")
        values = dict(data)
        for name in ("k_scales", "v_scales"):
            if not isinstance(values[name], list | tuple):
                raise LayoutError(f"{name} is {values[name]!r}, must be a list of numbers")
            values[name] = tuple(values[name])
        further = values.get("further_regions", ())
        if not isinstance(further, list | tuple) or len(further) > MAX_REGIONS:
            raise LayoutError(f"further_regions is {further!r}, must be a list of at most {MAX_REGIONS} layouts")
        return cls(**{**values, "further_regions": tuple(cls.from_dict(each) for each in further)})

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field; equal layouts, and only they, have equal fingerprints."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"pageferry-page-layout-1\0" + canonical.encode()).hexdigest()[:32]

    @property
    def fingerprint_u64(self) -> int:
        """The first 64 bits of the fingerprint, as digests are bound to."""
        return int(self.fingerprint[:16], 16)

    def describe(self) -> str:
        scaled = f" {self.rounding} k={_few(self.k_scales)} v={_few(self.v_scales)}"
        text = (
            f"{self.order} {self.dtype}{scaled if self.dtype is PageDtype.E4M3 else ''} layers={self.num_layers}"
            f" page_tokens={self.page_tokens} kv_heads={self.num_kv_heads} head_dim={self.head_dim}"
        )
        return " and ".join([text, *(each.describe() for each in self.further_regions)])


def check_convertible(src: PageLayout, dst: PageLayout) -> None:
    """Raise `LayoutError` (both sides in the message) unless pages of `src` can become pages of `dst`.

    Converted: order within the K|V family, page_tokens, BF16 -> e4m3 (uniform, or MLA -> fp8_ds_mla rows), and equal
    formats as they are. Refused, never guessed: another number of regions, layers or heads, layers of other names,
    another head_dim, FP8 -> BF16, FP8 -> FP8 with another scale or rounding (a second rounding), K|V against latent,
    `bytes` in pages of another size.
    """
    if len(src.further_regions) == len(dst.further_regions):
        problems = [p for one, other in zip(src.regions, dst.regions, strict=True) for p in _problems(one, other)]
    else:
        problems = [f"{len(src.regions)} regions against {len(dst.regions)}"]
    if problems:
        raise LayoutError(
            f"cannot convert pages: {'; '.join(problems)}. Source: {src.describe()}. Destination: {dst.describe()}"
        )


def _problems(src: PageLayout, dst: PageLayout) -> list[str]:
    """Of a region."""
    problems = _differing(src, dst, ("num_layers", "num_kv_heads", "head_dim", "layer_names"))
    if PageOrder.BYTES in (src.order, dst.order):
        return problems + _differing(src, dst, ("order", "page_tokens"))
    if src.order.is_latent != dst.order.is_latent:
        problems.append(f"order {src.order} against {dst.order}")
    elif src.dtype is PageDtype.E4M3:
        if dst.dtype is not PageDtype.E4M3:
            problems.append("dtype float8_e4m3fn cannot become bfloat16: what rounding took is gone")
        elif (src.order is PageOrder.FP8_DS_MLA) != (dst.order is PageOrder.FP8_DS_MLA):
            problems.append(f"order {src.order} against {dst.order}: a second rounding")
        else:
            second = _differing(src, dst, ("rounding", "k_scales", "v_scales"))
            problems += [f"{each}: a second rounding" for each in second]
    return problems


def _differing(src: PageLayout, dst: PageLayout, names: tuple[str, ...]) -> list[str]:
    pairs = ((name, getattr(src, name), getattr(dst, name)) for name in names)
    return [f"{name} {ours} against {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _member(kind: Any, name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise LayoutError(f"{name} is {value!r}, must be one of {', '.join(m.value for m in kind)}") from None


def _canonical_scales(name: str, scales: object, num_layers: int, num_heads: int) -> tuple[float, ...]:
    if not isinstance(scales, tuple) or len(scales) not in (1, num_layers, num_layers * num_heads):
        raise LayoutError(
            f"{name} is {scales!r}, must be a tuple of 1, num_layers = {num_layers} or num_layers x num_kv_heads = "
            f"{num_layers * num_heads} numbers"
        )
    out: list[float] = []
    for scale in scales:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
            raise LayoutError(f"{name} holds {scale!r}, must be finite numbers > 0")
        # Outside this range float32(1 / scale) is subnormal or infinite, and the two rounding rules stop being useful.
        if not 2.0**-120 <= scale <= 2.0**120:
            raise LayoutError(f"{name} holds {scale!r}, must be between 2^-120 and 2^120")
        out.append(struct.unpack("<f", struct.pack("<f", scale))[0])
    if len(set(out)) == 1:
        return (out[0],)
    if len(out) > num_layers and all(len(set(out[i : i + num_heads])) == 1 for i in range(0, len(out), num_heads)):
        return tuple(out[::num_heads])
    return tuple(out)


def _check_order(layout: PageLayout) -> None:
    order, dtype = layout.order, layout.dtype
    if (order is PageOrder.BYTES) != (dtype is PageDtype.UINT8):
        raise LayoutError(f"dtype is {dtype} for order {order}: bytes are uint8, and nothing else is")
    if dtype is not PageDtype.E4M3 and (layout.k_scales, layout.v_scales) != ((1.0,), (1.0,)):
        raise LayoutError(f"k_scales {layout.k_scales}, v_scales {layout.v_scales}: {dtype} pages have scale 1.0")
    if order.is_latent:
        if layout.num_kv_heads != 1:
            raise LayoutError(f"num_kv_heads is {layout.num_kv_heads}, must be 1 for order {order}")
        if layout.v_scales != (1.0,):
            raise LayoutError(
                f"v_scales is {layout.v_scales}, must be (1.0,) for order {order}: a latent row has one scale"
            )
    if order is PageOrder.CPU_AMX and (layout.page_tokens % 16 or layout.head_dim % 16):
        raise LayoutError(
            f"order {order} needs page_tokens and head_dim that are multiples of 16, not"
            f" {layout.page_tokens} and {layout.head_dim}"
        )
    if order is PageOrder.FP8_DS_MLA:
        if layout.head_dim != DS_MLA_LATENT + DS_MLA_ROPE:
            raise LayoutError(f"head_dim is {layout.head_dim}, must be 576 for order {order}")
        if dtype is not PageDtype.E4M3 or layout.rounding is not Rounding.NEAREST_EVEN or layout.k_scales != (1.0,):
            raise LayoutError(
                f"order {order} is float8_e4m3fn, nearest_even, scale 1.0 (its scales travel in the rows)"
            )


def _check_regions(layout: PageLayout) -> None:
    if not isinstance(layout.layer_names, str) or len(layout.layer_names) > NAME_HASH_DIGITS:
        raise LayoutError(f"layer_names is {layout.layer_names!r}, must be at most {NAME_HASH_DIGITS} hex digits")
    for region in layout.further_regions:
        if region.further_regions or region.page_tokens != layout.page_tokens:
            raise LayoutError(
                f"further_regions holds {region.describe()}, must be regions of {layout.page_tokens} tokens a page"
                " without further ones"
            )


def _few(scales: tuple[float, ...]) -> str:
    return f"{scales[0]:.6g}" if len(scales) == 1 else f"[{len(scales)} scales {min(scales):.6g}..{max(scales):.6g}]"
