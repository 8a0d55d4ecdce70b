"""Real engines deployed in three ways onto one Ray cluster, and changed under load; two models behind one address.

`pageferry deploy` (Serve's declarative road), again with other settings while requests run; `serve.run(build(...))`
with a handle; an ingress that routes by `model`. Decode alone, so that every engine is one process more.
"""

from __future__ import annotations

import json
import os
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
from shared_cluster import actors, free_port, get, wait_gone, wait_healthy

from app.client import Client, ServiceError
from app.main import build
from app.models import build as build_ingress
from cluster.names import NAMESPACE, controller_actor, transfer_actor

LIGHT = {
    "pools.prefill.replicas": 0,
    "pools.decode.engine_args.num_gpu_blocks_override": 320,
    "model.max_model_len": 1024,
}
ANSWER = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}


class Cluster:
    def __init__(self, http: int, dashboard: int) -> None:
        self.http, self.dashboard = http, dashboard
        self.url = f"http://127.0.0.1:{http}"

    def deploy(self, name: str, **settings: Any) -> dict[str, Any]:
        """`pageferry deploy`, until the new replicas serve; `seconds` is what it took."""
        texts = [f"{key}={value}" for key, value in {**LIGHT, "frontend.port": self.http, **settings}.items()]
        command = [sys.executable, "-m", "app.cli", "deploy", "local-cpu", *texts, "--name", name, "--json"]
        command += ["--route-prefix", f"/{name}", "--dashboard", f"http://127.0.0.1:{self.dashboard}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ})
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def replicas(self, name: str) -> set[str]:
        status = get(self.http, f"/{name}/status")
        return {each["replica_id"] for each in status["pools"]["decode"]["replicas"]} | set(status["frontends"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(free_port(), free_port())
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        options = {"num_cpus": 4, "object_store_memory": 100 << 20, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", dashboard_port=made.dashboard, _temp_dir=folder, **options)
        serve.start(http_options={"host": "127.0.0.1", "port": made.http})
        try:
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()


def test_a_deployed_topology_answers_over_http_and_over_a_handle(cluster: Cluster) -> None:
    began = time.monotonic()
    cluster.deploy("pageferry")
    wait_healthy(f"{cluster.url}/pageferry")
    print(f"`pageferry deploy`: ready after {time.monotonic() - began:.0f} s")
    with Client(f"{cluster.url}/pageferry") as client:
        assert client.chat("Name a colour.", **ANSWER).usage.completion_tokens == 24
    with Client(serve.get_app_handle("pageferry")) as client:
        assert len(list(client.stream_chat("Name a colour.", **ANSWER))) > 1
    names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
    node_id = ray.get_runtime_context().get_node_id()
    assert {controller_actor("pageferry"), transfer_actor("pageferry", node_id)} <= names


def test_a_deployment_under_load_drops_nothing(cluster: Cluster) -> None:
    old, over = cluster.replicas("pageferry"), threading.Event()
    answers: list[int] = []
    errors: list[str] = []

    def ask(number: int) -> None:
        with Client(f"{cluster.url}/pageferry", timeout_s=300) as client:
            while not over.is_set():
                try:
                    done = list(client.stream_complete(f"{number}: The sea", **ANSWER))
                    answers.append(len(done))
                except Exception as error:
                    errors.append(f"{number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        cluster.deploy("pageferry", **{"admission.queue_max": 77})
        until = time.monotonic() + 120
        while old & cluster.replicas("pageferry"):
            assert time.monotonic() < until, "replicas of the old deployment are still there"
            time.sleep(0.5)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == [] and len(answers) > 8, (errors, len(answers))
    status = get(cluster.http, "/pageferry/status")
    assert status["queue"]["max"] == 77 and status["tickets"]["ended"]["failed"] == 0


def test_two_models_behind_one_address(cluster: Cluster) -> None:
    settings = {"config": "local-cpu", **LIGHT, "model.name": "other", "frontend.port": cluster.http}
    handle = serve.run(build(settings), name="second", route_prefix="/second", blocking=False)
    wait_healthy(f"{cluster.url}/second")
    with Client(handle) as client:
        assert client.complete("The sea is", **ANSWER).usage.completion_tokens == 24
    models = {"smollm2": "pageferry", "other": "second"}
    serve.run(build_ingress({"models": models}), name="models", route_prefix="/")
    before = {name: get(cluster.http, f"/{name}/status")["tickets"]["ended"]["done"] for name in models.values()}
    for model, name in models.items():
        with Client(cluster.url, model=model) as client:
            assert "".join(chunk.text for chunk in client.stream_complete("The sea is", **ANSWER))
            assert sorted(card.id for card in client.openai.models.list()) == sorted(models)
        ended = get(cluster.http, f"/{name}/status")["tickets"]["ended"]["done"]
        assert ended == before[name] + 1, "the other's application has not seen it"
    refusal = pytest.raises(ServiceError, match=r"`none` does not exist; there are: other, smollm2")
    with Client(cluster.url, model="none") as client, refusal:
        client.complete("The sea is", **ANSWER)


def test_an_application_that_a_config_no_longer_names_ends_with_its_controller(cluster: Cluster) -> None:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    ServeSubmissionClient(f"http://127.0.0.1:{cluster.dashboard}").deploy_applications({"applications": []})
    wait_gone("pageferry")
    assert controller_actor("second") in actors()
    found: Any = ray.get_actor(controller_actor("second"), namespace=NAMESPACE)
    assert ray.get(found.status.remote())["model"] == "other", "what was started by serve.run stays"
