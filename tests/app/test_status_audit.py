"""The audit over all processes: the controller's laws, each engine's, and engines that do not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api import status
from app.api.status import whole_audit


def controller(*breaches: str) -> Any:
    async def ask() -> dict[str, Any]:
        states = {"p": ("prefill", "ready"), "d": ("decode", "draining"), "gone": ("decode", "fenced")}
        replicas = {name: {"pool": pool, "state": state} for name, (pool, state) in states.items()}
        return {"clean": not breaches, "breaches": list(breaches), "replicas": replicas}

    return ask


async def test_engines_are_asked_and_what_they_break_is_a_breach() -> None:
    asked = []

    async def engine(pool: str, replica_id: str) -> dict[str, Any]:
        asked.append((pool, replica_id))
        laws = ["page 3 has 1 references for 2 claims"] if replica_id == "d" else []
        return {"integrity": {"mode": "check", "laws_broken": laws}}

    found = await whole_audit(controller("tickets do not add up"), engine)
    assert asked == [("prefill", "p"), ("decode", "d")], "a fenced replica is no part of the service"
    assert found["breaches"] == ["tickets do not add up", "d: page 3 has 1 references for 2 claims"]
    assert not found["clean"] and set(found["engines"]) == {"p", "d"} and found["silent"] == {}


async def test_with_integrity_off_there_is_no_ledger_to_break() -> None:
    async def engine(pool: str, replica_id: str) -> dict[str, Any]:
        return {"integrity": {"mode": "off"}}

    found = await whole_audit(controller(), engine)
    assert found["clean"] and found["breaches"] == []


async def test_an_engine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ENGINE_S", 0.01)

    async def engine(pool: str, replica_id: str) -> dict[str, Any]:
        if replica_id == "p":
            await asyncio.sleep(60)
        raise ConnectionError("it died\nwith a long tail")

    found = await whole_audit(controller(), engine)
    assert found["engines"] == {} and found["clean"]
    assert found["silent"] == {"p": "no answer within 0.01 s", "d": "ConnectionError: it died"}
