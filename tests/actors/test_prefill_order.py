"""The order in which a prefill engine computes prompts: vLLM's own scheduler with the arguments of a prefill pool."""

from __future__ import annotations

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.config import engine_kwargs
from actors.messages import Role
from cluster.spec import ClusterSpec

BUDGET = 256  # tokens a step
ENGINE_ONLY = ("kv_transfer_config", "worker_extension_cls", "scheduler_cls", "distributed_executor_backend")


class Engine:
    """A scheduler whose steps are computed at once."""

    def __init__(self) -> None:
        settings = {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": False}
        spec = ClusterSpec.load("local-cpu", {f"pools.prefill.{name}": value for name, value in settings.items()})
        kwargs = engine_kwargs(spec, Role.PREFILL, "r", "s")
        config = AsyncEngineArgs(**{k: v for k, v in kwargs.items() if k not in ENGINE_ONLY}).create_engine_config()
        config.cache_config.num_gpu_blocks = 1000
        block = config.cache_config.block_size
        pages = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        group = KVCacheGroupSpec(["layer"], pages)
        self.scheduler = Scheduler(
            config, KVCacheConfig(1000, [], [group]), StructuredOutputManager(config), block, log_stats=False
        )

    def add(self, name: str, num_tokens: int) -> None:
        self.scheduler.add_request(Request(name, list(range(num_tokens)), SamplingParams(max_tokens=1), None))

    def step(self) -> tuple[dict[str, int], set[str]]:
        """Prompt tokens computed, by request; and which requests have got their token."""
        plan = self.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        complete = {n for n in names if not self.scheduler.requests[n].is_prefill_chunk}
        sampled = [[7] if name in complete else [] for name in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        self.scheduler.update_from_output(plan, output)
        return dict(plan.num_scheduled_tokens), complete


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    engine = Engine()
    engine.add("long", 2000)
    assert engine.step()[0] == {"long": BUDGET}, "alone it has every step whole"
    engine.add("short", 20)
    computed, complete = engine.step()
    assert complete == {"short"} and computed["short"] == 20
    assert computed["long"] >= BUDGET // 2
    assert engine.step()[0] == {"long": BUDGET}


def test_several_long_prompts_leave_a_share_for_those_that_come() -> None:
    engine = Engine()
    for number in range(3):
        engine.add(f"long{number}", 2000)
    for _ in range(3):
        engine.step()
    engine.add("short", 20)
    assert "short" in engine.step()[1]


def test_a_pools_own_setting_stands() -> None:
    settings = {"pools.prefill.engine_args.long_prefill_token_threshold": 0}
    spec = ClusterSpec.load("local-cpu", settings)
    assert engine_kwargs(spec, Role.PREFILL, "r", "s")["long_prefill_token_threshold"] == 0
    assert "long_prefill_token_threshold" not in engine_kwargs(spec, Role.DECODE, "r", "s")


@pytest.mark.parametrize("num_long", [1, 4])
def test_no_token_of_the_budget_is_lost(num_long: int) -> None:
    engine = Engine()
    for number in range(num_long):
        engine.add(f"long{number}", 1024)
    steps = 0
    while engine.scheduler.requests:
        engine.step()
        steps += 1
    assert steps <= num_long * 1024 // BUDGET + 1
