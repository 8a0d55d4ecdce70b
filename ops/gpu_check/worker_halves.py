"""Two worker halves with a real transfer actor's code between them: sealed on the device, opened on the device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from actors.messages import Role, Verdict
from kernels.layout import Rounding
from kernels.reference import encode_e4m3
from ops.gpu_check.plan import Options, Row
from ops.worker_pair import EngineCache, WorkerPair


def layer(backend: str) -> Any:
    """What `actors.engine.layouts` reads of an attention layer."""
    return SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0), _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip


def caches_of(options: Options, kind: str, blocks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    layers, tokens = (2, 16) if options.dry else ((32, 64) if kind == "FLASH_ATTN" else (61, 64))
    shape = (blocks, tokens, 4, 256) if kind == "FLASH_ATTN" else (blocks, tokens, 576)
    made = [torch.zeros(shape, dtype=dtype, device=options.device) for _ in range(layers)]
    if dtype is torch.bfloat16:
        for cache in made:
            cache.normal_(std=4.0)
    # Token-major storage seen as (blocks, heads, tokens, K and V), as vLLM's GPU backends have it.
    return {f"layer{i}": cache.transpose(1, 2) if cache.dim() == 4 else cache for i, cache in enumerate(made)}


async def hand_over(options: Options, kind: str) -> list[Row]:
    pages = 8 if options.dry else 128
    source = caches_of(options, kind, pages + 1, torch.bfloat16)
    target = caches_of(options, kind, pages + 1, torch.uint8)
    layers = {name: layer(kind) for name in source}
    tokens = next(iter(source.values())).shape[-2]
    num_bytes = pages * sum(cache[0].numel() for cache in target.values())
    rows: list[Row] = []
    pair = WorkerPair(
        EngineCache(source, layers, "auto"),
        EngineCache(target, dict(layers), "fp8_e4m3"),
        2 * num_bytes + (1 << 20),
        ring=True,  # as a GPU has it, also in a dry run
    )
    async with pair:
        ids = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).add(1).tolist()
        for ticket in (1, 2):  # the first compiles and touches staging
            began = time.perf_counter()
            sealed = await pair.seal(ticket, pages * tokens, ids, chunk_pages=pages // 4)
            middle = time.perf_counter()
            stall_ms, opening = pair.prefill.seal_ns / 1e6, pair.decode.open_ns
            if ticket == 2:  # a page that changes on the way is not written
                layout = pair.decode.layout
                assert layout is not None
                pair.transfer.memory.map[sealed.lease.offset + 3 * layout.page_bytes + 77] ^= 0x10
            verdicts = await pair.open(sealed, ids)
            expected = {Verdict.OK: pages} if ticket == 1 else {Verdict.OK: pages - 1, Verdict.MISMATCH: 1}
            open_ms = (pair.decode.open_ns - opening) / 1e6
            rows.append(
                {
                    "pages": kind, "ticket": ticket, "tokens": pages * tokens, "bytes": num_bytes,
                    "seal_s": middle - began, "seal_calls_ms": stall_ms, "open_ms": open_ms,
                    "verdicts": {str(verdict): number for verdict, number in verdicts.items()},
                    "ok": verdicts == expected,
                }
            )  # fmt: skip
            pair.prefill.seal_ns = 0
            if ticket == 1:
                rows.append(compared(kind, pair, ids[pages // 2]))
        rows.append({"pages": kind, "what": "leases left", "ok": len(pair.transfer.machine.staging) == 0})
    return rows


def compared(kind: str, pair: WorkerPair, page: int) -> Row:
    """One page of every layer against the reference's conversion of the source."""
    ours = pair.caches[Role.DECODE].caches
    wrong = 0
    for name, cache in pair.caches[Role.PREFILL].caches.items():
        expected = encode_e4m3(cache[page].cpu(), 1.0, Rounding.NEAREST_EVEN)
        wrong += int((ours[name][page].cpu() != expected).sum())
    return {"pages": kind, "what": "page as the reference converts it", "differ": wrong, "ok": wrong == 0}


def run(options: Options) -> Iterator[Row]:
    for kind in ("FLASH_ATTN", "FLASHMLA"):
        yield from asyncio.run(hand_over(options, kind))
