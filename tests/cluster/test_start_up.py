"""Start-up limits grow with the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.engine.config import set_environment
from actors.messages import Role
from cluster.spec import ClusterSpec
from cluster.start_up import engine_s, service_s

LIMIT = "VLLM_ENGINE_READY_TIMEOUT_S"


def spec_of(folder: Path, gigabytes: int, **pool: object) -> ClusterSpec:
    for i in range(2):
        with (folder / f"model-{i}.safetensors").open("wb") as file:
            file.truncate(gigabytes * 500_000_000)  # takes no disk
    both = {"gpus_per_replica": 1, **pool}
    return ClusterSpec.parse({"model": {"path": str(folder)}, "pools": {"prefill": both, "decode": both}})


def test_a_large_checkpoint_has_longer(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 600)
    assert engine_s(spec, spec.pools.decode) == 600 + 2400 and service_s(spec) == 3300
    assert service_s(ClusterSpec.load("local-cpu")) >= 900


def test_gpu_engines_get_it_and_the_pool_may_say_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_environment(spec_of(tmp_path, 100), Role.DECODE)
    assert os.environ[LIMIT] == "1000"
    set_environment(spec_of(tmp_path, 100, env={LIMIT: "77"}), Role.DECODE)
    assert os.environ[LIMIT] == "77"
