"""A replica's calls to its node's transfer actor, over a real socket."""

from __future__ import annotations

import asyncio
import os
import stat
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from actors import link
from actors.engine.in_flight import ReplicaError
from actors.engine.transfer_client import TransferClient
from actors.messages import HandOver, Lease, Role, Seal, Verdict
from actors.transfer.actor import KVTransfer
from actors.transfer.channel import Hello
from actors.transfer.host_calls import DropReader
from actors.transfer.link import WorkerLink
from actors.transfer.staging import StagingError
from ops.engine_pair import FakeController, LocalHandle

MIB = 1 << 20
ENGINE = ["p#0"]


class Node:
    """A transfer actor without Ray that can end and come back; `found` counts how often it was looked up."""

    def __init__(self) -> None:
        self.node_id = uuid.uuid4().hex
        self.found = 0
        self.comes_back = True
        self.made: asyncio.Task[None] | None = None
        self._engine: WorkerLink | None = None

    async def start(self) -> None:
        self.transfer = KVTransfer(self.node_id, MIB, 60.0, "")
        self.transfer._controller = LocalHandle(FakeController())
        self.path = (await self.transfer.start())["socket"]

    async def connect_engine(self) -> None:
        self._engine = WorkerLink(self.path, Hello(engine=ENGINE[0], role=Role.PREFILL, pid=1))
        while not self.transfer.machine.engines.ready(tuple(ENGINE)):
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        await self.transfer.close()

    def get(self) -> object:
        self.found += 1
        return self

    def client(self) -> TransferClient:
        return TransferClient(self.node_id, self.get, self.path)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.start()
    await made.connect_engine()
    yield made
    await made.end()


def hand_over(lease: Lease) -> HandOver:
    seal = Seal(ticket_id=lease.ticket_id, attempt=1, layout_fingerprint="l", num_tokens=64, digests=((1,),))
    return HandOver(ticket_id=lease.ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=5.0)


async def test_leases_are_given_refused_and_returned(node: Node) -> None:
    client = node.client()
    lease = await client.lease(1, 1, MIB, ENGINE, 5.0, 60.0)
    assert lease is not None and lease.num_bytes >= MIB
    assert await client.lease(2, 1, MIB, ENGINE, 0.05, 60.0) is None, "no room in time"
    with pytest.raises(StagingError, match="raise it"):
        await client.lease(3, 1, 2 * MIB, ENGINE, 5.0, 60.0)
    await client.drop_writer(1, 1, ENGINE)
    assert await client.lease(4, 1, MIB, ENGINE, 5.0, 60.0) is not None
    await client.drop_writer(4, 1, ENGINE)
    assert not len(node.transfer.machine.staging)
    client.close()


async def test_a_call_that_waits_holds_no_other_up(node: Node) -> None:
    client = node.client()
    assert await client.lease(1, 1, MIB, ENGINE, 5.0, 60.0) is not None
    waiting = asyncio.ensure_future(client.lease(2, 1, MIB, ENGINE, 30.0, 60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.drop_writer(1, 1, ENGINE)
    assert (await asyncio.wait_for(waiting, 10)) is not None
    client.close()


async def test_reading_what_is_gone_is_missing(node: Node) -> None:
    client = node.client()
    lease = Lease(ticket_id=9, attempt=1, node_id=node.node_id, segment="x", offset=0, num_bytes=64)
    assert await client.begin_read(hand_over(lease), ENGINE, 2.0) in (Verdict.MISSING, Verdict.STALE)
    await client.drop_reader(9, 1, ENGINE)
    await client.release(9, 1)
    client.close()


async def test_an_actor_that_comes_back_is_asked_again(node: Node) -> None:
    client = node.client()
    assert await client.lease(1, 1, 100, ENGINE, 5.0, 60.0) is not None
    await node.end()

    async def come_back() -> None:
        await asyncio.sleep(0.3)
        await node.start()
        await node.connect_engine()

    back = asyncio.ensure_future(come_back())
    assert await client.lease(2, 1, 100, ENGINE, 20.0, 60.0) is not None
    await back
    assert node.found > 1, "it was looked up, which starts it where it is not there"
    client.close()


async def test_an_actor_that_stays_away_or_is_silent_is_an_error(node: Node) -> None:
    client = node.client()
    silent = asyncio.ensure_future(client.begin_read(hand_over(await _leased(client)), ENGINE, 1e-9))
    node.transfer.begin_read = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign,assignment]
    with pytest.raises(ReplicaError, match="silent for 1 s"):
        await silent
    await node.end()
    began = time.monotonic()
    with pytest.raises(ReplicaError, match="away"):
        await client.lease(5, 1, 100, ENGINE, 0.1, 60.0)
    assert time.monotonic() - began < 10
    client.close()


async def _leased(client: TransferClient) -> Lease:
    lease = await client.lease(4, 1, 100, ENGINE, 5.0, 60.0)
    assert lease is not None
    return lease


async def test_the_socket_is_for_this_user_and_for_what_is_understood(node: Node) -> None:
    path = node.transfer.hosts.path
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for sent in (b"\x00\x00\x00\x02hi", b"\xff\xff\xff\xff"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    await node.transfer.close()
    assert not os.path.exists(path)


async def test_a_replica_that_does_not_read_its_answers_loses_its_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_unix_connection(node.transfer.hosts.path)
    link.send(writer, DropReader(1, 9, 1, ENGINE))
    monkeypatch.setattr(link, "UNREAD_BYTES_MAX", -1)  # nothing may be left unread: as if all were
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert all(task.exception() is None for task in node.transfer.hosts._tasks if task.done())
    writer.close()
