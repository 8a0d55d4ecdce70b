"""A node's transfer actor without Ray, with real sockets, real memory and real processes that end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import ray
from live_transfer import MIB, Node, until

from actors.messages import Lease, Role, Sealed, TransferReport
from actors.transfer.channel import Hello, PagesSealed, WriterDone
from actors.transfer.link import WorkerLink
from actors.transfer.staging import StagingError
from ops.engine_pair import LocalHandle


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.transfer.start()
    try:
        yield made
    finally:
        await made.close()


def sealed(ticket_id: int, first_page: int = 0, last: bool = False) -> PagesSealed:
    return PagesSealed(
        ticket_id=ticket_id,
        attempt=1,
        shard=0,
        num_shards=1,
        first_page=first_page,
        digests=[1, 2],
        layout_fingerprint="l",
        num_tokens=64,
        last=last,
    )


def maps_of_staging() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pageferry-staging")


# -- engines and their bytes


async def test_a_writer_that_ends_gives_back_what_it_had_half_written(node: Node) -> None:
    link = await node.link()
    await node.lease(1)
    link.send(sealed(1))
    await until(lambda: len(node.machine.seals) == 1)
    await asyncio.to_thread(link.close)
    await until(lambda: node.machine.staging.bytes_held == 0)
    await until(lambda: node.controller.lost.get((1, 1)) == "engine p#0 is gone")


async def test_a_writer_that_cannot_seal_is_reported_at_once(node: Node) -> None:
    """Not when the hand-over's deadline or the lease ends."""
    link = await node.link()
    await node.lease(1)
    link.send(WriterDone(ticket_id=1, attempt=1))
    await until(lambda: (1, 1) in node.controller.lost)
    assert node.controller.lost[(1, 1)] == "engine p#0 is done without a complete seal"


async def test_what_can_never_be_had_raises_and_what_is_full_waits(node: Node) -> None:
    await node.link()
    with pytest.raises(StagingError, match="staging_bytes_max"):
        await node.transfer.lease(1, 1, 2 * MIB, ["p#0"], 5.0)
    await node.lease(2, num_bytes=MIB)
    assert await node.transfer.lease(3, 1, MIB, ["p#0"], 0.2) is None
    waiting = asyncio.ensure_future(node.transfer.lease(4, 1, MIB, ["p#0"], 20.0))
    await asyncio.sleep(0)
    await node.transfer.drop_writer(2, 1, ["p#0"])
    assert isinstance(await waiting, Lease)


async def test_both_ends_see_the_same_bytes_and_neither_can_shrink_them(node: Node) -> None:
    link = await node.link()
    lease = await node.lease(1)
    with link.staging.bytes_of(lease) as view:
        assert view is not None and len(view) == 10_000
        view[:3] = b"abc"
    assert node.transfer.memory.map[lease.offset : lease.offset + 3] == b"abc"
    with pytest.raises(PermissionError):
        os.ftruncate(node.transfer.memory.fd, 4096)
    assert os.readlink(f"/proc/self/fd/{node.transfer.memory.fd}") == "/memfd:pageferry-staging (deleted)"


async def test_an_engine_whose_process_was_killed_is_gone_though_a_child_has_its_socket(node: Node) -> None:
    code = f"""
import os, time
from actors.transfer.channel import Hello
from actors.transfer.link import WorkerLink
link = WorkerLink({node.transfer.links.path!r}, Hello(engine="p#9", role="prefill", pid=1))
if child := os.fork():
    print(child, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        await until(lambda: node.machine.engines.ready(("p#9",)))
        await node.lease(1, "p#9")
        process.kill()
        await until(lambda: node.machine.staging.bytes_held == 0)
        await until(lambda: (1, 1) in node.controller.lost)
    finally:
        os.kill(child, signal.SIGKILL)
        end(process)


async def test_an_engine_that_loses_its_link_keeps_no_bytes_and_touches_none(node: Node) -> None:
    """Its process lives: the bytes are lent again only when it has let go of them."""
    link = await node.link()
    lease = await node.lease(1, num_bytes=MIB)
    with link.staging.bytes_of(lease) as view:
        assert view is not None
        node.transfer.links.close()
        node.transfer.links.start()
        await until(lambda: (1, 1) in node.controller.lost)
        await until(lambda: node.machine.engines.links["p#0"] == 2)
        await asyncio.sleep(0.3)
        assert node.machine.staging.bytes_held > 0 and not node.machine.engines.ready(("p#0",))
    await until(lambda: node.machine.staging.bytes_held == 0)
    await node.lease(2, num_bytes=MIB)
    with link.staging.bytes_of(lease) as view:
        assert view is None, "a late page of the ticket whose bytes were taken away"


# -- a transfer actor that hangs or dies


ACTOR = """
import asyncio, sys
from actors.transfer.actor import KVTransfer
from ops.engine_pair import LocalHandle, FakeController

