"""Healthy means: a request that comes now is served, if need be by waking a pool."""

from __future__ import annotations

from typing import Any

import pytest

from actors.controller import status as view
from actors.controller.machine import Machine
from app.api.health import cannot_serve
from cluster.spec import ClusterSpec


def spec(**settings: Any) -> ClusterSpec:
    return ClusterSpec.load("local-cpu", {f"pools.decode.{name}": value for name, value in settings.items()})


def status(of: ClusterSpec, *decode: str, target: int | None = None, **facts: str) -> dict[str, Any]:
    """What the controller says, with decode replicas in these states."""
    found = view.status(Machine(of, 1, 0), 1)
    for state in decode:
        facts = {"generation": "g", "tokenizer": "t"} | facts
        found["pools"]["decode"]["replicas"].append({"replica_id": "d", "state": state, **facts})
    found["pools"]["decode"] |= {"target": target, "wanted": None}
    return found


def judge(of: ClusterSpec, seen: dict[str, Any]) -> str:
    return cannot_serve(seen, of, "g", "t")


@pytest.mark.parametrize("state", ["starting", "ready", "stale"])
def test_one_decode_replica_is_enough(state: str) -> None:
    assert judge(spec(), status(spec(), state)) == ""


@pytest.mark.parametrize("state", ["draining", "fenced"])
def test_a_replica_that_takes_no_tickets_serves_no_client(state: str) -> None:
    assert judge(spec(), status(spec(), state)).startswith("no decode replica has joined")


def test_a_pool_at_zero_that_a_request_wakes_is_healthy() -> None:
    sleepy = ClusterSpec.load(
        "local-cpu", {"scaling.mode": "occupancy", "pools.decode.min_replicas": 0, "pools.decode.max_replicas": 2}
    )
    assert judge(sleepy, status(sleepy, target=0)) == ""
    by_hand = spec(min_replicas=0, max_replicas=2)
    assert "pageferry scale decode 1" in judge(by_hand, status(by_hand, target=0))


def test_a_decode_checkpoint_with_another_tokenizer_is_named() -> None:
    assert "has another tokenizer" in judge(spec(), status(spec(), "ready", tokenizer="u"))
    assert judge(spec(), status(spec(), "ready", tokenizer="u", generation="older")) == "", "in a rolling change"
