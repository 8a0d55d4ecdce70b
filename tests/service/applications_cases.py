"""Applications in one Ray cluster, without engines: decode sleeps at zero, so that each starts within seconds.

Two share nothing; one Serve config, `serve.run` and a handle lead to the same service; what ends leaves nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from shared_cluster import actors, free_port, get, wait_gone, wait_healthy

from app.client import Client
from app.commands.serve import Service
from app.main import build
from cluster.names import NAMESPACE, controller_actor
from cluster.spec import ClusterSpec

ASLEEP = {"pools.decode.replicas": 0, "pools.decode.min_replicas": 0}


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Of HTTP and of the dashboard."""
    http, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            num_cpus=2,
            dashboard_port=dashboard,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": http})
        try:
            yield http, dashboard
        finally:
            ray.shutdown()


def start(port: int, *names: str) -> None:
    """At once: each loads vLLM's API by itself."""
    targets = []
    for name in names:
        arguments = {"config": "local-scale", **ASLEEP, "model.name": f"model-{name}", "frontend.port": port}
        targets.append(serve.RunTarget(target=build(arguments), name=name, route_prefix=f"/{name}"))
    serve.run_many(targets)


def test_a_rendered_serve_config_is_deployed(ports: tuple[int, int], tmp_path: Path) -> None:
    http, dashboard = ports
    settings = [f"{name}={value}" for name, value in ASLEEP.items()] + [f"frontend.port={http}"]
    file = tmp_path / "serve.yaml"
    command = [sys.executable, "-m", "app.cli", "render", "serve", "local-scale", *settings, "--out", str(file)]
    subprocess.run([*command, "--route-prefix", "/rendered"], check=True, timeout=120)
    deploy = [str(Path(sys.executable).parent / "serve"), "deploy", "-a", f"http://127.0.0.1:{dashboard}", str(file)]
    began = time.monotonic()
    done = subprocess.run(deploy, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    wait_healthy(f"http://127.0.0.1:{http}/rendered")
    print(f"`serve deploy`, asleep: ready after {time.monotonic() - began:.0f} s")
    assert controller_actor("pageferry") in actors()
    with pytest.raises(RuntimeError, match="--name pageferry: an application of this name is on the cluster"):
        Service(ClusterSpec.load("local-scale"), address="auto")._refuse_taken_name()
    serve.delete("pageferry")


def test_two_applications_share_nothing(ports: tuple[int, int]) -> None:
    http, _ = ports
    start(http, "a", "b")
    for name in ("a", "b"):
        wait_healthy(f"http://127.0.0.1:{http}/{name}")
    assert {controller_actor("a"), controller_actor("b")} <= actors()
    assert [get(http, f"/{name}/status")["model"] for name in ("a", "b")] == ["model-a", "model-b"]
    with Client(serve.get_app_handle("a")) as client:
        assert client.healthy()
    a: Any = ray.get_actor(controller_actor("a"), namespace=NAMESPACE)
    epochs = {name: get(http, f"/{name}/status")["epoch"] for name in ("a", "b")}
    ray.kill(a, no_restart=False)
    until = time.monotonic() + 60
    while get(http, "/b/status")["epoch"] == epochs["b"]:
        try:
            if get(http, "/a/status")["epoch"] != epochs["a"]:
                break
        except OSError:
            pass
        assert time.monotonic() < until
        time.sleep(0.5)
    assert get(http, "/b/status")["epoch"] == epochs["b"], "the other's controller is another actor"


def test_another_port_than_serves_is_refused_in_words(ports: tuple[int, int]) -> None:
    http, _ = ports
    with pytest.raises(RuntimeError, match="Deploying application c failed"):
        start(7777, "c")
    said = serve.status().applications["c"].deployments["Frontend"].message
    assert f"frontend.port is 7777, but Serve listens on port {http}" in said
    serve.delete("c")


def test_the_controller_ends_with_its_application_and_with_serve(ports: tuple[int, int]) -> None:
    assert controller_actor("a") in actors() and controller_actor("b") in actors()
    serve.delete("a")
    wait_gone("a:")
    assert controller_actor("b") in actors()
    serve.shutdown()
    wait_gone("b:")
    wait_gone("pageferry:")
    assert actors() == set()
