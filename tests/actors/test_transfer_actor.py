"""A node's transfer actor without Ray: what it does when an engine dies, never shows itself, or asks twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
import ray

from actors.messages import Lease, Role, Sealed, TransferReport
from actors.transfer.actor import KVTransfer
from actors.transfer.channel import Hello, PagesSealed, WorkerLink, WriterDone
from ops.engine_pair import FakeController, LocalHandle

LEASE_S = 0.3


class ControllerDriver:
    def __init__(self) -> None:
        self.notary = FakeController()
        self.transfer = KVTransfer(uuid.uuid4().hex, 1 << 20, LEASE_S, "")
        self.transfer._controller = LocalHandle(self.notary)

    async def link(self, engine: str) -> WorkerLink:
        link = WorkerLink(self.transfer.socket_path, Hello(engine=engine, role=Role.PREFILL, pid=1))
        await until(lambda: engine in self.transfer._links)
        return link

    async def lease(self, ticket_id: int, engine: str = "p#0") -> Lease:
        lease = await self.transfer.lease(ticket_id, 1, 10_000, [engine], 0.1)
        assert lease is not None
        return lease


async def until(what: object, timeout_s: float = 5.0) -> None:
    assert callable(what)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not what():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.fixture
async def rig() -> AsyncIterator[ControllerDriver]:
    made = ControllerDriver()
    await made.transfer.start()
    try:
        yield made
    finally:
        await made.transfer.close()


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


async def test_a_writer_that_dies_gives_back_what_it_had_half_written(rig: ControllerDriver) -> None:
    link = await rig.link("p#0")
    await rig.lease(1)
    link.send(sealed(1))
    await until(lambda: len(rig.transfer.seals) == 1)
    link.close()
    await until(lambda: rig.transfer.staging.bytes_held == 0)
    assert len(rig.transfer.seals) == 0
    await until(lambda: (1, 1) in rig.notary.lost)
    assert rig.notary.lost[(1, 1)] == "engine p#0 is gone"


async def test_an_engine_that_is_gone_gets_no_bytes(rig: ControllerDriver) -> None:
    """Its replica may not know yet; nothing would tell when the bytes are free again."""
    link = await rig.link("p#0")
    link.close()
    await until(lambda: not rig.transfer._links)
    assert await rig.transfer.lease(1, 1, 10_000, ["p#0"], 5.0) is None
    assert rig.transfer.staging.bytes_held == 0
    back = await rig.link("p#0")
    await rig.lease(1)
    back.close()


async def test_a_lease_that_was_given_up_while_it_waited_is_not_granted(rig: ControllerDriver) -> None:
    link = await rig.link("p#0")
    assert await rig.transfer.lease(1, 1, 1 << 20, ["p#0"], 0.1) is not None  # everything there is
    waiting = asyncio.ensure_future(rig.transfer.lease(2, 1, 10_000, ["p#0"], 5.0))
    await asyncio.sleep(0.02)
    await rig.transfer.drop_writer(2, 1, ["p#0"])  # its caller has left
    await rig.transfer.drop_writer(1, 1, ["p#0"])
    assert await waiting is None
    assert rig.transfer.staging.bytes_held == 0
    link.close()


async def test_pages_of_a_lease_that_is_not_here_leave_nothing_behind(rig: ControllerDriver) -> None:
    """A prefill that was under way when the actor was restarted goes on telling of its pages."""
    link = await rig.link("p#0")
    link.send(sealed(7, first_page=4, last=True))
    link.send(sealed(8))
    link.send(WriterDone(ticket_id=8, attempt=1))
    await rig.lease(9)
    link.send(sealed(9, last=True))
    await until(lambda: (9, 1) in rig.notary.sealed)
    assert len(rig.transfer.seals) == 0 and not rig.transfer.seals._void
    assert set(rig.notary.sealed) == {(9, 1)}
    link.close()


async def test_the_same_lease_asked_for_twice_is_the_same_bytes(rig: ControllerDriver) -> None:
    """Ray repeats calls whose answer it lost."""
    link = await rig.link("p#0")
    first, again, other = await rig.lease(1), await rig.lease(1), await rig.lease(2)
    assert first == again and other.offset != first.offset
    assert rig.transfer.status().held == ((1, 1), (2, 1))
    await rig.transfer.drop_writer(1, 1, ["p#0"])
    assert rig.transfer.status().held == ((2, 1),)
    link.close()


async def test_bytes_of_an_engine_that_never_shows_itself_are_not_lost(rig: ControllerDriver) -> None:
    """It died between two lives of the actor: there is no connection whose end would tell."""
    await rig.lease(1, "ghost#0")
    await until(lambda: (1, 1) in rig.notary.lost)  # the lease has run out, but somebody might still write there
    assert rig.transfer.staging.bytes_held > 0
    await until(lambda: rig.transfer.staging.bytes_held == 0)


async def test_bytes_of_a_slow_engine_that_is_there_stay_its_own(rig: ControllerDriver) -> None:
    link = await rig.link("p#0")
    await rig.lease(1)
    await until(lambda: (1, 1) in rig.notary.lost)
    await asyncio.sleep(3 * LEASE_S)
    assert rig.transfer.staging.bytes_held > 0, "it may write there until it says that it will not"
    link.send(WriterDone(ticket_id=1, attempt=1))
    await until(lambda: rig.transfer.staging.bytes_held == 0)
    link.close()


async def test_an_engine_finds_the_next_life_of_the_actor_by_itself() -> None:
    first = ControllerDriver()
    await first.transfer.start()
    link = await first.link("p#0")
    link.RETRY_S = 0.05
    await first.transfer.close()
    second = ControllerDriver()
    second.transfer.socket_path = first.transfer.socket_path  # of the same node
    await second.transfer.start()
    try:
        await until(lambda: "p#0" in second.transfer._links)  # nothing was sent meanwhile
        await second.lease(1)
        link.close()
        await until(lambda: second.transfer.staging.bytes_held == 0)
    finally:
        await second.transfer.close()


class Restarting:
    """A controller that fails one report, and remembers what it was told before and after."""

    def __init__(self) -> None:
        self.failing = False
        self.told: list[list[object]] = []

    async def call(self, report: TransferReport) -> list[tuple[int, int]]:
        if self.failing:
            self.failing = False
            self.told.clear()
            raise ray.exceptions.ActorUnavailableError("it is starting again", None)
        self.told.append(list(report.events))
        return []


async def test_a_controller_that_was_away_hears_again_of_every_seal_that_waits_for_its_reader(
    rig: ControllerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Restarting()
    rig.transfer._controller = LocalHandle(controller)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: LocalHandle(controller))
    link = await rig.link("p#0")
    rig.transfer.lease_ns = 60 * 10**9
    for ticket_id in (1, 2, 3):
        await rig.lease(ticket_id)
        link.send(sealed(ticket_id, last=True))

    def told() -> list[int]:
        return [event.seal.ticket_id for report in controller.told for event in report if isinstance(event, Sealed)]

    await until(lambda: sorted(told()) == [1, 2, 3])
    await rig.transfer.release([(2, 1)])
    controller.failing = True
    await until(lambda: not controller.failing and len(controller.told) > 1)
    assert sorted(told()) == [1, 3], "once each, and not the one whose bytes are given back"
    link.close()
