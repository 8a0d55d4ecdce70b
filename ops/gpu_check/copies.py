"""Device to host and back, by kind of host memory; and how long a step waits for its pages' copy to staging."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding
from ops.gpu_check.plan import Options, Row

BINDING = SealBinding(1, 1)
TIMES = 5


def wait(options: Options) -> None:
    if not options.dry:
        torch.cuda.synchronize()


def milliseconds(options: Options, run: Callable[[], Any], times: int = TIMES) -> float:
    """Median wall time until the device is done, after one run that is not counted."""
    run()
    wait(options)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        wait(options)
        taken.append((time.perf_counter() - began) * 1e3)
    return median(taken)


def shared(num_bytes: int) -> tuple[Tensor, mmap.mmap]:
    """Memory as staging is: a mapped memfd, every page of it touched."""
    memory = os.memfd_create("gpu-check")
    try:
        os.ftruncate(memory, num_bytes)
        mapped = mmap.mmap(memory, num_bytes)
    finally:
        os.close(memory)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    tensor.zero_()
    return tensor, mapped


def registered(memory: Tensor) -> float:
    """Seconds that page-locking it takes. Raises RuntimeError where CUDA refuses."""
    began = time.perf_counter()
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if status:
        raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes gave {status}")
    return time.perf_counter() - began


def copy_rows(options: Options) -> Iterator[Row]:
    for num_bytes in (1 << 16,) if options.dry else (64 << 20, 512 << 20):
        device = torch.ones(num_bytes, dtype=torch.uint8, device=options.device)
        kinds: dict[str, Tensor] = {"pageable": torch.ones(num_bytes, dtype=torch.uint8)}
        if not options.dry:
            kinds["pinned"] = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        kinds["memfd"], mapped = shared(num_bytes)
        for kind, host in kinds.items():
            yield from both_ways(options, kind, host, device)
        if not options.dry:
            seconds = registered(kinds["memfd"])
            yield {"registered_bytes": num_bytes, "seconds": seconds}
            yield from both_ways(options, "memfd, registered", kinds["memfd"], device)
            torch.cuda.cudart().cudaHostUnregister(kinds["memfd"].data_ptr())  # type: ignore[no-untyped-call]
        del kinds, host
        mapped.close()


def both_ways(options: Options, kind: str, host: Tensor, device: Tensor) -> Iterator[Row]:
    for way, target, source in (("to host", host, device), ("to device", device, host)):
        ms = milliseconds(options, lambda t=target, s=source: t.copy_(s, non_blocking=True))
        yield {"copy": way, "memory": kind, "bytes": host.numel(), "gb_s": host.numel() / ms / 1e6}


class Ahead:
    """Seals into device memory and copies on a stream of its own: what a step waits for when nothing waits for the
    copy. On a CPU both are the same call after another."""

    def __init__(self, options: Options, caches: list[Tensor], src: PageLayout, wire: PageLayout, n: int) -> None:
        self.seal_into = partial(dispatch.seal_pages, caches, src, wire, list(range(n)))
        self.made = torch.empty(n, wire.page_bytes, dtype=torch.uint8, device=options.device)
        self.host = torch.empty(self.made.shape, dtype=torch.uint8, pin_memory=not options.dry)
        self.stream: Any = None if options.dry else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def seal(self) -> None:
        self.seal_into(self.made, BINDING, 0)
        if self.stream is None:
            self.host.copy_(self.made)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.host.copy_(self.made, non_blocking=True)


def stall_rows(options: Options) -> Iterator[Row]:
    """A chunk's pages: host time until the call returns, and until the bytes are in host memory."""
    tokens, n = (4, 2) if options.dry else (64, 128)
    layouts = {
        "gqa h4 d128 n64": PageLayout(2 if options.dry else 46, tokens, 4, 128, PageDtype.BF16, PageOrder.KV_PACKED),
        "mla n64": PageLayout(2 if options.dry else 61, tokens, 1, 576, PageDtype.BF16, PageOrder.MLA),
    }
    for name, src in layouts.items():
        wire = src.with_dtype(PageDtype.E4M3)
        shape = src.cache_shape(n)
        caches = [torch.randn(shape, device=options.device).bfloat16() for _ in range(src.num_layers)]
        pageable = torch.zeros(n, wire.page_bytes, dtype=torch.uint8)
        ahead = Ahead(options, caches, src, wire, n)

        ways: dict[str, Callable[[], Any]] = {
            "into staging, waited for": partial(ahead.seal_into, pageable, BINDING, 0),
            "device, then its own stream": ahead.seal,
        }
        for way, seal in ways.items():
            seal()
            wait(options)
            began = time.perf_counter()
            seal()
            returned = time.perf_counter()
            wait(options)
            landed = time.perf_counter()
            yield {
                "seal": name, "way": way, "tokens": n * src.page_tokens, "bytes": pageable.numel(),
                "returns_ms": (returned - began) * 1e3, "landed_ms": (landed - began) * 1e3,
            }  # fmt: skip
        yield {"seal": name, "ok": bool(torch.equal(pageable, ahead.host)), "what": "both ways, the same bytes"}


def run(options: Options) -> Iterator[Row]:
    yield from copy_rows(options)
    with dispatch.use_backend("reference" if options.dry else "triton"):
        yield from stall_rows(options)
