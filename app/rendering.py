"""A topology as a Serve config, and as Kubernetes documents for KubeRay. Pure: values in, values out.

The Serve config holds the whole topology, so that it is one document to review, and runs wherever this package is
installed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import yaml

from app.placement import DRAIN_S, cpus_asked, deployment_options
from cluster.models import ModelsSpec
from cluster.spec import ClusterSpec, PoolSpec, SpecError

RAY_VERSION = "2.60.0"
GIB = 1 << 30
ENGINE_GIB = 3.0  # a CPU engine's processes without its KV cache and weights beyond a small model's
FRONTEND_GIB = 2.0
NODE_GIB = 2.0  # Ray's own processes and its object store
GRACE_MARGIN_S = 120
# Where `ops/container/Containerfile` puts the wrapper, without which most clients that hang up are not noticed.
HAPROXY_IN_IMAGE = "/opt/pageferry/app/commands/haproxy"


@dataclass(frozen=True)
class Target:
    """Where it is to run."""

    name: str = "pageferry"
    image: str = "pageferry:latest"
    route_prefix: str = "/"
    gpus_per_node: int = 8
    memory_gib: float | None = None  # of a worker; default: from the topology on CPU, none on GPUs


def serve_config(spec: ClusterSpec, target: Target) -> dict[str, Any]:
    """For `serve deploy`, and `serveConfigV2` of a RayService."""
    return _serve_config(spec, [_application(spec, target.name, target.route_prefix)])


def models_config(models: ModelsSpec, topologies: dict[str, ClusterSpec]) -> dict[str, Any]:
    """Several models' applications, each below its own name, and before them one that leads requests by `model`."""
    applications = [_application(spec, name, f"/{name}") for name, spec in topologies.items()]
    named = {spec.model.served_name: name for name, spec in topologies.items()}
    ingress = {
        "name": models.name,
        "route_prefix": "/",
        "import_path": "app.models:build",
        "args": {"models": named, "replicas": models.replicas},
    }
    return _serve_config(next(iter(topologies.values())), [*applications, ingress])


def _serve_config(spec: ClusterSpec, applications: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": spec.frontend.host, "port": spec.frontend.port},
        "applications": applications,
    }


def _application(spec: ClusterSpec, name: str, route_prefix: str) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": "app.main:build",
        "args": {"config": spec.model_dump(mode="json", exclude_unset=True)},
    }


def rayservice(spec: ClusterSpec, target: Target) -> dict[str, Any]:
    """A KubeRay RayService, v1. In a pod the loopback address reaches no client: `frontend.host` becomes 0.0.0.0."""
    open_spec = spec.model_copy(update={"frontend": spec.frontend.model_copy(update={"host": "0.0.0.0"})})
    open_spec = ClusterSpec.parse(open_spec.model_dump(mode="json", exclude_unset=True))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": target.name, "labels": _labels(target)},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(open_spec, target), sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # no replica on the head
                    "template": _pod(spec, target, {"cpu": "2", "memory": "8Gi"}, head=True),
                },
                "workerGroupSpecs": _groups(spec, target),
            },
        },
    }


