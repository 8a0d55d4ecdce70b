"""One real service for the whole session: Ray, Serve, two frontends, one prefill and two decode engines.

Both pools keep FP8 pages, so that a plain vLLM server with the same settings computes the same numbers. Each test ends
with `quiet`: nothing of its requests is left anywhere, and no law of the controller is broken.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.client import Client
from app.commands.serve import Service
from cluster.spec import ClusterSpec
from ops.bench.parity import SETTINGS

BLOCKS = 320  # pages a replica: 10,240 tokens
MAX_LEN = 2048


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def service_spec() -> ClusterSpec:
    return ClusterSpec.load(
        "local-cpu",
        {
            "model.max_model_len": MAX_LEN,
            **SETTINGS,
            "pools.prefill.max_num_batched_tokens": 256,
            "pools.decode.replicas": 2,
            "pools.prefill.engine_args.num_gpu_blocks_override": BLOCKS,
            "pools.decode.engine_args.num_gpu_blocks_override": BLOCKS,
            "admission.queue_wait_s": 1.0,
            "admission.queue_max": 4,
            "transfer.staging_bytes_max": 64 << 20,
            "frontend.replicas": 2,
            "frontend.port": free_port(),
        },
    )


@pytest.fixture(scope="session")
def spec() -> ClusterSpec:
    return service_spec()


@pytest.fixture(scope="session")
def service(spec: ClusterSpec) -> Iterator[Service]:
    before = dict(os.environ)
    made = Service(spec, None, dashboard_port=free_port())
    try:
        made.start()
        made.wait_healthy(240)
        yield made
    finally:
        made.stop()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as made:
        yield made


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


@pytest.fixture
def quiet(service: Service) -> Iterator[Callable[[], None]]:
    """Checks before and after the test that the service holds nothing; the value checks it in between."""

    def check() -> None:
        wait_quiet(service.url)

    check()
    yield check
    check()
