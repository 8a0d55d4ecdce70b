"""Bursts of decoding with integrity on and off in turn, each on an engine pair of its own; both run side by side.

Two processes of one build differ a little for as long as they live, so a measurement is made of several runs of this
program: each starts its engines anew. Off is `integrity.mode: off` and `seals: off`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from cluster.spec import ClusterSpec
from ops.bench import stats
from ops.engine_pair import EnginePair

# Tokens a request, so that a burst is about a second and a half long at every concurrency.
TOKENS = {1: 40, 4: 28, 8: 20, 16: 14}
BLOCK_TOKENS = 32
PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst; seconds. `gap_p95_s`: 95th percentile of the time between two tokens of a request."""

    on: bool
    tokens_per_s: float
    gap_p95_s: float
    latency_p95_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    scenario: str
    concurrency: int
    on: Burst
    off: Burst

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Pair:
        return cls(tree["scenario"], tree["concurrency"], Burst(**tree["on"]), Burst(**tree["off"]))


def spec_for(model: str, on: bool) -> ClusterSpec:
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
                "prefill": {**pool, "kv_dtype": "bfloat16"},
                "decode": {**pool, "kv_dtype": "fp8_e4m3"},
            },
            "transfer": {"staging_bytes_max": 256 << 20},
            "integrity": {"mode": "check", "seals": "full"} if on else {"mode": "off", "seals": "off"},
        }
    )


class Bench:
    """`pairs`: with integrity on (True) and off (False)."""

    def __init__(self, pairs: dict[bool, EnginePair], seed: int) -> None:
        self.pairs = pairs
        self.rng = random.Random(seed)
        words = random.Random(1)
        self.prompts = [[words.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(max(TOKENS))]

    async def _one(
        self, pair: EnginePair, prompt: list[int], num_tokens: int, hand_over: bool, times: list[float]
    ) -> None:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request_id = uuid.uuid4().hex
        times.append(time.perf_counter())
        if hand_over:
            ticket = pair.ticket(request_id, len(prompt))
            over, _ = await pair.seal(ticket, prompt)
            # A salt of its own: every page is opened, none is found in decode's prefix cache.
            stream = pair.stream(request_id, prompt, params, ticket, over, request_id)
        else:
            stream = pair.stream(request_id, prompt, params, pair.alone(request_id), None)
        async for output in stream:
            if output.new_token_ids:
                times.append(time.perf_counter())  # noqa: PERF401

    async def burst(self, concurrency: int, hand_over: bool, on: bool) -> Burst:
        pair = self.pairs[on]
        await self._one(pair, self.prompts[0], 2, False, [])
        num_tokens = TOKENS[concurrency]
        times: list[list[float]] = [[] for _ in range(concurrency)]
        began = time.perf_counter()
        await asyncio.gather(
            *(self._one(pair, p, num_tokens, hand_over, t) for p, t in zip(self.prompts[:concurrency], times))
        )
        elapsed = time.perf_counter() - began
        gaps = [later - earlier for t in times for earlier, later in itertools.pairwise(t[1:])]
        return Burst(
            on=on,
            tokens_per_s=concurrency * num_tokens / elapsed,
            gap_p95_s=stats.p95(gaps),
            latency_p95_s=stats.p95([t[-1] - t[0] for t in times]),
        )

    async def measure(self, scenario: str, concurrency: int) -> Pair:
        bursts = {}
        for on in self.rng.sample([True, False], 2):
            bursts[on] = await self.burst(concurrency, scenario == "hand-over", on)
        return Pair(scenario, concurrency, bursts[True], bursts[False])


def table(pairs: list[Pair]) -> list[dict[str, Any]]:
    """Changes in percent, on against off, with 95 % intervals by Student's t over pairs."""
    rows = []
    for scenario in sorted({p.scenario for p in pairs}):
        for concurrency in sorted({p.concurrency for p in pairs if p.scenario == scenario}):
            mine = [p for p in pairs if (p.scenario, p.concurrency) == (scenario, concurrency)]
            row: dict[str, Any] = {"scenario": scenario, "concurrency": concurrency, "pairs": len(mine)}
            for name in ("tokens_per_s", "gap_p95_s", "latency_p95_s"):
                ratio = stats.paired_ratio([(getattr(p.on, name), getattr(p.off, name)) for p in mine])
                row[name] = {
                    "change_percent": round(100 * (ratio.value - 1), 3),
                    "low": round(100 * (ratio.low - 1), 3),
                    "high": round(100 * (ratio.high - 1), 3),
                }
            row["tokens_per_s_off"] = round(sum(p.off.tokens_per_s for p in mine) / len(mine), 1)
            rows.append(row)
    return rows
