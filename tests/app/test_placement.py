"""From a pool to the options of its Serve deployment."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from actors.controller.serve_policy import FollowController
from app.placement import cpus_asked, deployment_options, frontend_options, resources
from cluster.spec import TOPOLOGIES, ClusterSpec, PoolSpec

SMALLEST_MACHINE_CPUS = 2  # the README's


def spec(**decode: Any) -> ClusterSpec:
    pools = {"prefill": {**decode, "replicas": 2}, "decode": decode}
    return ClusterSpec.parse({"model": {"path": "m"}, "pools": pools})


def test_a_cpu_pool_asks_for_cpus_only() -> None:
    assert resources(PoolSpec(cpus_per_replica=2)) == {"ray_actor_options": {"num_cpus": 2, "resources": {}}}


def test_one_gpu_needs_no_placement_group() -> None:
    found = resources(PoolSpec(gpus_per_replica=1, resources={"h200": 0.001}))
    assert found == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 1, "resources": {"h200": 0.001}}}


def test_a_replica_of_several_gpus_has_them_itself() -> None:
    found = resources(PoolSpec(gpus_per_replica=4, tensor_parallel=4))
    assert found == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 4, "resources": {}}}


def test_ray_workers_are_a_group_of_one_bundle_a_gpu_on_one_node() -> None:
    found = resources(PoolSpec(gpus_per_replica=4, tensor_parallel=4, executor="ray"))
    assert found["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    assert found["placement_group_strategy"] == "STRICT_PACK"
    assert "num_gpus" not in found["ray_actor_options"], "the engine's workers take the GPUs"


def test_serve_accepts_the_options() -> None:
    class Nothing:
        pass

    for pool in ({}, {"gpus_per_replica": 1}, {"gpus_per_replica": 8, "tensor_parallel": 8}):
        one = spec(**pool)
        options = deployment_options(one, "decode")
        made = serve.deployment(Nothing, **options)
        assert made.name == "Decode"
        assert made._deployment_config.autoscaling_config.policy.get_policy() is FollowController
    made = serve.deployment(Nothing, **deployment_options(spec(), "prefill"))
    assert made.name == "Prefill" and made._deployment_config.autoscaling_config.min_replicas == 2
    assert serve.deployment(Nothing, **frontend_options(spec())).name == "Frontend"


def test_decode_leaves_when_it_is_empty_however_long_that_takes() -> None:
    assert deployment_options(spec(), "decode")["graceful_shutdown_timeout_s"] >= 24 * 3600
    tree = spec().model_dump() | {"scaling": {"drain_deadline_s": 90.0}}
    assert deployment_options(ClusterSpec.parse(tree), "decode")["graceful_shutdown_timeout_s"] == 90.0


@pytest.mark.parametrize("topology", sorted(path.stem for path in TOPOLOGIES.glob("local-*.yaml")))
def test_a_cpu_topology_fits_the_smallest_machine_even_while_it_is_updated(topology: str) -> None:
    assert cpus_asked(ClusterSpec.load(topology)) <= SMALLEST_MACHINE_CPUS


def test_asked_for_are_all_replicas_at_their_bounds_and_those_of_an_update() -> None:
    settings = {"pools.decode.cpus_per_replica": 1.5, "pools.decode.max_replicas": 4, "pools.prefill.surge_percent": 0}
    frontends, decode, prefill = 2 * 0.25, 2 * 4 * 1.5, 0.25
    assert cpus_asked(ClusterSpec.load("local-cpu", settings)) == frontends + decode + prefill
    groups = ClusterSpec.load("one-node")
    assert cpus_asked(groups) == 2 * 4 * 0.25 + 2 * 1.0 + 2 * 1.0
