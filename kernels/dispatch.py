"""The one place where an operator is called: arguments are checked here, then the device's backend does the work.

    seal_pages     cache pages -> wire pages and their digests
    open_pages     wire pages -> cache pages, those with the right digest only
    write_pages    wire pages -> cache pages, unverified
    page_digests   the digests of wire pages
    check_tags     page_tags[block table] against what the requests expect; stops the rows that are wrong
    prepare_check  the same over buffers that stay, for every step (CPU)
    pack_int4      weights -> compressed-tensors INT4 (see `kernels.int4`)
    unpack_int4    and back

Backends: `triton` for CUDA tensors; for CPU tensors `numba` where numba is installed, else `reference` (plain torch,
the definition). Resolved once a device type; `use_backend` overrides it, for tests and comparisons. All of them give
the same bytes. The CPU kernels and torch release the GIL while they work, and use one thread unless `set_threads`
gave them more.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from kernels import arguments, int4, regions
from kernels.arguments import BlockIds, Digests, PageCaches
from kernels.layout import LayoutError, PageLayout, SealBinding, check_convertible
from kernels.regions import PageBackend, WeightBackend

__all__ = [
    "SealBinding",
    "backend_name",
    "check_tags",
    "digests_to_ints",
    "open_pages",
    "pack_int4",
    "page_digests",
    "prepare_check",
    "seal_pages",
    "set_threads",
    "unpack_int4",
    "use_backend",
    "warm_up",
    "write_pages",
]


MODULES = {"reference": "kernels.reference", "numba": "kernels.cpu_numba", "triton": "kernels.triton_backend"}
WEIGHT_MODULES = {"reference": "kernels.int4", "numba": "kernels.cpu_int4", "triton": "kernels.triton_backend"}


_forced: str | None = None


@lru_cache(maxsize=4)
def _default(device_type: str) -> str:
    if device_type == "cuda":
        return "triton"
    return "numba" if importlib.util.find_spec("numba") else "reference"


@lru_cache(maxsize=8)
def _load(name: str) -> PageBackend:
    if name not in MODULES:
        raise ValueError(f"no kernel backend {name!r}; there are {', '.join(MODULES)}")
    return cast(PageBackend, importlib.import_module(MODULES[name]))


@lru_cache(maxsize=8)
def _load_weights(name: str) -> WeightBackend:
    return cast(WeightBackend, importlib.import_module(WEIGHT_MODULES[name]))


def backend_name(device: torch.device | str = "cpu") -> str:
    """The backend that works on this device now."""
    return _forced or _default(torch.device(device).type)


def warm_up(device: torch.device | str = "cpu") -> str:
    """Load (on the CPU: compile, or read from numba's cache) the backend of this device now, not in the first step.

    Seconds the first time on a machine, tenths of a second afterwards. Returns the backend's name.
    """
    name = backend_name(device)
    _load(name)
    return name


def set_threads(count: int) -> None:
    """How many threads an operator on CPU pages may use, the caller's own among them; 1 at first."""
    if _default("cpu") == "numba":
        importlib.import_module(MODULES["numba"]).set_threads(count)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend by name inside the block, whatever the device; process-wide, for tests and benchmarks."""
    global _forced
    _load(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


_check_pair = lru_cache(maxsize=256)(check_convertible)


def seal_pages(
    caches: Sequence[Tensor],
    src: PageLayout,
    wire: PageLayout,
    block_ids: BlockIds,
    out: Tensor,
    binding: SealBinding,
    first_ordinal: int,
) -> Tensor:
    """Gather cache pages into wire pages in the destination's format and return their digests, in one pass.

    caches: one tensor a layer, shaped `src.cache_shape(blocks)`; BF16 as torch.bfloat16, FP8 as uint8 or float8_e4m3fn.
    block_ids: the source blocks in token order (int32/int64 tensor or numbers).
    out: uint8 [n, wire.page_bytes], rows contiguous; written fully. It may view shared memory (`torch.frombuffer`).
      With caches on a GPU it may be host memory (pinned is faster), and the call then waits for the copy.
      n * wire.page_tokens must reach into the last source block; tokens past the source's end become zero bytes.
    binding, first_ordinal: page i is sealed as ordinal first_ordinal + i of this ticket and attempt.

    Returns int64 [n] on the device of `out`: unsigned 64-bit digests in two's complement (`digests_to_ints`).
    Raises LayoutError for layouts that cannot be converted, ValueError for arguments that do not fit them.
    """
    _check_pair(src, wire)
    caches = arguments.as_caches(caches, src)
    arguments.check_wire("out", out, wire)
    ids = arguments.as_block_ids(block_ids, caches[0])
    n = out.shape[0]
    arguments.check_cover(len(ids), src.page_tokens, n, wire.page_tokens, "source blocks", "wire pages")
    seeds = arguments.page_seeds(wire, binding, first_ordinal, n)
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=out.device)
    backend = _load(backend_name(caches.device))
    if out.device != caches.device:
        # Host staging: the kernel writes device memory at its speed, one copy crosses the bus; then the digests wait.
        made = torch.empty(out.shape, dtype=torch.uint8, device=caches.device)
        digests = regions.seal_pages(backend, caches, src, wire, ids, made, seeds)
        out.copy_(made)
        return digests.to(out.device)
    return regions.seal_pages(backend, caches, src, wire, ids, out, seeds)


def open_pages(
    wire_pages: Tensor,
    wire: PageLayout,
    digests: Digests,
    caches: Sequence[Tensor],
    dst: PageLayout,
    block_ids: BlockIds,
    binding: SealBinding,
    first_ordinal: int,
) -> Tensor:
    """Verify wire pages and scatter the good ones into cache blocks. A page with a wrong digest is never written.

    wire_pages: uint8 [n, wire.page_bytes]; must not change during the call (their lease sees to that).
    digests: n numbers, signed or unsigned, from the seal.
    block_ids: the destination blocks in token order, no block twice; blocks past the last token are an error, wire
      tokens past the last block (the padding of the last page) are left out.

    Returns bool [n]: True = the digest was right and the page is written. Raises as `seal_pages`.
    """
    caches, ids = _destination(wire_pages, wire, caches, dst, block_ids)
    n = wire_pages.shape[0]
    wanted = arguments.as_digests(digests, n, wire_pages.device)
    seeds = arguments.page_seeds(wire, binding, first_ordinal, n)
    if n == 0:
        return torch.empty(0, dtype=torch.bool, device=wire_pages.device)
    return regions.open_pages(_load(backend_name(caches.device)), wire_pages, wire, wanted, caches, dst, ids, seeds)


def write_pages(
    wire_pages: Tensor, wire: PageLayout, caches: Sequence[Tensor], dst: PageLayout, block_ids: BlockIds
) -> None:
    """`open_pages` without a digest: whatever the pages hold is written."""
    caches, ids = _destination(wire_pages, wire, caches, dst, block_ids)
    if wire_pages.shape[0]:
        good = torch.ones(wire_pages.shape[0], dtype=torch.bool, device=caches.device)
        wire_pages, ids = wire_pages.to(caches.device, non_blocking=True), ids.to(caches.device)
        regions.write_pages(_load(backend_name(caches.device)), wire_pages, wire, good, caches, dst, ids)


def _destination(
    wire_pages: Tensor, wire: PageLayout, caches: Sequence[Tensor], dst: PageLayout, block_ids: BlockIds
) -> tuple[PageCaches, Tensor]:
    if wire.dtype is not dst.dtype:
        raise LayoutError(f"wire pages are {wire.describe()}, the caches {dst.describe()}: open does not convert")
    _check_pair(wire, dst)
    checked = arguments.as_caches(caches, dst)
    arguments.check_wire("wire_pages", wire_pages, wire)
    ids = arguments.as_block_ids(block_ids, checked[0])
    if isinstance(block_ids, Sequence) and len(set(block_ids)) != len(block_ids):
        raise ValueError("block_ids names a block twice: two pages would be written over each other")
    n = wire_pages.shape[0]
    arguments.check_cover(n, wire.page_tokens, len(ids), dst.page_tokens, "wire pages", "destination blocks")
    return checked, ids


def page_digests(wire_pages: Tensor, wire: PageLayout, binding: SealBinding, first_ordinal: int) -> Tensor:
    """int64 [n]: what `seal_pages` returned if these bytes are what it wrote. wire_pages: uint8 [n, page_bytes]."""
    arguments.check_wire("wire_pages", wire_pages, wire)
    seeds = arguments.page_seeds(wire, binding, first_ordinal, wire_pages.shape[0])
    if wire_pages.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=wire_pages.device)
    return regions.page_digests(_load(backend_name(wire_pages.device)), wire_pages, wire, seeds)


def check_tags(
    page_tags: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    page_tokens: int,
    expected: Tensor,
    slots: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    answer: Tensor,
) -> None:
    """Compare `page_tags[table[r, c]]` with `expected[slots[r], c]` for the pages c that row r uses, and stop bad rows.

    page_tags: int64 [P], P >= 1; table: int32 [R, C]; seq_lens: int32 [R], tokens, of which row r uses
    ceil(seq_lens[r] / page_tokens) pages (at most the columns that table and expected both have); expected: int64
    [S, E]; slots: int32 [R], row r's row of `expected` (outside 0..S-1: nothing is expected, so nothing is right);
    query_start: int32 [R + 1], row r's tokens in `slot_mapping`, int64 [T]; answer: int32 [2, R].

    A page id outside [0, P) is wrong. Writes answer[0, r], the first wrong column or -1, and answer[1, r], the page
    that the table named there or -1. A bad row's table becomes 0 and its slots -1: it reads the null page and writes
    nothing. All contiguous, on one device; on CUDA one kernel, nothing synchronises. Raises ValueError.
    """
    if _check_tensors(page_tags, table, seq_lens, expected, slots, query_start, slot_mapping, answer):
        backend = _load(backend_name(table.device))
        backend.check_tags(page_tags, table, seq_lens, page_tokens, expected, slots, query_start, slot_mapping, answer)
    else:
        answer.fill_(-1)


def prepare_check(
    page_tags: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    page_tokens: int,
    expected: Tensor,
    slots: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    answer: Tensor,
) -> Callable[[int], int]:
    """`check_tags` over buffers that stay where they are, checked once; CPU only.

    The call takes a number of rows, at most those of the buffers, checks so many and returns how many are wrong.
    """
    rest = (seq_lens, page_tokens, expected, slots, query_start, slot_mapping, answer)
    if not _check_tensors(page_tags, table, seq_lens, expected, slots, query_start, slot_mapping, answer):
        raise ValueError(f"no rows or no columns to check: table {arguments.shown(table)}")
    backend = _load(backend_name(table.device))
    if prepare := getattr(backend, "prepare_check", None):
        return cast(Callable[[int], int], prepare(page_tags, table, *rest))

    def call(rows: int) -> int:
        part = (seq_lens[:rows], page_tokens, expected, slots[:rows], query_start[: rows + 1], slot_mapping)
        found = answer[:, :rows].contiguous()
        backend.check_tags(page_tags, table[:rows], *part, found)
        answer[:, :rows] = found
        return int((found[0] >= 0).sum())

    return call


def _check_tensors(
    page_tags: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    expected: Tensor,
    slots: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    answer: Tensor,
) -> bool:
    """Whether there is anything to check. Raises ValueError for tensors that do not go with each other."""
    rows = table.shape[0]
    for name, tensor, dtype, shape in (
        ("page_tags", page_tags, torch.int64, (page_tags.shape[0],)),
        ("table", table, torch.int32, (rows, table.shape[-1])),
        ("seq_lens", seq_lens, torch.int32, (rows,)),
        ("expected", expected, torch.int64, (expected.shape[0], expected.shape[-1])),
        ("slots", slots, torch.int32, (rows,)),
        ("query_start", query_start, torch.int32, (rows + 1,)),
        ("slot_mapping", slot_mapping, torch.int64, (slot_mapping.shape[0],)),
        ("answer", answer, torch.int32, (2, rows)),
    ):
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not len(page_tags):
            wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}, contiguous"
            raise ValueError(f"{name} must be {wanted}, is {arguments.shown(tensor)}")
    return bool(rows and table.shape[1] and expected.shape[1])


def pack_int4(
    weight: Tensor,
    group_size: int,
    symmetric: bool,
    clip_grid: Sequence[float] | None = None,
    *,
    block_scale: Tensor | None = None,
) -> int4.PackedInt4:
    """Quantise a weight to INT4 groups in the compressed-tensors `pack-quantized` layout (`kernels.int4` defines it).

    weight: [N, K] bfloat16, or float8_e4m3fn with block_scale float32 [ceil(N/128), ceil(K/128)]; K a multiple of
    group_size (32, 64 or 128). clip_grid: ratios in 0.5..1.0 to try per group, None = (1.0,).
    Returns (packed int32 [N, K/8], scale bfloat16 [N, K/group_size], zero_point int32 [ceil(N/8), K/group_size] or
    None when symmetric). Any run of rows (a multiple of 8 rows if asymmetric, of 128 with block_scale) can be packed
    by itself and concatenated: a checkpoint streams. Raises ValueError for other shapes and for NaN or infinity in the
    weight.
    """
    grid = int4.check_pack(weight, group_size, clip_grid, block_scale)
    out = _load_weights(backend_name(weight.device)).pack_int4(weight, group_size, symmetric, grid, block_scale)
    int4.check_finite(out.scale)
    return out


def unpack_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int) -> Tensor:
    """The weight that `pack_int4`'s result stands for: bfloat16 [N, K]."""
    int4.check_unpack(packed, scale, zero_point, group_size)
    backend = _load_weights(backend_name(packed.device))
    return backend.unpack_int4(packed, scale, zero_point, group_size)


def digests_to_ints(digests: Tensor) -> list[int]:
    """int64 digests as unsigned Python numbers, for messages."""
    return cast(list[int], digests.view(torch.uint64).tolist())
