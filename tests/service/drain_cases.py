"""A Ray node with a real decode engine is drained under load: nothing is dropped, and the node is free in time.

Three raylets on this machine: one for the frontend, and two that have room for one engine each, the second of which
comes only when the first is to go.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from shared_cluster import free_port, get, wait_healthy

from app.client import Client
from app.commands.drain import replicas_on
from app.main import build

SECONDS = 150  # until the node is taken away; an engine starts in 15 to 90 s here
ANSWER = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Cluster, int]]:
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("AUTH_MODE", "disabled"), ("TMPDIR", folder), ("worker_niceness", "0")):
            patch.setenv(f"RAY_{name}", value)
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
        made, port = Cluster(initialize_head=True, head_node_args=head), free_port()
        try:
            ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
            serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
            yield made, port
            serve.shutdown()
        finally:
            ray.shutdown()
            made.shutdown()


def add(cluster: Cluster) -> str:
    """A node with room for one engine; its id."""
    node: Any = cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=100 << 20)
    return str(node.node_id)


@pytest.mark.timeout(800)
def test_a_drained_node_drops_nothing(cluster: tuple[Cluster, int]) -> None:
    rays, port = cluster
    first = add(rays)
    settings = {
        "pools.prefill.replicas": 0,
        "pools.decode.resources": {"engine": 1},
        "pools.decode.surge_percent": 0,
        "pools.decode.engine_args.num_gpu_blocks_override": 320,
        "model.max_model_len": 1024,
        "frontend.port": port,
    }
    serve.run(build({"config": "local-cpu", **settings}), name="drained", blocking=False)
    url = f"http://127.0.0.1:{port}"
    wait_healthy(url, 300)
    over, answers, errors = threading.Event(), list[int](), list[str]()

    def ask(number: int) -> None:
        with Client(url, timeout_s=400) as client:
            while not over.is_set():
                try:
                    answers.append(client.complete(f"{number}: The sea", **ANSWER).usage.completion_tokens)
                except Exception as error:
                    errors.append(f"{number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2.0)
        second = add(rays)
        command = [sys.executable, "-m", "app.cli", "drain", "--address", rays.address, "--node-id", first]
        done = subprocess.Popen([*command, "--seconds", str(SECONDS)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until = time.monotonic() + 20
        while [each["state"] for each in decode(port)][:1] != ["draining"]:
            assert time.monotonic() < until, "it gets no new tickets within seconds, long before there is another one"
            time.sleep(0.25)
        assert done.wait(SECONDS + 60) == 0, done.stdout and done.stdout.read()
        assert replicas_on(first) == []
        rays.remove_node(next(node for node in rays.worker_nodes if node.node_id == first))
        answered = len(answers)
        until = time.monotonic() + 120
        while len(answers) < answered + 3:
            assert time.monotonic() < until, "the other node serves"
            time.sleep(0.5)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == [] and set(answers) == {150}
    assert [(each["node_id"], each["state"]) for each in decode(port)] == [(second, "ready")]
    assert get(port, "/status/audit")["breaches"] == []


def decode(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(port, "/status")["pools"]["decode"]["replicas"]
    return found
