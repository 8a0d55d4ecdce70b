"""`pageferry chaos KIND|all --trials N --seed S`: puts faults into a real engine pair and shows what came of each.

With `--check off` the same faults meet an engine without tags and without seals: the negative control, which shows
that wrong tokens do escape then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from actors.engine.faults import KINDS
from ops.chaos.harness import Harness, spec_for
from ops.chaos.trials import NotPlaced, Trial, run_trial
from ops.measure import facts

DEMO_MODEL = ".models/smollm2-135m-instruct"


def summary(kind: str, trials: list[Trial], failed: int) -> dict[str, Any]:
    """One row: counts of trials for which each statement is true; `wrong_tokens` and `false_alarms` are totals."""
    return {
        "kind": kind,
        "guard": KINDS[kind].guard,
        "trials": len(trials),
        "detected": sum(t.detected for t in trials),
        "victims_only": sum(t.victims_only for t in trials),
        "wrong_tokens": sum(t.wrong_tokens for t in trials),
        "trials_with_wrong_tokens": sum(t.wrong_tokens > 0 for t in trials),
        "false_alarms": sum(t.false_alarms for t in trials),
        "engine_alive": sum(t.engine_alive for t in trials),
        "ledger_clean": sum(t.ledger_clean for t in trials),
        "not_placed": failed,
        "tokens_after_fault_max": max((t.tokens_after_fault or 0 for t in trials), default=0),
        "seconds": round(sum(t.seconds for t in trials), 1),
        "by": sorted({t.by for t in trials if t.by}),
    }


def passed(row: dict[str, Any], checked: bool) -> bool:
    """With the check on: everything detected, nobody else touched, nothing wrong out, engine and ledger well."""
    if not checked:
        return True
    every = ("detected", "victims_only", "engine_alive", "ledger_clean")
    return (
        row["trials"] > 0
        and all(row[name] == row["trials"] for name in every)
        and not (row["wrong_tokens"] or row["false_alarms"] or row["not_placed"])
    )


async def run(
    kinds: list[str], trials: int, seed: int, checked: bool, model: str, verbose: bool
) -> list[dict[str, Any]]:
    rows = []
    harness: Harness | None = None
    try:
        for kind in kinds:
            if harness is None:
                harness = await Harness.start(spec_for(model, tuple(KINDS), seed, checked), seed)
            done: list[Trial] = []
            failed = 0
            for number in range(trials):
                try:
                    done.append(await run_trial(harness, kind, number))
                except NotPlaced as error:
                    failed += 1
                    print(f"{kind} trial {number}: not placed: {error}", file=sys.stderr)
                    continue
                trial = done[-1]
                if verbose or (checked and not (trial.detected and trial.victims_only and trial.ledger_clean)):
                    print(f"{trial}", file=sys.stderr)
                if not trial.engine_alive:
                    break
            rows.append(summary(kind, done, failed))
            print(line(rows[-1]), file=sys.stderr, flush=True)
            if done and not done[-1].engine_alive:
                await harness.close()
                harness = None
    finally:
        if harness is not None:
            await harness.close()
    return rows


def merge(file: Path, report: dict[str, Any], argv: list[str]) -> None:
    """Rows of this run replace those of the same kinds, so that a long campaign can be cut into runs."""
    book: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"kinds": [], "runs": []}
    new = {row["kind"] for row in report["kinds"]}
    rows = [row for row in book["kinds"] if row["kind"] not in new] + report["kinds"]
    run = {**facts.gather(argv), "command": " ".join(["pageferry", "chaos", *argv]), "seconds": report["seconds"]}
    order = list(KINDS)
    book |= {"check": report["check"], "kinds": sorted(rows, key=lambda row: order.index(row["kind"]))}
    book["runs"].append(run)
    file.write_text(json.dumps(book, indent=1) + "\n")


COLUMNS = (
    ("kind", 24),
    ("guard", 7),
    ("trials", 6),
    ("detected", 8),
    ("victims_only", 12),
    ("wrong_tokens", 12),
    ("false_alarms", 12),
    ("engine_alive", 12),
    ("ledger_clean", 12),
    ("seconds", 7),
)


def head() -> str:
    return " ".join(f"{name:{width}}" for name, width in COLUMNS) + "  noticed by"


def line(row: dict[str, Any]) -> str:
    return " ".join(f"{row[name]:{width}}" for name, width in COLUMNS) + f"  {'; '.join(row['by'])}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry chaos", description=__doc__.split("\n")[0])
    parser.add_argument("kind", help=f"all, or one or more (comma) of: {', '.join(KINDS)}")
    parser.add_argument("--trials", type=int, default=10, help="trials a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", choices=("on", "off"), default="on", help="off: negative control")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="also put the rows into this JSON file; other kinds in it stay")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    args = parser.parse_args(argv)
    kinds = list(KINDS) if args.kind == "all" else args.kind.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no fault {unknown[0]!r}; known: {', '.join(KINDS)}")
    checked = args.check == "on"
    started = time.time()
    rows = asyncio.run(run(kinds, args.trials, args.seed, checked, args.model, args.verbose))
    report = {
        "check": args.check,
        "seed": args.seed,
        "trials": args.trials,
        "seconds": round(time.time() - started, 1),
        "passed": all(passed(row, checked) for row in rows),
        "kinds": rows,
    }
    if args.out:
        merge(args.out, report, argv)
    if args.json:
        print(json.dumps(report))
    else:
        print(head())
        for row in rows:
            print(line(row))
        print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
