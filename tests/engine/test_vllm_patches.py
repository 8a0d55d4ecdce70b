"""What we reach of vLLM's and Ray's internals is still there, and what we change arrives in new processes."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.executor import multiproc_executor

from actors.engine.vllm_patches import (
    CACHED_SCALES,
    TARGETS,
    WORKER_METHOD,
    MultiprocExecutor,
    Target,
    core_client,
    replace,
    set_kv_scales,
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.where)
def test_a_target_is_still_there_with_the_parameters_that_are_expected(target: Target) -> None:
    module, _, name = target.where.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if target.parameters is None:
        assert not callable(found)
    else:
        assert tuple(inspect.signature(found).parameters) == target.parameters
    assert target.reason


@pytest.mark.parametrize("module", CACHED_SCALES)
def test_scales_that_a_backend_has_cached_are_made_again(module: str) -> None:
    """The backends need CUDA packages to be imported; that they make a scale where it is None is read in source."""
    file = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    made = set(re.findall(r"if self\.(\w*scale) is None", file.read_text()))
    assert made - {"o_sf_scale"} == set(CACHED_SCALES[module])
    impl = type("Impl", (), {"__module__": module})()
    for name in CACHED_SCALES[module]:
        setattr(impl, name, 0.125)
    one = torch.tensor(1.0)
    layer = SimpleNamespace(impl=impl, _k_scale=one.clone(), _v_scale=one.clone(), _o_scale_float=2.0)
    set_kv_scales(layer, 0.5, 0.25)
    assert [getattr(impl, name) for name in CACHED_SCALES[module]] == [None] * len(CACHED_SCALES[module])
    assert layer._o_scale_float is None and (float(layer._k_scale), layer._v_scale_float) == (0.5, 0.25)


def test_scales_of_other_backends_are_only_set() -> None:
    layer = SimpleNamespace(impl=SimpleNamespace(bmm1_scale=1), _k_scale=torch.ones(1), _v_scale=torch.ones(1))
    layer._o_scale_float = 2.0
    set_kv_scales(layer, 0.5, 0.25)
    assert layer.impl.bmm1_scale == 1 and layer._o_scale_float == 2.0 and layer._k_scale_float == 0.5


def test_only_what_is_listed_is_replaced() -> None:
    with pytest.raises(AssertionError, match="clear"):
        replace({}, "clear", lambda: None)


def test_a_core_client_is_put_in_for_the_time_of_the_block_alone() -> None:
    from vllm.v1.engine import async_llm

    before, mine = async_llm.EngineCoreClient, object()
    with core_client(mine):
        assert async_llm.EngineCoreClient.make_async_mp_client(vllm_config=None, log_stats=True) is mine
    assert async_llm.EngineCoreClient is before


def test_a_worker_that_imports_the_connector_takes_the_configured_busy_loop() -> None:
    statement = (
        "import actors.engine.connector; from vllm.distributed.device_communicators.shm_broadcast import SpinCondition;"
        "print(SpinCondition.__init__.__defaults__)"
    )
    environment = os.environ | {"PAGEFERRY_QUEUE_BUSY_LOOP_S": "0.003"}
    run = subprocess.run([sys.executable, "-c", statement], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip().splitlines()[-1] == "(0.003,)"


def test_the_worker_of_a_cpu_engine_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore has imported what the worker needs; for all other processes vLLM's choice stands."""
    seen: list[str] = []
    monkeypatch.setenv(WORKER_METHOD, "spawn")
    monkeypatch.setattr(
        multiproc_executor.MultiprocExecutor,
        "_init_executor",
        lambda self: seen.append(multiproc_executor.get_mp_context().get_start_method()),
    )
    executor = object.__new__(MultiprocExecutor)
    executor._init_executor()
    assert seen == ["fork"] and multiproc_executor.get_mp_context().get_start_method() == "spawn"
