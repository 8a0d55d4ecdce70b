"""First and second token of a prompt when prefill and decode share a node, and when a link lies between them.

    python -m ops.bench.across --out across.json

Real engines on two raylets (`ops.two_machines`). The first token is prefill's own; the second is decode's, after all
pages have come and are opened. One request at a time; no prompt is in a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from ops.bench.facts import gather
from ops.bench.gaps import stream
from ops.bench.load import body_of
from ops.chaos.link_cuts import status
from ops.two_machines import Link, Raylets, raylets, service

VOCABULARY = (1000, 40_000)  # token ids of words
OUTPUT_TOKENS = 4
WARM_TOKENS = (300, 300)
REPORT_S = 1.0  # for the transfer actor's report
STEP_TOKENS = 512
SETTINGS = ("model.max_model_len=4096", f"pools.prefill.max_num_batched_tokens={STEP_TOKENS}")
NEAR = "pools.decode.resources={prefill_node: 1}"


def ask(url: str, dice: random.Random, num_tokens: int) -> dict[str, float]:
    prompt = [dice.randrange(*VOCABULARY) for _ in range(num_tokens)]
    before = status(url)["ferry"]
    tokens_s = asyncio.run(stream(urlsplit(url).port or 0, body_of("smollm2", prompt, OUTPUT_TOKENS))).tokens_s
    time.sleep(REPORT_S)
    after = status(url)["ferry"]
    return {
        "first_s": tokens_s[0],
        "second_s": tokens_s[1],
        "moved": after["tokens_moved"] - before["tokens_moved"],
        "recomputed": after["tokens_recomputed"] - before["tokens_recomputed"],
    }


def visit(made: Raylets, place: str, limits: list[int], args: argparse.Namespace, report: dict[str, Any]) -> None:
    dice = random.Random(place)
    near = (NEAR,) if place == "same node" else ()
    with service(made, *SETTINGS, *near) as url:
        for num_tokens in WARM_TOKENS:
            ask(url, dice, num_tokens)
        for limit in limits:
            made.link.limit(limit)
            for num_tokens in args.tokens:
                rows = [ask(url, dice, num_tokens) for _ in range(args.rounds)]
                row = {"place": place, "limit_mbit": limit, "tokens": num_tokens, "turns": rows}
                report["rows"].append(row | {"links": status(url)["links"]})
                print(shown(row), flush=True)
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
        made.link.limit(0)


def shown(row: dict[str, Any]) -> str:
    """A row of the table: medians, and how much later than the first token the second comes."""
    turns, limit = row["turns"], f"{row['limit_mbit']} Mbit/s" if row["limit_mbit"] else "no limit"
    first, gap = (median(t["first_s"] for t in turns), median(t["second_s"] - t["first_s"] for t in turns))
    there = "" if row["place"] == "same node" else f", {limit}"
    moved = sum(t["moved"] >= row["tokens"] - 1 and not t["recomputed"] for t in turns)
    return f"| {row['place']}{there} | {row['tokens']:,} | {first:.2f} | {gap:.2f} | {moved} of {len(turns)} |"


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make.add_argument("--out", default="across.json")
    make.add_argument("--rounds", type=int, default=3)
    make.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    make.add_argument("--limits", type=int, nargs="+", default=[1000, 50], help="Mbit/s of the link; 0: none")
    make.add_argument("--places", nargs="+", default=["same node", "two nodes"])
    args = make.parse_args(argv)
    command = " ".join(["python -m ops.bench.across", *(sys.argv[1:] if argv is None else argv)])
    report: dict[str, Any] = {"facts": gather([]) | {"command": command, "step_tokens": STEP_TOKENS}, "rows": []}
    with raylets() as made:
        report["facts"]["link"] = "a veth pair" if made.link != Link() else "loopback"
        for place in args.places:
            visit(made, place, [0] if place == "same node" else args.limits, args, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
