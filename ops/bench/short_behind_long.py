"""How long a short request waits for its first token when a long prompt has come just before it.

    python -m ops.bench.short_behind_long --rounds 10 --out ops/results/short-behind-long.json

Each round asks alone, then sends a long prompt and a third of a second later another short one. The difference is held
against the time of one prefill step: the long prompt's own time to its first token, for the share of it in one step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.spec import ClusterSpec
from ops.bench import facts, stats
from ops.bench.gaps import stream
from ops.bench.load import body_of
from ops.bench.systems import Running, ours

LONG_TOKENS, SHORT_TOKENS, OUTPUT_TOKENS = 4000, 8, 4
BEHIND_S = 0.3
VOCABULARY = (1000, 40_000)  # token ids of words


async def rounds(port: int, model: str, count: int, chunk_tokens: int) -> list[dict[str, float]]:
    dice = random.Random(0)

    async def first_token_s(num_tokens: int) -> float:
        prompt = [dice.randrange(*VOCABULARY) for _ in range(num_tokens)]
        body = body_of(model, "", OUTPUT_TOKENS) | {"prompt": prompt}
        return (await stream(port, body)).tokens_s[0]

    for tokens in (SHORT_TOKENS, LONG_TOKENS, SHORT_TOKENS):
        await first_token_s(tokens)
    rows = []
    for _ in range(count):
        alone_s = await first_token_s(SHORT_TOKENS)
        long = asyncio.create_task(first_token_s(LONG_TOKENS))
        await asyncio.sleep(BEHIND_S)
        behind_s = await first_token_s(SHORT_TOKENS)
        long_s = await long
        step_s = long_s * min(1.0, chunk_tokens / LONG_TOKENS)
        rows.append({"alone_s": alone_s, "behind_s": behind_s, "long_s": long_s, "step_s": step_s})
        print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """`later_s`: mean and 95 % interval of how much later the first token comes; `within`: rounds of one step."""
    later = [row["behind_s"] - row["alone_s"] for row in rows]
    return {
        "rounds": len(rows),
        "within": sum(late <= row["step_s"] for late, row in zip(later, rows)),
        "latest_s": max(later),
        "later_s": asdict(stats.mean_interval(later)),
        "alone_s": asdict(stats.mean_interval([row["alone_s"] for row in rows])),
        "step_s": asdict(stats.mean_interval([row["step_s"] for row in rows])),
    }


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="local-cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--port", type=int, default=8195)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends the running service too
    overrides = dict(each.split("=", 1) for each in args.set)
    spec = ClusterSpec.load(args.config, overrides)
    chunk = spec.pools.prefill.max_num_batched_tokens or 2048
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        print(f"log of the service: {log.name}")
        async with Running(ours(spec, args.config, args.set, args.port, 1), print, Path(log.name)) as running:
            rows = await rounds(args.port, running.spec.model, args.rounds, chunk)
    command = {"command": f"python -m ops.bench.short_behind_long {' '.join(argv or sys.argv[1:])}"}
    found = facts.gather([]) | command | {"chunk_tokens": chunk, "summary": summary(rows), "rows": rows}
    args.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    asyncio.run(main())
