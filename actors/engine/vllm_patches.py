"""Every reach of this package into the internals of vLLM.

| target (vLLM 0.32)                                         | reason                                                  |
|------------------------------------------------------------|---------------------------------------------------------|
| `shm_broadcast.SpinCondition.__init__`, default of         | On CPU vLLM joins EngineCore and Worker by a queue whose|
| `busy_loop_s` (1 s)                                        | reader yields in a loop for this long after each read,  |
|                                                            | so EngineCore burns a core while Worker computes.       |

`MultiprocExecutor` is the `distributed_executor_backend` of CPU engines: vLLM imports it in EngineCore before that
makes its queues. `ShortBusyLoop` is for workers of engines that have no worker extension of ours.
"""

from __future__ import annotations

import os

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor import multiproc_executor

from actors.engine.config import QUEUE_BUSY_LOOP


def shorten_busy_loop() -> None:
    """Readers that this process makes from now on sleep after `$PAGEFERRY_QUEUE_BUSY_LOOP_S` seconds; unset: vLLM's."""
    if value := os.environ.get(QUEUE_BUSY_LOOP):
        shm_broadcast.SpinCondition.__init__.__defaults__ = (float(value),)


class MultiprocExecutor(multiproc_executor.MultiprocExecutor):
    def _init_executor(self) -> None:
        shorten_busy_loop()
        super()._init_executor()


class ShortBusyLoop:
    """A `worker_extension_cls` without methods: a worker imports it before it opens its queue."""


shorten_busy_loop()
