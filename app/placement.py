"""Where replicas run: from a pool of the spec to the options of its Serve deployment. Pure."""

from __future__ import annotations

import math
from typing import Any, Literal

from cluster.spec import ClusterSpec, PoolSpec

# A call into a replica is one request of its engine, an abort, or a stream: the engine has its own limits.
MAX_ONGOING = 100_000
DRAIN_S = 24 * 3600.0  # decode and frontends leave when their requests have ended, however long they are
ROUTER = "app.rpc.router.AddressedRouter"
POLICY = "actors.controller.serve_policy:FollowController"


def resources(pool: PoolSpec) -> dict[str, Any]:
    """`ray_actor_options`, and for several GPUs with the executor `ray` `placement_group_bundles`: one bundle a GPU.

    A replica stays on one node. With `mp` the replica actor has its GPUs itself, and its engine's processes inherit
    them; with `ray` it runs in the first bundle without a GPU, and the engine's workers take one bundle each.
    """
    cpus, custom = pool.cpus, dict(pool.resources)
    if pool.gpus_per_replica <= 1 or pool.executor == "mp":
        options: dict[str, Any] = {"num_cpus": cpus, "resources": custom}
        if pool.gpus_per_replica:
            options["num_gpus"] = pool.gpus_per_replica
        return {"ray_actor_options": options}
    first: dict[str, float] = {"CPU": cpus, "GPU": 1.0, **custom}
    others: list[dict[str, float]] = [{"GPU": 1.0} for _ in range(pool.gpus_per_replica - 1)]
    return {
        "ray_actor_options": {"num_cpus": cpus, "resources": custom},
        "placement_group_bundles": [first, *others],
        "placement_group_strategy": "STRICT_PACK",
    }


def deployment_options(spec: ClusterSpec, role: Literal["prefill", "decode"]) -> dict[str, Any]:
    """Options of `serve.deployment` for a pool. Its size is what the controller says, within the pool's bounds.

    Serve starts it at the lower bound and keeps its size when it is deployed again.
    """
    pool = spec.pools.prefill if role == "prefill" else spec.pools.decode
    drain_s = spec.transfer.hand_over_s if role == "prefill" else spec.scaling.drain_deadline_s or DRAIN_S
    return {
        "name": "Prefill" if role == "prefill" else "Decode",
        "autoscaling_config": {
            "min_replicas": pool.bounds[0],
            "max_replicas": max(1, pool.bounds[1]),
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": POLICY, "policy_kwargs": {"pool": role}},
        },
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": drain_s,
        "max_surge_percent": pool.surge,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": max(30.0, spec.admission.fence_after_s),
        "request_router_config": {"request_router_class": ROUTER},
        **resources(pool),
    }


def frontend_options(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "name": "Frontend",
        "num_replicas": spec.frontend.replicas,
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": spec.scaling.drain_deadline_s or DRAIN_S,
        "max_surge_percent": 100,
        "ray_actor_options": {"num_cpus": spec.frontend.cpus_per_replica},
    }


def cpus_asked(spec: ClusterSpec) -> float:
    """CPUs that Ray must have for the whole service at its largest: every pool at its upper bound, in an update."""
    pools = (spec.pools.prefill, spec.pools.decode)
    parts = [
        (deployment_options(spec, "prefill"), pools[0].bounds[1] if spec.has_prefill else 0),
        (deployment_options(spec, "decode"), pools[1].bounds[1]),
        (frontend_options(spec), spec.frontend.replicas),
    ]
    return sum(_cpus(options) * (most + _surge(options, most)) for options, most in parts)


def _cpus(options: dict[str, Any]) -> float:
    """Of one replica; a placement group reserves for all its workers."""
    if bundles := options.get("placement_group_bundles"):
        return float(sum(bundle.get("CPU", 0.0) for bundle in bundles))
    return float(options["ray_actor_options"]["num_cpus"])


def _surge(options: dict[str, Any], replicas: int) -> int:
    """Replicas that a rolling update starts before it ends old ones."""
    return math.ceil(replicas * float(options["max_surge_percent"]) / 100)
