"""What integrity costs: `python -m ops.bench.integrity_cost.cli --minutes 4 --file /tmp/bursts.json`.

Every run adds bursts to the file (so that long measurements can be cut into short ones) and prints the table over all
of them. `--check-alone` measures the batch check without an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.json_output import run as run_json
from ops.bench import facts, stats
from ops.bench.integrity_cost.share import TOKENS, Bench, Burst, spec_for, table
from ops.engine_pair import EnginePair

DEMO_MODEL = ".models/smollm2-135m-instruct"


async def measure(model: str, concurrencies: list[int], minutes: float, keep: Any) -> dict[str, Any]:
    """Bursts go to `keep` one by one. Returns how many steps went unproven meanwhile."""
    pair = await EnginePair.start(spec_for(model))
    try:
        bench = Bench(pair)
        for concurrency in concurrencies:  # every shape once before anything counts
            await bench.burst(concurrency)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            for concurrency in concurrencies:
                keep(await bench.burst(concurrency))
        counters = (await pair.decode.audit())["scheduler"]["counters"]
        return {"steps_unproven": counters.get("integrity_steps_unproven", 0)}
    finally:
        await pair.close()


def no_op_alone(batch: int = 16) -> dict[str, Any]:
    """What `integrity.mode: off` adds to one step over a build without the feature, nanoseconds.

    The no-op path differs from such a build by these calls and nothing else: one `delta` and one `on_allocated` for
    every request of the batch (as if each got a page in every step) in the scheduler, and one flag and one `proof` in
    the worker. `low` and `high` are the 95 % interval of the mean over 200 batches of 2,000 steps.
    """
    from actors.engine.integrity.tag_check import NoCheck
    from actors.engine.integrity.tracker import NoTracker

    tracker, check, checking, blocks, steps = NoTracker(), NoCheck(), False, [1, 2, 3], 2000

    def empty() -> int:
        began = time.perf_counter_ns()
        for _ in range(steps):
            for _ in range(batch):
                pass
        return time.perf_counter_ns() - began

    def with_calls() -> int:
        began = time.perf_counter_ns()
        for _ in range(steps):
            for _ in range(batch):
                tracker.on_allocated("request", blocks)
            tracker.delta(None)
            if checking:
                check.step(None, None)
            check.proof()
        return time.perf_counter_ns() - began

    pairs = [(with_calls() / steps, empty() / steps) for _ in range(200)]
    interval = stats.paired_difference(pairs)
    return {"requests": batch, "ns_a_step": interval.value, "low": interval.low, "high": interval.high}


def text(rows: list[dict[str, Any]]) -> str:
    def cell(value: dict[str, float]) -> str:
        return f"{value['us_a_step']} us | {value['percent']:.3f} % [{value['low']:.3f}, {value['high']:.3f}]"

    lines = [
        "| concurrency | bursts | step ms | check | of the step | tracker | of the step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['concurrency']} | {r['bursts']} | {r['step_ms']} | {cell(r['check'])} | {cell(r['tracker'])} |"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.integrity_cost.cli", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="measuring time of this run; 0: only print the table"
    )
    parser.add_argument("--file", type=Path, default=Path("integrity-bursts.json"), help="bursts are added to it")
    parser.add_argument("--concurrency", default=",".join(map(str, TOKENS)))
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--check-alone", action="store_true")
    parser.add_argument("--no-op-alone", action="store_true", help="what the no-op path adds to a step, no engine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.check_alone:
        from ops.bench.integrity_cost import check_alone  # torch and the kernels

        print_json(check_alone.all_shapes())
        return 0
    if args.no_op_alone:
        print_json(no_op_alone())
        return 0
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    if unknown := [c for c in concurrencies if c not in TOKENS]:
        parser.error(f"--concurrency {unknown[0]}; measured are {', '.join(map(str, TOKENS))}")
    book: dict[str, Any] = json.loads(args.file.read_text()) if args.file.exists() else {"bursts": [], "runs": []}
    bursts = [Burst(**tree) for tree in book["bursts"]]

    def keep(burst: Burst) -> None:
        bursts.append(burst)
        book["bursts"].append(burst.to_dict())

    if args.minutes > 0:
        run = facts.gather(argv)
        run["command"] = " ".join(["python", "-m", "ops.bench.integrity_cost.cli", *argv])
        run |= asyncio.run(measure(args.model, concurrencies, args.minutes, keep))
        book["runs"].append(run)
        args.file.write_text(json.dumps(book) + "\n")
    rows = table(bursts)
    if args.json:
        print_json({"rows": rows, "runs": book["runs"]})
    else:
        print(text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(run_json(main, sys.argv[1:]))
