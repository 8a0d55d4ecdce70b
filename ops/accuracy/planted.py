"""Faults that no digest can see, put into pages after they were opened: an evaluator must find each of them.

The processor of this name is loaded with the decode engine of an evaluation. It changes nothing by itself; the pages of
a request whose id begins with a fault's name are spoiled once their digests have been found right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from actors.engine.worker_half import FerryConnectorWorker
from kernels.layout import PageDtype, PageLayout
from kernels.reference import element_offsets

CLASS_PATH = "ops.accuracy.planted:Planted"
FACTOR = 2.0  # of K's scale


def _each(caches: Sequence[torch.Tensor], blocks: Sequence[int], change: Callable[[torch.Tensor], Any]) -> None:
    for cache in caches:
        for block in blocks:
            change(cache[block].view(-1))


def wrong_scale(caches: Sequence[torch.Tensor], blocks: Sequence[int], layout: PageLayout) -> None:
    """K is read with twice the scale that it was written with."""
    keys = element_offsets(layout)[:, :, 0].reshape(-1)
    dtype = torch.float8_e4m3fn if layout.dtype is PageDtype.E4M3 else torch.bfloat16

    def change(page: torch.Tensor) -> None:
        values = page.view(dtype)
        values[keys] = (values[keys].float() * FACTOR).clamp(-448.0, 448.0).to(dtype)

    _each(caches, blocks, change)


def bad_layer(caches: Sequence[torch.Tensor], blocks: Sequence[int], layout: PageLayout) -> None:
    """The pages of one layer, the middle one, were never copied."""
    _each([caches[len(caches) // 2]], blocks, lambda page: page.view(torch.uint8).zero_())


def swapped(caches: Sequence[torch.Tensor], blocks: Sequence[int], layout: PageLayout) -> None:
    """K and V have changed places."""
    offsets = element_offsets(layout)
    width = torch.uint8 if layout.dtype is PageDtype.E4M3 else torch.int16

    def change(page: torch.Tensor) -> None:
        values = page.view(width)
        values[offsets] = values[offsets].flip(2)

    _each(caches, blocks, change)


FAULTS: dict[str, Callable[[Sequence[torch.Tensor], Sequence[int], PageLayout], None]] = {
    "wrong-scale": wrong_scale,
    "bad-layer": bad_layer,
    "swapped-k-v": swapped,
}


class Planted(LogitsProcessor):
    """vLLM builds it in the worker process, before requests: there it stands between opening and decode's reading."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        land = FerryConnectorWorker._land

        def spoiled(worker: FerryConnectorWorker, job: Any, pages: torch.Tensor) -> Any:
            verdicts = land(worker, job, pages)
            fault = FAULTS.get(job.request_id.partition("/")[0])
            if fault is not None:
                assert worker.layout is not None
                fault(worker._caches, job.block_ids, worker.layout)
            return verdicts

        FerryConnectorWorker._land = spoiled  # type: ignore[method-assign, assignment]

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        return None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
