"""What we reach of vLLM's and Ray's internals is still there, and what we change arrives in new processes."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
from vllm.v1.executor import multiproc_executor

from actors.engine.vllm_patches import TARGETS, WORKER_METHOD, MultiprocExecutor, Target, core_client, replace


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
