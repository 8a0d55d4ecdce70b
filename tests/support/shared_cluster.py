"""A Ray cluster that several applications share, as its tests see it: routes below a prefix, our actors in it."""

from __future__ import annotations

import json
import time
from typing import Any

import ray
from live_service import free_port

from app.commands.own_http import DIRECT
from cluster.names import NAMESPACE

GONE_S = 90.0
__all__ = ["actors", "free_port", "get", "wait_gone", "wait_healthy"]


def get(port: int, path: str) -> Any:
    with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.load(answer)


def wait_healthy(url: str, timeout_s: float = 180.0) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            with DIRECT.open(f"{url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            assert time.monotonic() < until, error
        time.sleep(0.5)


def actors() -> set[str]:
    return {
        found["name"] for found in ray.util.list_named_actors(all_namespaces=True) if found["namespace"] == NAMESPACE
    }


def wait_gone(prefix: str) -> None:
    """Until no actor of ours has a name that begins so."""
    until = time.monotonic() + GONE_S
    while left := [actor for actor in actors() if actor.startswith(prefix)]:
        assert time.monotonic() < until, left
        time.sleep(1.0)
