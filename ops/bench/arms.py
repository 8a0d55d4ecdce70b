"""An arm of a plan as a system that can be started."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from cluster.spec import ClusterSpec, parse_overrides
from ops.bench import systems
from ops.bench.plan import Plan
from ops.bench.systems import SystemSpec


def build(plan: Plan, arm: str, port: int) -> SystemSpec:
    """SpecError where the topology refuses an override."""
    changes = plan.changes_of(arm)
    overrides = [*plan.set, *(override for change in changes for override in change.set)]
    spec = ClusterSpec.load(plan.config, parse_overrides(overrides))
    system, engines = next(((c.system, c.engines) for c in changes if c.system), (plan.system, 2))
    kv, threads = spec.pools.decode.kv_dtype, next((c.threads for c in changes if c.threads), plan.threads)
    match system:
        case "pageferry":
            made = systems.ours(spec, plan.config, overrides, port, threads)
        case "ray-llm":
            made = systems.ray_llm(spec, port, kv, threads)
        case "vllm":
            made = systems.plain_vllm(_of_decode(spec), port, kv, threads)
        case _:
            made = _routed(_of_decode(spec), port, kv, threads, engines)
    return replace(made, name=arm)


def _of_decode(spec: ClusterSpec) -> ClusterSpec:
    """A plain engine has decode's weights."""
    weights = spec.pools.decode.weights
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": weights})}) if weights else spec


def _routed(spec: ClusterSpec, port: int, kv: str, threads: int, engines: int) -> SystemSpec:
    """`engines` plain servers behind HAProxy, each request to the one with the fewest connections."""
    ports = [port + 100 + number for number in range(engines)]
    servers = [list(systems.plain_vllm(spec, each, kv, threads).argv) for each in ports]
    plain = systems.plain_vllm(spec, port, kv, threads)
    settings = json.dumps({"port": port, "ports": ports, "servers": servers})
    return replace(
        plain,
        title=f"{engines} x {plain.title} behind HAProxy",
        argv=[sys.executable, str(Path(__file__).with_name("peer_router.py")), settings],
    )
