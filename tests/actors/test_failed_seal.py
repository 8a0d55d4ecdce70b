"""A seal that runs out of memory fails its ticket and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from actors.engine.metadata import FerryMetadata, SealJob
from actors.engine.orders import SealParams
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import Lease, Role
from actors.transfer.channel import Goodbye, WriterDone
from kernels.layout import PageDtype, PageLayout, PageOrder

LAYOUT = PageLayout(2, 32, 2, 32, PageDtype.BF16, PageOrder.CPU_VEC)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_seal_that_runs_out_of_memory_fails_its_ticket_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = FerryConnectorWorker("r", Role.PREFILL, 0, 1, "/nowhere")
    half.layout = LAYOUT
    sent: list[Any] = []
    monkeypatch.setattr(half._link, "send", sent.append)
    view = memoryview(bytearray(LAYOUT.page_bytes))
    monkeypatch.setattr(half._link.staging, "bytes_of", lambda lease: contextlib.nullcontext(view))

    def out_of_memory(*_: Any) -> None:
        raise error

    monkeypatch.setattr("kernels.dispatch.seal_pages", out_of_memory)
    lease = Lease(ticket_id=5, attempt=2, node_id="n", segment="s", offset=0, num_bytes=LAYOUT.page_bytes)
    order = SealParams(ticket_id=5, attempt=2, num_tokens=20, wire_layout=LAYOUT.to_dict(), lease=lease)
    try:
        half.seal(FerryMetadata(seals=[SealJob(order, [1], 0, True)]))
    finally:
        half.close()
    assert sent == [WriterDone(ticket_id=5, attempt=2), Goodbye()]
    assert (5, 2) in half._link.staging._revoked, "later pages of the ticket are not written either"
