"""Bytes between two transfer actors without Ray: real sockets, real memory, and connections that break."""

from __future__ import annotations

import asyncio
import socket
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import ray
from live_transfer import MIB, Node, until
from transfer_node import sealed

from actors import link
from actors.messages import HandOver, Lease, LinkStatus, Seal, Verdict
from actors.transfer import chunks, direct
from actors.transfer.staging import StagingError
from ops.engine_pair import LocalHandle

NUM_BYTES = 64 * MIB


@dataclass
class Pair:
    there: Node
    here: Node
    lease: Lease
    payload: np.ndarray

    def read(self, lease: Lease | None = None) -> asyncio.Future[Lease | Verdict]:
        lease = lease or self.lease
        seal = Seal(ticket_id=lease.ticket_id, attempt=1, layout_fingerprint="l", num_tokens=64, digests=((1, 2),))
        over = HandOver(ticket_id=lease.ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=30.0)
        return asyncio.ensure_future(self.here.transfer.begin_read(over, ["d#0"]))

    def arrived(self) -> bool:
        got = np.frombuffer(self.here.transfer.memory.map, np.uint8)[: self.lease.num_bytes]
        return bool((got == self.payload).all())

    def link(self) -> LinkStatus:
        [found] = self.here.machine.status().links
        return found

    def break_connections(self) -> None:
        assert self.there.transfer._server is not None
        for sock in tuple(self.there.transfer._server.sockets):
            sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    there, here = Node(NUM_BYTES), Node(NUM_BYTES)
    await there.transfer.start()
    await here.transfer.start()
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: LocalHandle(there.transfer))
    writer = await there.link()
    await here.link("d#0")
    lease = await there.lease(1, num_bytes=NUM_BYTES - 12_345)
    payload = np.random.default_rng(1).integers(0, 256, lease.num_bytes, dtype=np.uint8)
    there.transfer.memory.map[: lease.num_bytes] = payload.tobytes()
    writer.send(sealed(1))
    await until(lambda: (1, 1) in there.controller.sealed)
    try:
        yield Pair(there, here, lease, payload)
    finally:
        await there.close()
        await here.close()


def slow(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    more = direct.DirectStream._more

    def waits(stream: direct.DirectStream) -> chunks.Event:
        time.sleep(pause_s)
        return more(stream)

    monkeypatch.setattr(direct.DirectStream, "_more", waits)


async def test_bytes_go_straight_from_memory_to_memory_beside_the_event_loop(pair: Pair) -> None:
    reading, num_turns, longest, before = pair.read(), 0, 0.0, time.perf_counter()
    while not reading.done():
        await asyncio.sleep(0)
        longest, before = max(longest, time.perf_counter() - before), time.perf_counter()
        num_turns += 1
    assert isinstance(reading.result(), Lease) and pair.arrived()
    assert num_turns > NUM_BYTES // chunks.CHUNK_BYTES and longest < 0.5, "bytes were copied on the event loop"
    found = pair.link()
    assert (found.way, found.fetches, found.failed, found.chunks_again) == ("direct", 1, 0, 0)
    assert found.bytes_per_s > 0 and not pair.there.machine.copies


async def test_where_no_connection_can_be_had_ray_carries_the_chunks(pair: Pair) -> None:
    assert pair.there.transfer._server is not None
    pair.there.transfer._server.close()
    assert isinstance(await pair.read(), Lease) and pair.arrived()
    assert pair.link().way == "objects"
    with pytest.raises(StagingError, match="the most is"):
        await pair.there.transfer.read(pair.lease, 0, chunks.CHUNK_BYTES + 1)


async def test_a_connection_that_breaks_loses_its_chunks_and_no_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, 0.005)
    reading = pair.read()
    for _ in range(3):
        await asyncio.sleep(0.15)
        pair.break_connections()
    assert isinstance(await reading, Lease) and pair.arrived()
    found, whole = pair.link(), NUM_BYTES // chunks.CHUNK_BYTES
    assert found.way == "direct" and 0 < found.chunks_again <= 3 * chunks.WINDOW_BYTES // chunks.CHUNK_BYTES < whole
    await until(lambda: not pair.there.machine.copies)


async def test_a_chunk_that_changes_on_its_way_is_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    send, num_sent = direct._send_bytes, 0

    def spoils(sock: socket.socket, view: memoryview, stopped: object) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 5:
            wrong = bytearray(view)
            wrong[MIB] ^= 1
            sock.sendall(direct._HEAD.pack(True, len(view)))
            sock.sendall(wrong)
            sock.sendall(direct._CHECKSUM.pack(zlib.crc32(view)))
        else:
            send(sock, view, stopped)  # type: ignore[arg-type]

    monkeypatch.setattr(direct, "_send_bytes", spoils)
    assert isinstance(await pair.read(), Lease) and pair.arrived()
    assert pair.link().chunks_again > 0


