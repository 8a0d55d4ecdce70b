"""The background loops of a frontend: no call and no exception ends them, and one that stands still is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from actors.messages import (
    Adopt,
    Claim,
    CommandKind,
    Configure,
    FrontendCommand,
    FrontendHeartbeat,
    FrontendReply,
    ReplicaLeaving,
)
from app.rpc import controller_loops
from app.rpc.controller_loops import ControllerLoops
from cluster.spec import ClusterSpec

CONFIGURATION = Configure(ClusterSpec.load("local-cpu"))
NAMES = {FrontendHeartbeat: "heartbeat", Configure: "configure", Adopt: "adopt", ReplicaLeaving: "replica_leaving"}


class Cluster:
    """Controller and tickets; `hangs` and `fails` name the calls that do."""

    def __init__(self) -> None:
        self.hangs: set[str] = set()
        self.fails: set[str] = set()
        self.calls: list[str] = []
        self.obeyed: list[int] = []
        self.reachable: list[tuple[str, ...] | None] = []  # as each heartbeat said it
        self.given: asyncio.Queue[list[FrontendCommand]] = asyncio.Queue()
        self.known = True

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.get_running_loop().create_future()
        if name in self.fails:
            raise RuntimeError(name)

    async def call(self, message: Any, patience_s: float = 15.0) -> Any:
        if isinstance(message, FrontendHeartbeat):
            self.reachable.append(message.reachable)
        await self._call(NAMES[type(message)])  # type: ignore[index]
        return FrontendReply(epoch=1, known=self.known) if isinstance(message, FrontendHeartbeat) else None

    async def orders(self, timeout_s: float) -> list[FrontendCommand]:
        await self._call("orders")
        return await self.given.get()

    def restart(self) -> None:
        self.calls.append("restart")
        if "restart" in self.fails:
            raise RuntimeError("restart")

    def live_tickets(self) -> tuple[int, ...]:
        return ()

    def claims(self) -> tuple[Claim, ...]:
        return ()

    def obey(self, order: FrontendCommand) -> None:
        self.obeyed.append(order.ticket_id)
        if "obey" in self.fails:
            raise RuntimeError("obey")


class Tickets:
    frontend_id = "f"

    def __init__(self, cluster: Cluster) -> None:
        self.live_tickets, self.claims, self.obey = cluster.live_tickets, cluster.claims, cluster.obey
        self.left: list[str] = []

    def replica_leaving(self, replica_id: str) -> None:
        self.left.append(replica_id)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(controller_loops, "HEARTBEAT_EVERY_S", 0.01)
    monkeypatch.setattr(controller_loops, "ORDERS_S", 0.05)
    return Cluster()


@pytest.fixture
def loops(cluster: Cluster) -> Iterator[ControllerLoops]:
    made = ControllerLoops(cluster, Tickets(cluster), CONFIGURATION, hung_s=0.05)
    yield made
    made.stop()


async def called(cluster: Cluster, name: str, times: int) -> None:
    before = cluster.calls.count(name)
    async with asyncio.timeout(10):
        while cluster.calls.count(name) < before + times:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("call", ["heartbeat", "configure", "adopt"])
async def test_a_controller_that_hangs_in_any_call_is_started_again(
    cluster: Cluster, loops: ControllerLoops, call: str
) -> None:
    cluster.known = False
    cluster.hangs = {call}
    cluster.fails = {"restart"}  # and when that fails it is tried again
    loops.start()
    await called(cluster, "restart", 2)
    cluster.hangs.clear()
    await called(cluster, "adopt", 2)
    assert loops.standing_still() == ""


@pytest.mark.parametrize("call", ["heartbeat", "configure", "adopt", "orders"])
async def test_no_exception_ends_a_loop(cluster: Cluster, loops: ControllerLoops, call: str) -> None:
    cluster.known = False
    cluster.fails = {call}
    loops.start()
    await called(cluster, call, 3)
    assert loops.standing_still() == ""


async def test_what_is_reachable_is_said_as_soon_as_it_changes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_loops, "HEARTBEAT_EVERY_S", 30.0)
    known = ["d1"]
    loops = ControllerLoops(cluster, Tickets(cluster), CONFIGURATION, 5.0, lambda: known)
    loops.start()
    try:
        for name in ("d2", "d3"):
            known.append(name)
            loops.replicas_changed()
            await called(cluster, "heartbeat", 1)
        assert cluster.reachable == [("d1", "d2"), ("d1", "d2", "d3")]
    finally:
        loops.stop()


async def test_an_order_that_fails_leaves_the_others_alone(cluster: Cluster, loops: ControllerLoops) -> None:
    cluster.fails = {"obey"}
    loops.start()
    cluster.given.put_nowait([FrontendCommand(kind=CommandKind.LOST, ticket_id=number, attempt=1) for number in (1, 2)])
    async with asyncio.timeout(10):
        while cluster.obeyed != [1, 2]:
            await asyncio.sleep(0.01)


async def test_orders_that_hang_are_asked_for_again(cluster: Cluster, loops: ControllerLoops) -> None:
    cluster.hangs = {"orders"}
    loops.start()
    await called(cluster, "orders", 2)


async def test_health_sees_a_loop_that_has_ended_or_stands_still(
    cluster: Cluster, loops: ControllerLoops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops.start()
    await called(cluster, "heartbeat", 1)
    assert loops.standing_still() == ""
    task = loops._tasks["orders"]
    task.cancel()
    await asyncio.wait((task,))
    assert loops.standing_still() == "the orders loop has ended"

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    stuck = ControllerLoops(cluster, Tickets(cluster), CONFIGURATION, hung_s=0.0)
    monkeypatch.setattr(stuck, "_heartbeat", never)
    monkeypatch.setattr(controller_loops, "ORDERS_S", 0.01)
    stuck.start()
    try:
        async with asyncio.timeout(10):
            while not stuck.standing_still().startswith("the heartbeat loop has not come round"):
                await asyncio.sleep(0.02)
    finally:
        stuck.stop()


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
async def test_a_leaving_replica_is_known_here_also_when_the_controller_is_away(cluster: Cluster, trouble: str) -> None:
    getattr(cluster, trouble).add("replica_leaving")
    tickets = Tickets(cluster)
    loops = ControllerLoops(cluster, tickets, CONFIGURATION, hung_s=0.05)
    loops.replicas_left(["d1", "d2"])
    async with asyncio.timeout(10):
        while tickets.left != ["d1", "d2"]:
            await asyncio.sleep(0.01)
