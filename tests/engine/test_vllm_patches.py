"""What `actors.engine.vllm_patches` reaches into is still there, and what it changes arrives in new processes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition


def test_the_busy_loop_is_still_the_only_default() -> None:
    parameters = inspect.signature(SpinCondition.__init__).parameters
    assert list(parameters) == ["self", "is_reader", "context", "notify_address", "busy_loop_s"]
    assert len(SpinCondition.__init__.__defaults__ or ()) == 1


def test_a_worker_that_imports_the_connector_takes_the_configured_busy_loop() -> None:
    statement = (
        "import actors.engine.connector; from vllm.distributed.device_communicators.shm_broadcast import SpinCondition;"
        "print(SpinCondition.__init__.__defaults__)"
    )
    environment = os.environ | {"PAGEFERRY_QUEUE_BUSY_LOOP_S": "0.003"}
    run = subprocess.run([sys.executable, "-c", statement], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip().splitlines()[-1] == "(0.003,)"