async def test_a_fetch_whose_ticket_ended_never_writes_into_the_next_lease(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.here.link("p#1")
    slow(monkeypatch, 0.05)
    reading = pair.read()
    await until(lambda: pair.here.machine.fetches.running)
    await asyncio.sleep(0.2)
    await pair.here.transfer.release([(1, 1)])
    assert await reading is Verdict.STALE
    other = await pair.here.transfer.lease(2, 1, NUM_BYTES, ["p#1"], 5.0)
    assert other is not None and other.offset == 0
    pair.here.transfer.memory.map[:NUM_BYTES] = b"\x55" * NUM_BYTES
    await asyncio.sleep(0.5)
    assert set(pair.here.transfer.memory.map[:NUM_BYTES]) == {0x55}
    assert pair.link().failed == 0, "bytes that are not wanted are no failure of the link"


async def test_bytes_are_not_lent_again_while_they_are_sent_and_sending_ends_with_the_ticket(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has stopped reading: the sender waits inside a chunk."""
    server = pair.there.transfer._server
    assert server is not None
    monkeypatch.setattr(direct, "SEND_S", 1.0)
    stream = direct.DirectStream(server.invite())
    for index in range(4):
        first, into = index * chunks.CHUNK_BYTES, memoryview(bytearray(chunks.CHUNK_BYTES))
        stream.ask(pair.lease, chunks.Ask(1, index, first, chunks.CHUNK_BYTES), into)
    await until(lambda: pair.there.machine.copies)
    await pair.there.transfer.release([(1, 1)])
    if pair.there.machine.copies:  # it could not all go into the sockets' buffers
        assert pair.there.machine.staging.bytes_held > 0
    await until(lambda: not pair.there.machine.copies, 5.0)
    assert pair.there.machine.staging.bytes_held == 0
    assert not pair.there.transfer._stopped_copies
    stream.close()


async def test_what_the_other_node_has_given_up_or_does_not_exist_is_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.there.transfer.release([(1, 1)])
    assert await pair.read() is Verdict.MISSING
    assert pair.here.machine.staging.bytes_held == 0

    def no_such_actor(name: str, namespace: str) -> None:
        raise ValueError(f"there is no actor {name}")

    monkeypatch.setattr(ray, "get_actor", no_such_actor)
    ghost = Lease(ticket_id=2, attempt=1, node_id="gone", segment="s", offset=0, num_bytes=10)
    assert await pair.read(ghost) is Verdict.MISSING
    failed = next(each for each in pair.here.machine.status().links if each.node_id == "gone")
    assert failed.failed == 1 and "there is no actor" in failed.reason


async def test_connections_are_kept_between_fetches(pair: Pair) -> None:
    server, seen = pair.there.transfer._server, set()
    assert server is not None
    writer = await pair.there.link("p#1")
    assert isinstance(await pair.read(), Lease)
    for ticket_id in (2, 3, 4):
        await pair.here.transfer.release([(ticket_id - 1, 1)])
        await pair.there.transfer.release([(ticket_id - 1, 1)])
        await pair.here.transfer.drop_reader(ticket_id - 1, 1, ["d#0"])
        lease = await pair.there.lease(ticket_id, "p#1", num_bytes=MIB)
        writer.send(sealed(ticket_id))
        await until(lambda key=(ticket_id, 1): key in pair.there.controller.sealed)  # type: ignore[misc]
        assert isinstance(await pair.read(lease), Lease)
        seen |= {sock.fileno() for sock in server.sockets}
    assert len(seen) == 1


async def test_who_was_not_invited_and_what_is_too_large_is_refused(pair: Pair) -> None:
    server = pair.there.transfer._server
    assert server is not None
    address = server.invite()
    wrong = link.Address(address.host, address.port, address.invitation, bytes(32))
    for attempt in (wrong, address):  # a wrong proof spends the invitation
        with pytest.raises((OSError, EOFError)):
            _ask(direct.DirectStream(attempt), pair.lease, 1)
    with pytest.raises((OSError, EOFError)):
        _ask(direct.DirectStream(server.invite()), pair.lease, chunks.CHUNK_BYTES + 1)
    raw = direct.DirectStream(server.invite())
    raw.sock.sendall(direct._LENGTH.pack(1 << 30))
    assert raw.sock.recv(1) == b""
    raw.close()


def _ask(stream: direct.DirectStream, lease: Lease, num_bytes: int) -> None:
    try:
        stream.ask(lease, chunks.Ask(1, 0, 0, num_bytes), memoryview(bytearray(num_bytes)))
        while not isinstance(stream.poll(1.0), chunks.Came | chunks.Gone):
            pass
    finally:
        stream.close()


async def test_a_probe_says_which_way_works_and_what_it_carries(pair: Pair) -> None:
    assert await pair.here.transfer.probe("far")
    found = pair.link()
    assert (found.way, found.fetches) == ("direct", 0) and found.bytes_per_s > 0 and 0 < found.round_trip_s < 1
    assert pair.there.transfer._server is not None
    pair.there.transfer._server.close()
    assert await pair.here.transfer.probe("far")
    assert pair.link().way == "objects" and pair.link().reason.startswith("direct: ")


async def test_a_probe_that_a_busy_machine_held_up_does_not_make_a_link_slow(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, num_sent = direct._send_bytes, 0

    def held_up(sock: socket.socket, view: memoryview, stopped: object) -> None:
        nonlocal num_sent
        num_sent += len(view) == direct.PROBE_BYTES
        if num_sent == 1:
            time.sleep(1.0)
        send(sock, view, stopped)  # type: ignore[arg-type]

    monkeypatch.setattr(direct, "_send_bytes", held_up)
    assert await pair.here.transfer.probe("far")
    assert pair.link().bytes_per_s > 2 * direct.PROBE_BYTES


async def test_an_actor_that_ends_in_one_of_its_own_tasks_ends_whole(pair: Pair) -> None:
    """As an orphan does: after `close` it ends its process."""
    ended = asyncio.Event()

    async def as_an_orphan() -> None:
        await pair.here.transfer.close()
        ended.set()

    pair.here.transfer._spawn(as_an_orphan())
    await asyncio.wait_for(ended.wait(), 10.0)
