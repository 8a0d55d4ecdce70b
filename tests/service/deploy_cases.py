"""Real engines deployed in three ways onto one Ray cluster, changed under load, and moved off a node that goes.

`pageferry deploy` (Serve's declarative way), again with other settings while requests run; `serve.run(build(...))`
with a handle; an ingress that routes by `model`; `pageferry drain` of the node with the engine. Decode alone, so that
every engine is one process more. Raylets on this machine: the head has no room for an engine.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from shared_cluster import free_port, get, wait_gone, wait_healthy

from app.client import Client, ServiceError
from app.commands.drain import replicas_on
from app.main import build
from app.models import build as build_ingress
from cluster.names import controller_actor, transfer_actor

ROOT = Path(__file__).parents[2]
LIGHT = {
    "pools.prefill.replicas": 0,
    "pools.decode.resources": {"engine": 1},
    "pools.decode.engine_args.num_gpu_blocks_override": 320,
    "model.max_model_len": 1024,
}
ANSWER = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
GOES_AFTER_S = 200  # an engine starts in 15 to 90 s here


class Site:
    """The cluster, with one service at `/pageferry`."""

    def __init__(self, cluster: Cluster, http: int, dashboard: int) -> None:
        self.cluster, self.http, self.dashboard = cluster, http, dashboard
        self.url = f"http://127.0.0.1:{http}"

    def add_node(self) -> str:
        """One with room for two engines; its id."""
        node: Any = self.cluster.add_node(num_cpus=1, resources={"engine": 2}, object_store_memory=100 << 20)
        return str(node.node_id)

    def deploy(self, **settings: Any) -> None:
        """`pageferry deploy`, until the new replicas serve."""
        texts = [f"{key}={json.dumps(value)}" for key, value in {**LIGHT, **settings}.items()]
        command = [sys.executable, "-m", "app.cli", "deploy", "local-cpu", *texts, f"frontend.port={self.http}"]
        command += ["--json", "--route-prefix", "/pageferry", "--dashboard", f"http://127.0.0.1:{self.dashboard}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ})
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["status"] == {"pageferry": "RUNNING"}

    def decode(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get(self.http, "/pageferry/status")["pools"]["decode"]["replicas"]
        return found

    def processes(self) -> set[str]:
        frontends = set(get(self.http, "/pageferry/status")["frontends"])
        return {each["replica_id"] for each in self.decode()} | frontends


class Load:
    """Streams one after another in four places; every one must be whole."""

    def __init__(self, url: str, tokens: int) -> None:
        self.answers: list[int] = []
        self.errors: list[str] = []
        self._url, self._options, self._over = url, {**ANSWER, "max_tokens": tokens}, threading.Event()

    def _work(self, number: int) -> None:
        with Client(self._url, timeout_s=400) as client:
            while not self._over.is_set():
                try:
                    done = client.complete(f"{number}: The sea", **self._options)
                    self.answers.append(done.usage.completion_tokens)
                except Exception as error:
                    self.errors.append(f"{number}: {type(error).__name__}: {error}")
                    time.sleep(0.5)

    def more(self, count: int, timeout_s: float = 120.0) -> None:
        """Waits until so many more answers have come."""
        wanted, until = len(self.answers) + count, time.monotonic() + timeout_s
        while len(self.answers) < wanted:
            assert time.monotonic() < until, (len(self.answers), self.errors)
            time.sleep(0.25)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        assert self.errors == [] and set(self.answers) == {self._options["max_tokens"]}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("AUTH_MODE", "disabled"), ("TMPDIR", folder), ("worker_niceness", "0")):
            patch.setenv(f"RAY_{name}", value)
        patch.chdir(ROOT)  # the demo model's path is relative to it
        http, dashboard = free_port(), free_port()
        head = {"num_cpus": 2, "dashboard_port": dashboard, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": True})
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            serve.start(http_options={"host": "127.0.0.1", "port": http}, proxy_location="HeadOnly")
            yield Site(cluster, http, dashboard)
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def node(site: Site) -> str:
    return site.add_node()


def test_a_deployed_topology_answers_over_http_and_over_a_handle(site: Site, node: str) -> None:
    began = time.monotonic()
    site.deploy()
    wait_healthy(f"{site.url}/pageferry")
    print(f"`pageferry deploy`: ready after {time.monotonic() - began:.0f} s")
    with Client(f"{site.url}/pageferry") as client:
        assert client.chat("Name a colour.", **ANSWER).usage.completion_tokens == 24
    with Client(serve.get_app_handle("pageferry")) as client:
        assert len(list(client.stream_chat("Name a colour.", **ANSWER))) > 1
    names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
    assert {controller_actor("pageferry"), transfer_actor("pageferry", node)} <= names


def test_a_deployment_under_load_drops_nothing(site: Site, node: str) -> None:
    old, load = site.processes(), Load(f"{site.url}/pageferry", 24)
    with load.running():
        site.deploy(**{"admission.queue_max": 77})
        until = time.monotonic() + 120
        while old & site.processes():
            assert time.monotonic() < until, "replicas of the old deployment are still there"
            time.sleep(0.5)
        load.more(4)
    status = get(site.http, "/pageferry/status")
    assert status["queue"]["max"] == 77 and status["tickets"]["ended"]["failed"] == 0


def test_two_models_behind_one_address(site: Site, node: str) -> None:
    settings = {"config": "local-cpu", **LIGHT, "model.name": "other", "frontend.port": site.http}
    began = time.monotonic()
    handle = serve.run(build(settings), name="second", route_prefix="/second", blocking=False)
    wait_healthy(f"{site.url}/second")
    print(f"`serve.run`: ready after {time.monotonic() - began:.0f} s")
    with Client(handle) as client:
        assert client.complete("The sea is", **ANSWER).usage.completion_tokens == 24
    models = {"smollm2": "pageferry", "other": "second"}
    serve.run(build_ingress({"models": models}), name="models", route_prefix="/")
    before = {name: get(site.http, f"/{name}/status")["tickets"]["ended"]["done"] for name in models.values()}
    for model, name in models.items():
        with Client(site.url, model=model) as client:
            assert "".join(chunk.text for chunk in client.stream_complete("The sea is", **ANSWER))
            assert sorted(card.id for card in client.openai.models.list()) == sorted(models)
        ended = get(site.http, f"/{name}/status")["tickets"]["ended"]["done"]
        assert ended == before[name] + 1, "the other's application has not seen it"
    refusal = pytest.raises(ServiceError, match=r"`none` does not exist; there are: other, smollm2")
    with Client(site.url, model="none") as client, refusal:
        client.complete("The sea is", **ANSWER)
    serve.delete("second")
    with Client(site.url, model="other") as client, pytest.raises(ServiceError, match="other does not answer"):
        client.complete("The sea is", **ANSWER)


def test_a_drained_node_drops_nothing(site: Site, node: str) -> None:
    load = Load(f"{site.url}/pageferry", 120)
    with load.running():
        time.sleep(2.0)
        other = site.add_node()
        command = [sys.executable, "-m", "app.cli", "drain", "--address", site.cluster.address, "--node-id", node]
        drain = subprocess.Popen([*command, "--seconds", str(GOES_AFTER_S)], stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 30
        while "draining" not in [each["state"] for each in site.decode()]:
            assert time.monotonic() < until, "it gets no new tickets within seconds, long before there is another one"
            time.sleep(0.25)
        assert drain.wait(GOES_AFTER_S + 60) == 0, drain.stderr and drain.stderr.read()
        assert replicas_on(node) == []
        site.cluster.remove_node(next(each for each in site.cluster.worker_nodes if each.node_id == node))
        load.more(4)
    assert [(each["node_id"], each["state"]) for each in site.decode()] == [(other, "ready")]
    assert get(site.http, "/pageferry/status/audit")["breaches"] == []


def test_an_application_that_a_config_no_longer_names_ends_with_its_controller(site: Site) -> None:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    client = ServeSubmissionClient(f"http://127.0.0.1:{site.dashboard}")
    client.deploy_applications({"applications": []})
    wait_gone(controller_actor("pageferry"))
    assert "models" in serve.status().applications, "what was started by serve.run stays"
