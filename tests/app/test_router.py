"""The request router's choices, on Serve's own base class; the calls themselves run in tests/service."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from app.rpc import directory, router
from app.rpc.ports import ReplicaGone
from app.rpc.router import AddressedRouter

DEPLOYMENT = DeploymentID(name="Decode", app_name="test")


class Replica(SimpleNamespace):
    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def replica(name: str) -> Any:
    return Replica(replica_id=ReplicaID(unique_id=name, deployment_id=DEPLOYMENT), max_ongoing_requests=10)


def pending(name: str) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=f"of {name}", session_id=name)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> AddressedRouter:
    monkeypatch.setattr(directory, "_replicas", {})
    made = AddressedRouter(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    made.initialize_state()
    return made


async def choose(made: AddressedRouter, name: str) -> tuple[list[str], PendingRequest]:
    request = pending(name)
    chosen = await made.choose_replicas(list(made.curr_replicas.values()), request)
    return [each.replica_id.unique_id for rank in chosen for each in rank], request


async def test_a_call_goes_to_the_replica_it_names(made: AddressedRouter) -> None:
    made.update_replicas([replica("a"), replica("b")])
    for name in ("a", "b"):
        assert (await choose(made, name))[0] == [name]
    assert set((await choose(made, ""))[0]) == {"a", "b"}
    assert directory.live("Decode") == {"a", "b"}


async def test_a_draining_replica_stays_reachable_but_is_nobodys_choice(made: AddressedRouter) -> None:
    changes: list[tuple[str, frozenset[str], frozenset[str]]] = []
    directory.watch(lambda *change: changes.append(change))
    made.update_replicas([replica("a"), replica("b")])
    made.update_replicas([replica("a")])
    assert (await choose(made, "b"))[0] == ["b"]
    assert (await choose(made, ""))[0] == ["a"]
    assert changes[-1] == ("Decode", frozenset({"a"}), frozenset({"b"}))
    made.update_replicas([])
    assert (await choose(made, "a"))[0] == ["a"], "also when no replica is left"


async def test_a_dead_replica_fails_the_call_at_once(made: AddressedRouter) -> None:
    made.update_replicas([replica("a"), replica("b")])
    made.on_replica_actor_died(ReplicaID(unique_id="b", deployment_id=DEPLOYMENT))
    _, request = await choose(made, "b")
    with pytest.raises(ReplicaGone, match="b is gone: it died"):
        await request.future
    assert directory.live("Decode") == {"a"}
    made.update_replicas([replica("a")])
    _, request = await choose(made, "b")
    assert isinstance(request.future.exception(), ReplicaGone), "and stays dead"


async def test_a_call_to_an_unknown_replica_never_waits_in_the_router(made: AddressedRouter) -> None:
    """All routers of a process share one event loop: what waits in it holds up every call to every replica."""
    made.update_replicas([replica("old")])
    loop = asyncio.get_running_loop()
    unknown = [asyncio.ensure_future(made._choose_replica_for_request(pending(f"new{n}"))) for n in range(12)]
    began = loop.time()
    found = await asyncio.wait_for(made._choose_replica_for_request(pending("old")), 5)
    assert found.replica_id.unique_id == "old"
    for answer in await asyncio.wait_for(asyncio.gather(*unknown, return_exceptions=True), 5):
        assert isinstance(answer, ReplicaGone)
    assert loop.time() - began < 1


async def test_a_replica_that_serve_has_not_announced_yet_is_waited_for_outside(made: AddressedRouter) -> None:
    made.update_replicas([replica("a")])
    waiting = asyncio.ensure_future(directory.wait_until_known("Decode", "new", 30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    # From a thread of Serve's, as its routers do.
    await asyncio.to_thread(made.update_replicas, [replica("a"), replica("new")])
    await asyncio.wait_for(waiting, 5)
    await directory.wait_until_known("Decode", "a", 0)
    made.update_replicas([replica("a")])
    await directory.wait_until_known("Decode", "new", 0)  # it is leaving: what is its own still reaches it


async def test_waiting_for_a_replica_ends(made: AddressedRouter) -> None:
    made.update_replicas([replica("a"), replica("b")])
    with pytest.raises(ReplicaGone, match="new is gone: Serve has not known it"):
        await directory.wait_until_known("Decode", "new", 0.02)
    waiting = asyncio.ensure_future(directory.wait_until_known("Decode", "c", 30))
    await asyncio.sleep(0)
    made.on_replica_actor_died(ReplicaID(unique_id="c", deployment_id=DEPLOYMENT))
    with pytest.raises(ReplicaGone, match="c is gone: it died"):
        await asyncio.wait_for(waiting, 5)
    assert not directory._waiting


async def test_a_full_replica_does_not_stop_the_event_loop(made: AddressedRouter) -> None:
    """Serve asks again and again while the one choice cannot take the call."""
    full = replica("full")
    full.max_ongoing_requests = 0
    made.update_replicas([full])
    waiting = asyncio.ensure_future(made._choose_replica_for_request(pending("full")))
    await asyncio.wait_for(asyncio.sleep(0.05), 5)
    full.max_ongoing_requests = 10
    assert (await asyncio.wait_for(waiting, 10)).replica_id.unique_id == "full"


async def test_the_routing_loop_delivers_and_refuses(made: AddressedRouter) -> None:
    made.update_replicas([replica("a")])
    found = await asyncio.wait_for(made._choose_replica_for_request(pending("a")), 2)
    assert found.replica_id.unique_id == "a"
    made.update_replicas([replica("a"), replica("b")])
    made.on_replica_actor_died(ReplicaID(unique_id="b", deployment_id=DEPLOYMENT))
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(made._choose_replica_for_request(pending("b")), 2)


def test_serve_can_carry_the_router_to_other_processes() -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(router)  # as Serve does
    try:
        copy = cloudpickle.loads(cloudpickle.dumps(AddressedRouter))
    finally:
        cloudpickle.unregister_pickle_by_value(router)
    assert copy.choose_replicas.__globals__["directory"] is directory, "every router must tell the same directory"
