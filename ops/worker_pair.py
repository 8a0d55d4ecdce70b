"""Two worker halves and a real transfer actor's code between them: what prefill seals, decode opens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actors.engine.metadata import FerryMetadata, OpenJob, SealJob
from actors.engine.orders import OpenParams, SealParams
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import HandOver, Lease, Role, Sealed, Verdict
from actors.transfer.actor import KVTransfer
from ops.engine_pair import FakeController, LocalHandle


@dataclass
class EngineCache:
    """What vLLM registers with a connector."""

    caches: Mapping[str, torch.Tensor]
    layers: Mapping[str, Any]
    dtype: str  # `cache_config.cache_dtype`
    scales: tuple[float, float] = (1.0, 1.0)


class WorkerPair:
    def __init__(
        self, prefill: EngineCache, decode: EngineCache, staging_bytes: int = 8 << 20, ring: bool | None = None
    ) -> None:
        self._ring = ring
        self.controller = FakeController()
        self.transfer = KVTransfer(uuid.uuid4().hex, staging_bytes, 30.0, "")
        self.transfer._controller = LocalHandle(self.controller)
        self.caches = {Role.PREFILL: prefill, Role.DECODE: decode}

    async def __aenter__(self) -> WorkerPair:
        path = (await self.transfer.start())["socket"]
        self.prefill = await asyncio.to_thread(FerryConnectorWorker, "p", Role.PREFILL, 0, 1, path, ring=self._ring)
        self.decode = await asyncio.to_thread(FerryConnectorWorker, "d", Role.DECODE, 0, 1, path)
        for worker in (self.prefill, self.decode):
            cache = self.caches[worker.role]
            worker.register(cache.caches, cache.layers, cache.dtype, cache.scales)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.prefill.close()
        self.decode.close()
        await self.transfer.close()

    async def seal(self, ticket: int, num_tokens: int, block_ids: list[int], chunk_pages: int) -> Sealed:
        layout = self.decode.layout
        assert layout is not None
        num_bytes = len(block_ids) * layout.page_bytes
        lease = await self.transfer.lease(ticket, 1, num_bytes, ["p#0"], 30.0)
        assert isinstance(lease, Lease)
        order = SealParams(
            ticket_id=ticket, attempt=1, num_tokens=num_tokens, wire_layout=layout.to_dict(), lease=lease
        )
        for first in range(0, len(block_ids), chunk_pages):
            ids = block_ids[first : first + chunk_pages]
            job = SealJob(order, ids, first, last=first + len(ids) == len(block_ids))
            await asyncio.to_thread(self.prefill.seal, FerryMetadata(seals=[job]))
        return await asyncio.wait_for(self.controller.seal_of((ticket, 1)), 5)

    async def open(self, sealed: Sealed, block_ids: list[int]) -> dict[Verdict, int]:
        seal = sealed.seal
        hand_over = HandOver(
            ticket_id=seal.ticket_id, attempt=seal.attempt, seal=seal, lease=sealed.lease, deadline_s=5.0
        )
        assert isinstance(await self.transfer.begin_read(hand_over, ["d#0"]), Lease)
        job = OpenJob("r", OpenParams(hand_over=hand_over), block_ids, 0, seal.num_tokens)
        self.decode.start_opening(FerryMetadata(opens=[job]))
        for _ in range(500):
            if self.decode.landed(empty_step=True)[0]:
                break
            await asyncio.sleep(0.005)
        for _ in range(500):
            if (key := (seal.ticket_id, seal.attempt)) in self.controller.opened:
                return dict(self.controller.opened[key].verdicts)
            await asyncio.sleep(0.005)
        raise AssertionError("opening was never reported")
