"""An engine whose step is longer than `fence_after_s` lives on; one whose process stands still is replaced.

A decode engine that computes prompts itself, in one chunk each, with the least silence bound that can be set.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from engine_specs import pair_spec
from vllm.sampling_params import SamplingParams

from ops.engine_pair import EnginePair

FENCE_S = 2.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_long_step_ends_nothing_and_a_stopped_process_ends_the_replica() -> None:
    spec = pair_spec(
        pools__prefill__replicas=0,
        pools__prefill__max_replicas=1,
        pools__decode__max_num_batched_tokens=2048,
        admission__fence_after_s=FENCE_S,
        admission__stale_after_s=1.0,
    )
    pair = await EnginePair.start(spec)
    try:
        worker_pid = int(pair.decode.description["pid"])
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        began = time.monotonic()
        answer = asyncio.create_task(pair.generate(list(range(1500)), params, hand_over=False))
        # The step is made long from outside: its worker runs for a tenth of the time, and is alive all the while.
        while not answer.done() and time.monotonic() - began < 4 * FENCE_S:
            os.kill(worker_pid, signal.SIGSTOP)
            await asyncio.sleep(0.6)
            os.kill(worker_pid, signal.SIGCONT)
            await asyncio.sleep(0.06)
        assert len((await answer).token_ids) == 2
        assert time.monotonic() - began > 2 * FENCE_S and pair.decode._failure == ""

        os.kill(worker_pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not pair.decode._failure and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert "has shown no life for" in pair.decode._failure
    finally:
        os.kill(worker_pid, signal.SIGCONT)
        await pair.close()
