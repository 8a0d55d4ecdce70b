"""The link between two machines is cut again and again under load: no answer may be wrong or lost, nothing may be left.

    python -m ops.chaos.link_cuts --cuts 20 --out link-cuts.jsonl

Real engines on two raylets (`ops.two_machines`). Each cut lasts 0.5 to 6 seconds and comes at another moment of the
requests that are under way; an answer is compared with the one that the same prompt got before any cut.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from app.client import Client
from ops.bench.facts import gather
from ops.two_machines import Raylets, raylets, service

PROMPT = "The lighthouse keeper climbed the winding stairs each evening to light the lamp. " * 12
ANSWER: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
PROMPTS = 12
AT_ONCE = 3
LINK_MBIT = 100
REQUEST_S = 180.0
QUIET_S = 90.0


def ask(url: str, salt: str, number: int) -> tuple[str, float, str]:
    """(answer, seconds, error). `salt` keeps it out of every prefix cache; the answer does not depend on it."""
    began = time.monotonic()
    try:
        with Client(url, timeout_s=REQUEST_S) as client:
            text = f"Tale {number}. {PROMPT}"
            parts = client.stream_chat(text, cache_salt=salt, **ANSWER)
            return "".join(chunk.text for chunk in parts), time.monotonic() - began, ""
    except Exception as error:
        return "", time.monotonic() - began, f"{type(error).__name__}: {error}"


def status(url: str, path: str = "/status") -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def left(url: str) -> list[str]:
    """What is held though nothing is asked, once it had time to be given back."""
    until = time.monotonic() + QUIET_S
    while True:
        now, audit = status(url), status(url, "/status/audit")
        found = [*audit["breaches"], *now["staging"]["breaches"]]
        if now["tickets"]["in_flight"] or now["staging"]["bytes_held"] or now["queue"]["waiting"]:
            found.append(f"{now['tickets']['in_flight']} tickets, {now['staging']['bytes_held']} staging bytes")
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.5)


def cut(made: Raylets, url: str, number: int, dice: random.Random, expected: dict[int, str]) -> dict[str, Any]:
    wait_s, lasts_s = dice.uniform(0.0, 3.0), dice.choice((0.5, 1.0, 3.0, 6.0))
    before = status(url)

    def strike() -> None:
        time.sleep(wait_s)
        made.link.cut()
        time.sleep(lasts_s)
        made.link.join()

    striking = threading.Thread(target=strike)
    striking.start()
    chosen = dice.sample(range(PROMPTS), 2 * AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda each: ask(url, f"cut-{number}", each), chosen))
    striking.join()
    leaked, after = left(url), status(url)
    return {
        "cut": number,
        "after_s": round(wait_s, 2),
        "lasts_s": lasts_s,
        "requests": len(chosen),
        "done": sum(not error for *_, error in answers),
        "wrong": sum(text != expected[each] for each, (text, _, error) in zip(chosen, answers) if not error),
        "errors": [error for *_, error in answers if error],
        "longest_s": round(max(seconds for _, seconds, _ in answers), 2),
        "tokens_moved": after["ferry"]["tokens_moved"] - before["ferry"]["tokens_moved"],
        "tokens_recomputed": after["ferry"]["tokens_recomputed"] - before["ferry"]["tokens_recomputed"],
        "leaked": leaked,
        "links": after["links"],
    }


def shown(row: dict[str, Any]) -> str:
    """A row of the table: cut, moment, length, requests, whole, wrong, longest, tokens moved and recomputed, left."""
    counts = f"{row['requests']} | {row['done']} | {row['wrong']} | {row['longest_s']:.1f}"
    tokens = f"{row['tokens_moved']:,} | {row['tokens_recomputed']:,}"
    return f"| {row['cut']} | {row['after_s']:.1f} | {row['lasts_s']} | {counts} | {tokens} | {len(row['leaked'])} |"


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make.add_argument("--cuts", type=int, default=20)
    make.add_argument("--seed", type=int, default=1)
    make.add_argument("--out", required=True, help="JSON lines: facts, then one line a cut")
    args = make.parse_args(argv)
    facts = gather([]) | {"command": " ".join(["python -m ops.chaos.link_cuts", *(argv or sys.argv[1:])])}
    dice, bad = random.Random(args.seed), 0
    with raylets() as made, service(made) as url, Path(args.out).open("w") as out:
        if not made.link.namespace:
            print("link_cuts: network namespaces are not permitted here, so there is no link to cut", file=sys.stderr)
            return 2
        made.link.limit(LINK_MBIT)
        expected = {number: ask(url, "before", number)[0] for number in range(PROMPTS)}
        print(json.dumps(facts), file=out, flush=True)
        for number in range(args.cuts):
            row = cut(made, url, number, dice, expected)
            bad += row["wrong"] + len(row["errors"]) + len(row["leaked"])
            print(json.dumps(row), file=out, flush=True)
            print(shown(row), *row["errors"], *row["leaked"], flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