def pod_monitor(spec: ClusterSpec, target: Target) -> dict[str, Any]:
    """For the Prometheus operator: Ray exports the metrics of all processes of a pod at one port."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": target.name, "labels": _labels(target)},
        "spec": {
            "selector": {"matchLabels": _labels(target)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }


def kustomization(spec: ClusterSpec, target: Target) -> dict[str, dict[str, Any]]:
    """File name -> document."""
    return {
        "kustomization.yaml": {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["rayservice.yaml", "podmonitor.yaml"],
        },
        "rayservice.yaml": rayservice(spec, target),
        "podmonitor.yaml": pod_monitor(spec, target),
    }


def _labels(target: Target) -> dict[str, str]:
    return {"app.kubernetes.io/name": "pageferry", "app.kubernetes.io/instance": target.name}


# -- worker groups


def _groups(spec: ClusterSpec, target: Target) -> list[dict[str, Any]]:
    """One for everything; a pool with custom resources has its own, whose nodes offer them."""
    pools = {"prefill": spec.pools.prefill, "decode": spec.pools.decode} if spec.has_prefill else {}
    pools = pools or {"decode": spec.pools.decode}
    own = {name: pool for name, pool in pools.items() if pool.resources}
    shared = {name: pool for name, pool in pools.items() if not pool.resources}
    groups = [_group(spec, target, name, {name: pool}, frontends=False) for name, pool in own.items()]
    if shared:
        groups.append(_group(spec, target, "workers", shared, frontends=True))
    return groups


def _group(spec: ClusterSpec, target: Target, name: str, pools: dict[str, PoolSpec], frontends: bool) -> dict[str, Any]:
    _refuse_larger_than_a_node(target, pools)
    nodes = _nodes(target, pools)
    resources = _resources(spec, target, pools, frontends, nodes)
    params: dict[str, str] = {}
    custom = {key: amount for pool in pools.values() for key, amount in pool.resources.items()}
    if custom:
        params["resources"] = json.dumps(json.dumps(custom))  # KubeRay puts it into a shell command as it is
    return {
        "groupName": name,
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": params,
        "template": _pod(spec, target, resources, head=False, shares_memory=_shares_memory(pools)),
    }


def _refuse_larger_than_a_node(target: Target, pools: dict[str, PoolSpec]) -> None:
    for name, pool in pools.items():
        if pool.gpus_per_replica > target.gpus_per_node:
            raise SpecError(
                f"pools.{name}.gpus_per_replica {pool.gpus_per_replica} is more than --gpus-per-node "
                f"{target.gpus_per_node}: a replica lies on one node"
            )


def _nodes(target: Target, pools: dict[str, PoolSpec]) -> int:
    """Enough for every pool at its upper bound: replicas are placed largest first, each on one node."""
    free: list[int] = []
    groups = (pool.gpus_per_replica for pool in pools.values() for _ in range(pool.bounds[1]))
    for gpus in sorted(groups, reverse=True):
        at = next((node for node, left in enumerate(free) if left >= gpus), len(free))
        if at == len(free):
            free.append(target.gpus_per_node)
        free[at] -= gpus
    return max(1, len(free))


def _resources(
    spec: ClusterSpec, target: Target, pools: dict[str, PoolSpec], frontends: bool, nodes: int
) -> dict[str, str]:
    gpus = any(pool.gpus_per_replica for pool in pools.values())
    cpus = max(2, math.ceil(cpus_asked(spec) / nodes))
    resources = {"cpu": str(cpus)}
    memory = target.memory_gib
    if memory is None and not gpus:
        engines = sum((pool.kv_cache_gib or 1.0) + ENGINE_GIB for pool in pools.values() for _ in range(_most(pool)))
        memory = NODE_GIB + engines + frontends * FRONTEND_GIB * spec.frontend.replicas
        memory += spec.transfer.staging_bytes_max / GIB
    if memory is not None:
        resources["memory"] = f"{math.ceil(memory)}Gi"
    if gpus:
        resources["nvidia.com/gpu"] = str(target.gpus_per_node)
    return resources


def _most(pool: PoolSpec) -> int:
    """Replicas at once, in a rolling update."""
    return pool.bounds[1] + math.ceil(pool.bounds[1] * pool.surge / 100)


def _shares_memory(pools: dict[str, PoolSpec]) -> bool:
    """Workers of one engine talk through /dev/shm, of which a container has 64 MiB."""
    return any(pool.tensor_parallel > 1 for pool in pools.values())


# -- pods


def _pod(
    spec: ClusterSpec, target: Target, resources: dict[str, str], head: bool, shares_memory: bool = False
) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": 8080}, {"name": "serve", "containerPort": spec.frontend.port}]
    if head:
        ports += [{"name": "gcs", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
    container: dict[str, Any] = {
        "name": "ray-head" if head else "ray-worker",
        "image": target.image,
        "ports": ports,
        "env": [
            {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"},
            {"name": "RAY_SERVE_HAPROXY_BINARY_PATH", "value": HAPROXY_IN_IMAGE},
        ],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        # Ray's own agent; engines are watched by Serve, which replaces a replica and not the pod.
        "livenessProbe": _probe(52365, "/api/local_raylet_healthz", failures=6),
        "startupProbe": _probe(52365, "/api/local_raylet_healthz", failures=60),
    }
    if not head:
        container["readinessProbe"] = _probe(spec.frontend.port, "/-/healthz", failures=3)
        seconds = str(grace_s(spec) - GRACE_MARGIN_S // 2)
        container["lifecycle"] = {"preStop": {"exec": {"command": ["pageferry", "drain", "--seconds", seconds]}}}
    pod: dict[str, Any] = {
        "containers": [container],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # A pod that has to go lets its requests end first: longer than the longest drain of its replicas.
        "terminationGracePeriodSeconds": 30 if head else grace_s(spec),
    }
    if shares_memory:
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    return {"metadata": {"labels": _labels(target)}, "spec": pod}


def grace_s(spec: ClusterSpec) -> int:
    drains = [spec.scaling.drain_deadline_s or DRAIN_S]
    drains += [float(deployment_options(spec, role)["graceful_shutdown_timeout_s"]) for role in ("prefill", "decode")]
    return math.ceil(max(drains)) + GRACE_MARGIN_S


def _probe(port: int, path: str, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": port}
    return {"httpGet": get, "periodSeconds": 5, "timeoutSeconds": 4, "failureThreshold": failures}
