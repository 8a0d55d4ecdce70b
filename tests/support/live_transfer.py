"""A node's transfer actor without Ray, with its real socket and memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from actors.messages import Lease, Role
from actors.transfer.actor import KVTransfer
from actors.transfer.channel import Hello
from actors.transfer.link import WorkerLink
from ops.engine_pair import FakeController, LocalHandle

MIB = 1 << 20


class Node:
    def __init__(self, num_bytes: int = MIB, lease_s: float = 60.0) -> None:
        self.controller = FakeController()
        self.transfer = KVTransfer(uuid.uuid4().hex, num_bytes, lease_s, "")
        self.transfer._controller = LocalHandle(self.controller)
        self.machine = self.transfer.machine
        self._links: list[WorkerLink] = []

    async def link(self, engine: str = "p#0") -> WorkerLink:
        link = WorkerLink(self.transfer.links.path, Hello(engine=engine, role=Role.PREFILL, pid=1))
        self._links.append(link)
        await until(lambda: self.machine.engines.ready((engine,)))
        return link

    async def lease(self, ticket_id: int, engine: str = "p#0", num_bytes: int = 10_000) -> Lease:
        lease = await self.transfer.lease(ticket_id, 1, num_bytes, [engine], 5.0)
        assert lease is not None
        return lease

    async def close(self) -> None:
        for link in self._links:
            await asyncio.to_thread(link.close)
        await self.transfer.close()


async def until(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)
