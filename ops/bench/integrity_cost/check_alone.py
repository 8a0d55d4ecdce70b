"""The batch check of page tags without an engine, beside a memory copy that moves as many bytes. One thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels import dispatch

SHAPES = [(rows, tokens, page) for rows, tokens in ((64, 8192), (256, 32768)) for page in (16, 32, 64, 128)]
REPETITIONS = 101


def measure(rows: int, tokens: int, page_tokens: int, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """One batch of a correct table. `memory_limit_share`: the copy's time over the check's, medians of turns."""
    columns = tokens // page_tokens
    pool = 2 * rows * columns
    generator = torch.Generator().manual_seed(1)
    tags = torch.randint(1, 1 << 62, (pool,), generator=generator)
    pages = torch.randperm(pool, generator=generator)[: rows * columns].view(rows, columns)
    table, expected = pages.to(torch.int32), tags[pages]
    lengths = torch.full((rows,), tokens, dtype=torch.int32)
    row, slot_mapping = torch.arange(rows + 1, dtype=torch.int32), torch.arange(rows)  # one token a row: a decode step
    answer = torch.empty(2, rows, dtype=torch.int32)
    # A row: its ids, expected tags and the tags it points at; then one copy of as many bytes.
    touched = rows * columns * (4 + 8 + 8) + rows * (4 + 4 + 4 + 8)
    a, b = (torch.ones(touched // 2, dtype=torch.uint8) for _ in range(2))
    check = partial(
        dispatch.check_tags, tags, table, lengths, page_tokens, expected, row[:rows], row, slot_mapping, answer
    )
    check()
    if answer.max() >= 0:
        raise AssertionError("a correct table was called bad")
    runs: tuple[Callable[[], Any], Callable[[], Any]] = (check, partial(b.copy_, a))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repetitions):
        for run, spent in zip(runs, times):
            began = time.perf_counter()
            run()
            spent.append(time.perf_counter() - began)
    seconds, copy = (statistics.median(each) for each in times)
    return {
        "rows": rows,
        "tokens": tokens,
        "page_tokens": page_tokens,
        "columns": columns,
        "backend": dispatch.backend_name("cpu"),
        "microseconds": seconds * 1e6,
        "bytes_touched": touched,
        "gb_s": touched / seconds / 1e9,
        "memory_limit_share": copy / seconds,
    }


def all_shapes() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [measure(*shape) for shape in SHAPES]