async def main():
    transfer = KVTransfer("ab" * 16, 64 << 20, 60.0, sys.argv[1])
    transfer._controller = LocalHandle(FakeController())
    print((await transfer.start())["socket"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def actor_process(application: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", ACTOR, application], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_an_actor_that_hangs_stops_no_engine_and_is_found_again() -> None:
    application = f"t{os.getpid()}"
    process, path = actor_process(application)
    link = WorkerLink(path, Hello(engine="p#0", role=Role.PREFILL, pid=1))
    link.RETRY_S = 0.05  # type: ignore[misc]
    try:
        await until(lambda: link.staging._map is not None)
        os.kill(process.pid, signal.SIGSTOP)
        longest, message = 0.0, sealed(1)
        for _ in range(100_000):  # more than the socket and the link's own bound take
            began = time.perf_counter()
            link.send(message)
            longest = max(longest, time.perf_counter() - began)
        assert longest < 1.0, "a step waited for it"
        assert link.dropped > 0
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: link.staging._map is not None and link.send(message))
    finally:
        link.close()
        end(process)


@pytest.mark.compiles  # two processes load Ray
async def test_memory_of_an_actor_that_died_goes_and_the_next_one_is_mapped() -> None:
    """Engines kept the old memory mapped until new memory came, which then did not fit."""
    before, application = maps_of_staging(), f"u{os.getpid()}"
    process, path = actor_process(application)
    link = WorkerLink(path, Hello(engine="p#0", role=Role.PREFILL, pid=1))
    link.RETRY_S = 0.05  # type: ignore[misc]
    try:
        await until(lambda: maps_of_staging() == before + 1)
        end(process)
        await until(lambda: maps_of_staging() == before)
        process, again = actor_process(application)
        assert again == path
        await until(lambda: maps_of_staging() == before + 1)
    finally:
        await asyncio.to_thread(link.close)
        end(process)
    await until(lambda: maps_of_staging() == before)


# -- the controller


class Restarting:
    """A controller that fails one report, and remembers what it got before and after."""

    def __init__(self) -> None:
        self.failing = False
        self.reports: list[list[object]] = []

    async def call(self, report: TransferReport) -> list[tuple[int, int]]:
        if self.failing:
            self.failing = False
            self.reports.clear()
            raise ray.exceptions.ActorUnavailableError("it is starting again", None)
        self.reports.append(list(report.events))
        return []


async def test_a_controller_that_was_away_hears_again_of_every_seal_that_waits_for_its_reader(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Restarting()
    node.transfer._controller = LocalHandle(controller)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: LocalHandle(controller))
    link = await node.link()
    for ticket_id in (1, 2, 3):
        await node.lease(ticket_id)
        link.send(sealed(ticket_id, last=True))

    def seals_reported() -> list[int]:
        return [event.seal.ticket_id for report in controller.reports for event in report if isinstance(event, Sealed)]

    await until(lambda: sorted(seals_reported()) == [1, 2, 3])
    await node.transfer.release([(2, 1)])
    controller.failing = True
    await until(lambda: not controller.failing and len(controller.reports) > 1)
    assert sorted(seals_reported()) == [1, 3], "once each, and not the one whose bytes are given back"
