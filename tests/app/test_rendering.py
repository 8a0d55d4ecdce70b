"""Rendered documents: Serve and KubeRay accept them, and they say what the topology says.

`tests/support/rayservice.v1.schema.json` is the RayService v1 custom resource of KubeRay, Apache-2.0,
github.com/ray-project/kuberay, as a strict JSON schema: an unknown field is an error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jsonschema.validators import validator_for
from ray.serve.schema import ServeDeploySchema

from app.cli import main
from app.placement import deployment_options
from cluster.spec import TOPOLOGIES, ClusterSpec

SCHEMA = json.loads((Path(__file__).parents[1] / "support" / "rayservice.v1.schema.json").read_text())
RAY_SERVICE = validator_for(SCHEMA)(SCHEMA)  # without checking the large schema itself each time
SHIPPED = sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))


def render(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["render", *argv]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("topology", SHIPPED)
def test_serve_takes_the_config_and_it_holds_the_whole_topology(
    topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = render(capsys, "serve", topology, "pools.decode.max_num_seqs=77", "--name", "mine", "--route-prefix", "/m")
    parsed = ServeDeploySchema.model_validate(found)
    [application] = parsed.applications
    assert (application.name, application.route_prefix) == ("mine", "/m")
    spec = ClusterSpec.load(topology, {"pools.decode.max_num_seqs": 77})
    assert ClusterSpec.load(application.args["config"]) == spec
    assert (parsed.http_options.host, parsed.http_options.port) == (spec.frontend.host, spec.frontend.port)


@pytest.mark.parametrize("topology", SHIPPED)
def test_kuberay_takes_the_rayservice(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = render(capsys, "rayservice", topology, "--image", "registry.example/pageferry:1")
    RAY_SERVICE.validate(found)
    inner = ServeDeploySchema.model_validate(yaml.safe_load(found["spec"]["serveConfigV2"]))
    spec = ClusterSpec.load(inner.applications[0].args["config"])
    assert spec.frontend.host == inner.http_options.host == "0.0.0.0"
    assert spec.pools == ClusterSpec.load(topology).pools
    cluster = found["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        [container] = pod["spec"]["containers"]
        assert container["image"] == "registry.example/pageferry:1" and container["livenessProbe"]
        environ = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        wrapper = Path(environ["RAY_SERVE_HAPROXY_BINARY_PATH"]).relative_to("/opt/pageferry")
        assert os.access(Path(__file__).parents[2] / wrapper, os.X_OK)
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    drains = [deployment_options(spec, role)["graceful_shutdown_timeout_s"] for role in ("prefill", "decode")]
    for pod in pods[1:]:
        assert pod["spec"]["terminationGracePeriodSeconds"] > max(drains)
        assert pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"] == spec.frontend.port


def test_a_wrong_field_is_noticed_by_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    found = render(capsys, "rayservice", "local-cpu")
    found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imagge"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagge"):
        RAY_SERVICE.validate(found)


def test_gpu_groups_are_as_large_as_their_pools(capsys: pytest.CaptureFixture[str]) -> None:
    [workers] = render(capsys, "rayservice", "one-node")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    assert workers["replicas"] == 1, "four replicas of two GPUs"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    groups = render(capsys, "rayservice", "two-node")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["prefill", "decode"]
    params = {group["groupName"]: group["rayStartParams"].get("resources") for group in groups}
    assert json.loads(json.loads(params["prefill"])) == {"prefill_node": 1.0}
    assert json.loads(json.loads(params["decode"])) == {"decode_node": 1.0}


def test_shared_memory_is_mounted_only_where_workers_share_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = render(capsys, "rayservice", "local-scale")
    assert "volumes" not in found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]


def test_kustomize_is_a_folder_whose_parts_are_named(tmp_path: Path) -> None:
    assert main(["render", "kustomize", "local-cpu", "--out", str(tmp_path / "k8s")]) == 0
    files = {file.name: yaml.safe_load(file.read_text()) for file in (tmp_path / "k8s").iterdir()}
    assert set(files["kustomization.yaml"]["resources"]) == set(files) - {"kustomization.yaml"}
    RAY_SERVICE.validate(files["rayservice.yaml"])
    labels = files["rayservice.yaml"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert files["podmonitor.yaml"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert main(["render", "kustomize", "local-cpu"]) == 2
