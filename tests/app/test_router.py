"""The request router's choices, on Serve's own base class; the calls themselves run in tests/service."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from app import directory, router
from app.ports import ReplicaGone
from app.router import AddressedRouter

DEPLOYMENT = DeploymentID(name="Decode", app_name="test")


class Replica(SimpleNamespace):
    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def replica(name: str) -> Any:
    return Replica(replica_id=ReplicaID(unique_id=name, deployment_id=DEPLOYMENT), max_ongoing_requests=10)


def pending(name: str) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id=name)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> AddressedRouter:
    monkeypatch.setattr(directory, "_live", {})
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


async def test_a_replica_that_serve_has_not_announced_yet_is_waited_for(
    made: AddressedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.update_replicas([replica("a")])
    chosen, request = await choose(made, "new")
    assert chosen == [] and not request.future.done()
    monkeypatch.setattr(router, "APPEAR_S", -1.0)
    _, request = await choose(made, "new")
    with pytest.raises(ReplicaGone, match="has not known it"):
        await request.future


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
