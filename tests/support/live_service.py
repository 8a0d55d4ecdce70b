"""A running service as its tests see it: ports, status, and what it must not hold when nothing is asked of it."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from typing import Any

from app.commands.serve import Service

STORY = "The old lighthouse keeper climbed the winding stairs each evening to light the lamp. "
LONG = STORY * 85  # about 1,700 tokens: seconds of prefill in chunks of 256


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def fetch(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.load(answer)


def leftovers(status: dict[str, Any], audit: dict[str, Any]) -> list[str]:
    """What a service without requests must not hold, in words; empty when it is as it should be."""
    found = list(audit["breaches"])
    if status["tickets"]["in_flight"]:
        found.append(f"tickets in flight: {status['tickets']['by_state']}")
    if status["staging"]["bytes_held"] or status["staging"]["leases"]:
        found.append(f"staging holds {status['staging']['bytes_held']} bytes in {status['staging']['leases']} leases")
    if status["queue"]["waiting"]:
        found.append(f"{status['queue']['waiting']} requests wait")
    for pool, each in ((p, r) for p, q in status["pools"].items() for r in q["replicas"]):
        counts = {name: each[name] for name in ("blocks_held", "blocks_quarantined", "running", "waiting")}
        if any(counts.values()):
            found.append(f"{pool} {each['replica_id']} holds {counts}")
        if each["blocks_free"] + each["blocks_held"] + each["blocks_quarantined"] != each["blocks_total"]:
            found.append(f"{pool} {each['replica_id']} does not add up: {each}")
    return found


def wait_quiet(url: str, timeout_s: float = 15.0) -> None:
    until = time.monotonic() + timeout_s
    while left := leftovers(fetch(url, "/status"), fetch(url, "/status/audit")):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def wait_for(what: Any, timeout_s: float = 20.0) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)
    return found


def states(service: Service) -> dict[str, int]:
    found: dict[str, int] = fetch(service.url, "/status")["tickets"]["by_state"]
    return {state: count for state, count in found.items() if count}


def ended(service: Service) -> dict[str, int]:
    found: dict[str, int] = fetch(service.url, "/status")["tickets"]["ended"]
    return found
