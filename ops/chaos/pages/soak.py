"""False alarms: mixed traffic for thousands of decode steps with the check on and no fault at all.

`pageferry chaos soak --steps 20000 --file soak.json`. Prefix sharing, chunked prefill, preemption,
aborts in every phase, hand-overs, n > 1 (the same prompt twice at once), greedy and random sampling. Every run adds its
steps to the file, so that a long soak can be cut into short runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.spec import ClusterSpec
from ops.engine_pair import EnginePair

DEMO_MODEL = ".models/smollm2-135m-instruct"
STREAMS = 14
NUM_PAGES = 44  # about half of what the streams want: preemption is the rule
PAGE_TOKENS = 32


@dataclass(slots=True)
class Tally:
    steps: int = 0
    steps_unproven: int = 0
    rows_checked: int = 0
    pages_checked: int = 0
    alarms: int = 0  # requests ended by the check
    breaches: int = 0
    laws_broken: list[str] = field(default_factory=list)
    preemptions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    runs: int = 0


def spec_for(model: str) -> ClusterSpec:
    pool = {
        "block_tokens": PAGE_TOKENS,
        "kv_cache_gib": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,  # prompts come in chunks, beside running requests
        "engine_args": {"enforce_eager": True, "num_gpu_blocks_override": NUM_PAGES},
    }
    return ClusterSpec.parse(
        {
            "model": {"path": model, "max_model_len": 320},
            "pools": {
                "prefill": {**pool, "kv_dtype": "bfloat16"},
                "decode": {**pool, "kv_dtype": "fp8_e4m3"},
            },
            "transfer": {"staging_bytes_max": 128 << 20},
            "integrity": {"mode": "check", "seals": "full"},
        }
    )


class Traffic:
    def __init__(self, pair: EnginePair, seed: int, tally: Tally) -> None:
        self.pair = pair
        self.rng = random.Random(seed)
        self.tally = tally
        self.heads = [[self.rng.randrange(1000, 30000) for _ in range(96)] for _ in range(4)]
        self.stop = False

    def prompt(self) -> list[int]:
        head = self.rng.choice(self.heads)[: self.rng.choice([0, 32, 40, 64, 96])]
        return head + [self.rng.randrange(1000, 30000) for _ in range(self.rng.randint(1, 60))]

    async def one(self) -> None:
        from vllm.sampling_params import SamplingParams

        rng, prompt = self.rng, self.prompt()
        # No seeds: vLLM 0.32's CPU runner dies of a seeded request whose prompt comes in chunks
        # ("CPU Generator does not use offset").
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            max_tokens=rng.randint(1, 120),
            ignore_eos=True,
        )
        twins = 2 if rng.random() < 0.2 else 1
        over = rng.random() < 0.3
        leaves_after = rng.uniform(0.0, 2.0) if rng.random() < 0.2 else None
        await asyncio.gather(*(self._sequence(prompt, params.clone(), over, leaves_after) for _ in range(twins)))

    async def _sequence(self, prompt: list[int], params: Any, over: bool, leaves_after: float | None) -> None:
        request_id = uuid.uuid4().hex
        ticket = self.pair.alone(request_id)
        hand_over = None
        if over:
            ticket = self.pair.ticket(request_id, len(prompt))
            hand_over, _ = await self.pair.seal(ticket, prompt)

        async def run() -> str:
            reason = ""
            async for output in self.pair.stream(request_id, prompt, params, ticket, hand_over):
                self.tally.preemptions += sum(e.type.name == "PREEMPTED" for e in output.events or ())
                if output.finish_reason is not None:
                    reason = f"{output.finish_reason} {output.stop_reason or ''}".strip()
            return reason

        task = asyncio.create_task(run())
        done, _ = await asyncio.wait([task], timeout=leaves_after)
        if done:
            self.tally.outcomes[task.result()] += 1
            return
        await self.pair.decode.abort("rig", [request_id])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.tally.outcomes["left"] += 1

    async def stream(self) -> None:
        while not self.stop:
            await self.one()


async def soak(model: str, minutes: float, steps: int, seed: int, tally: Tally) -> None:
    pair = await EnginePair.start(spec_for(model))
    began = time.monotonic()
    try:
        traffic = Traffic(pair, seed, tally)
        streams = [asyncio.create_task(traffic.stream()) for _ in range(STREAMS)]
        before = tally.steps
        counters: dict[str, Any] = {}
        while time.monotonic() - began < 60 * minutes and tally.steps < steps:
            await asyncio.sleep(2)
            for stream in streams:
                if stream.done():
                    stream.result()
            counters = (await pair.decode.audit())["scheduler"]["counters"]
            tally.steps = before + int(counters["integrity_steps"])
        traffic.stop = True
        await asyncio.gather(*streams)
        left = await pair.idle_breaches()
        for _ in range(40):
            if not left:
                break
            left = await pair.idle_breaches()
        for host in (pair.decode, pair.prefill):
            assert host is not None
            audit = await host.core.call_utility_async("pageferry_audit")
            tally.laws_broken += audit["laws_broken"]
            tally.breaches += len(audit["breaches"])
        tally.laws_broken += left
        counters = (await pair.decode.audit())["scheduler"]["counters"]
        tally.steps = before + int(counters["integrity_steps"])
        tally.steps_unproven += int(counters["integrity_steps_unproven"])
        tally.rows_checked += int(counters["integrity_rows_checked"])
        tally.pages_checked += int(counters["integrity_pages_checked"])
        tally.alarms += int(counters["integrity_requests_ended"])
        tally.seconds += round(time.monotonic() - began, 1)
        tally.runs += 1
    finally:
        await pair.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry chaos soak", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000, help="decode steps over all runs")
    parser.add_argument("--minutes", type=float, default=4.0, help="most time of this run")
    parser.add_argument("--file", type=Path, default=Path("integrity-soak.json"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    tally = Tally()
    if args.file.exists():
        tree = json.loads(args.file.read_text())
        tally = Tally(**{**tree, "outcomes": Counter(tree["outcomes"])})
    if tally.steps < args.steps:
        asyncio.run(soak(args.model, args.minutes, args.steps, args.seed + tally.runs, tally))
    tree = {name: getattr(tally, name) for name in Tally.__dataclass_fields__}
    args.file.write_text(json.dumps(tree, indent=1) + "\n")
    clean = not (tally.alarms or tally.breaches or tally.laws_broken or tally.steps_unproven)
    if args.json:
        print_json(tree)
    else:
        for name, value in tree.items():
            print(f"{name:16} {dict(value) if isinstance(value, Counter) else value}")
        print("no false alarm" if clean else "FALSE ALARMS", f"in {tally.steps} of {args.steps} steps")
    return 0 if clean else 1
