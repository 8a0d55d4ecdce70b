"""An application's controller, made by a replica that is a placement group, outlives that group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.controller.actor import get_or_create
from cluster.spec import ClusterSpec


@pytest.fixture(scope="module")
def group() -> Iterator[PlacementGroup]:
    assert not ray.is_initialized()
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20, "_temp_dir": folder}
        ray.init(address="local", log_to_driver=False, logging_level="ERROR", **options)
        try:
            made = placement_group([{"CPU": 1}])
            ray.get(made.ready(), timeout=60)
            yield made
        finally:
            ray.shutdown()


def replica_class() -> type:
    """Not of this module, which Ray's workers cannot import."""

    class Replica:
        """As Serve starts one with several GPUs: what it makes is captured by its placement group."""

        def controller(self, spec_json: str) -> Any:
            return get_or_create("captured", ClusterSpec.model_validate_json(spec_json), 1)

    return Replica


def test_the_controller_outlives_the_placement_group_of_the_replica_that_made_it(group: PlacementGroup) -> None:
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    replica = ray.remote(replica_class()).options(num_cpus=1, scheduling_strategy=strategy).remote()
    controller = ray.get(replica.controller.remote(ClusterSpec.load("local-cpu").model_dump_json()), timeout=120)
    epoch = ray.get(controller.status.remote(), timeout=60)["epoch"]
    remove_placement_group(group)
    until = time.monotonic() + 30
    while time.monotonic() < until:  # the group is removed, and with it the replica
        try:
            ray.get(replica.__ray_ready__.remote(), timeout=1)
        except ray.exceptions.RayActorError:
            break
        except ray.exceptions.GetTimeoutError:
            continue
    else:
        raise AssertionError("the replica has not ended with its placement group")
    assert ray.get(controller.status.remote(), timeout=20)["epoch"] == epoch
    ray.kill(controller)
