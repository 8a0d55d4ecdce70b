"""Bursts of decoding in one engine: the time that checking took, timed where it runs, over the time of the steps.

Both are taken of the same burst in the same process, so that neither another engine nor another minute is compared.
`check`: the worker's part, before each forward. `tracker`: the scheduler's part (tags, expectations, verdicts).
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from cluster.spec import ClusterSpec
from ops.bench import stats
from ops.engine_pair import EnginePair

# Tokens a request, so that a burst is about two seconds long at every concurrency.
TOKENS = {1: 48, 4: 40, 8: 32, 16: 24}
BLOCK_TOKENS = 32
PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: its seconds, steps, and nanoseconds of the check and of the tracker in it."""

    concurrency: int
    seconds: float
    steps: int
    check_ns: int
    tracker_ns: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def spec_for(model: str) -> ClusterSpec:
    pool = {
        "block_tokens": BLOCK_TOKENS,
        "kv_cache_gib": 1,
        "max_num_seqs": 32,
        "engine_args": {"enforce_eager": True, "num_gpu_blocks_override": 512},
    }
    return ClusterSpec.parse(
        {
            "model": {"path": model, "max_model_len": 512},
            "pools": {
                "prefill": {**pool, "kv_dtype": "bfloat16", "replicas": 0, "min_replicas": 0},
                "decode": {**pool, "kv_dtype": "fp8_e4m3"},
            },
            "transfer": {"staging_bytes_max": 64 << 20},
            "integrity": {"mode": "check", "seals": "full"},
        }
    )


class Bench:
    def __init__(self, pair: EnginePair) -> None:
        self.pair = pair
        words = random.Random(1)
        self.prompts = [[words.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(max(TOKENS))]

    async def _one(self, prompt: list[int], num_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request_id = uuid.uuid4().hex
        async for _ in self.pair.stream(request_id, prompt, params, self.pair.alone(request_id), None):
            pass

    async def _spent(self) -> tuple[int, int, int]:
        audit = await self.pair.decode.audit()
        worker = audit["workers"][0]
        return worker["checks"], worker["check_ns"], audit["integrity"]["spent_ns"]

    async def burst(self, concurrency: int) -> Burst:
        before, began = await self._spent(), time.perf_counter()
        await asyncio.gather(*(self._one(prompt, TOKENS[concurrency]) for prompt in self.prompts[:concurrency]))
        seconds = time.perf_counter() - began
        after = await self._spent()
        return Burst(concurrency, seconds, *(b - a for a, b in zip(before, after, strict=True)))


def table(bursts: list[Burst]) -> list[dict[str, Any]]:
    """By concurrency: microseconds a step, and the share of a step in percent with a 95 % interval over bursts."""
    rows = []
    for concurrency in sorted({burst.concurrency for burst in bursts}):
        mine = [burst for burst in bursts if burst.concurrency == concurrency]
        row: dict[str, Any] = {"concurrency": concurrency, "bursts": len(mine)}
        row["step_ms"] = round(1e3 * stats.p50([b.seconds / b.steps for b in mine]), 2)
        for name in ("check_ns", "tracker_ns"):
            share = stats.paired_ratio([(getattr(b, name) / 1e9, b.seconds) for b in mine])
            row[name.removesuffix("_ns")] = {
                "us_a_step": round(stats.p50([getattr(b, name) / b.steps / 1e3 for b in mine]), 1),
                "percent": round(100 * share.value, 4),
                "low": round(100 * share.low, 4),
                "high": round(100 * share.high, 4),
            }
        rows.append(row)
    return rows
