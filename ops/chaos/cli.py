"""`pageferry chaos KIND|all --trials N --seed S`: puts faults into a real engine pair and shows what came of each.

`pageferry chaos processes` kills, hangs and pauses processes of a running service under load; `pageferry chaos soak`
looks for false alarms of the page check in mixed traffic without a fault. Each has its own `--help`.

With `--check off` the same faults meet an engine without tags and without seals: the negative control, which shows
that wrong tokens do escape then.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.fault_kinds import PageFault, page_fault
from cluster.json_output import print_json
from cluster.json_output import run as run_json
from ops.bench import facts
from ops.chaos.pages.harness import Harness, spec_for
from ops.chaos.pages.trials import NotPlaced, Trial, run_trial

DEMO_MODEL = ".models/smollm2-135m-instruct"


def summary(kind: str, trials: list[Trial], failed: int) -> dict[str, Any]:
    """One row: counts of trials for which each statement is true; `wrong_tokens` and `false_alarms` are totals."""
    return {
        "kind": kind,
        "guard": page_fault(kind).guard,
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
    """With the check on: everything detected, no other touched, nothing wrong out, engine and ledger well."""
    if not checked:
        return True
    every = ("detected", "victims_only", "engine_alive", "ledger_clean")
    return (
        row["trials"] > 0
        and all(row[name] == row["trials"] for name in every)
        and not (row["wrong_tokens"] or row["false_alarms"] or row["not_placed"])
    )


class Book:
    """Trials that are done, by kind and number, in memory or in a file, so that a campaign can be cut into runs."""

    def __init__(self, file: Path | None, checked: bool, seed: int) -> None:
        self.file = file
        self.tree: dict[str, Any] = {"check": checked, "seed": seed, "trials": {}, "not_placed": {}, "runs": []}
        if file is not None and file.exists():
            self.tree = json.loads(file.read_text())
            if (self.tree["check"], self.tree["seed"]) != (checked, seed):
                raise SystemExit(f"{file} holds trials of check {self.tree['check']}, seed {self.tree['seed']}")

    def done(self, kind: str) -> list[Trial]:
        return [Trial(**trial) for trial in self.tree["trials"].get(kind, ())]

    def missing(self, kind: str, trials: int) -> list[int]:
        have = {trial.number for trial in self.done(kind)} | set(self.tree["not_placed"].get(kind, ()))
        return [number for number in range(trials) if number not in have]

    def keep(self, trial: Trial) -> None:
        self.tree["trials"].setdefault(trial.kind, []).append(asdict(trial))

    def not_placed(self, kind: str, number: int) -> None:
        self.tree["not_placed"].setdefault(kind, []).append(number)

    def rows(self, kinds: list[str]) -> list[dict[str, Any]]:
        return [summary(kind, self.done(kind), len(self.tree["not_placed"].get(kind, ()))) for kind in kinds]

    def save(self) -> None:
        if self.file is not None:
            self.tree["kinds"] = self.rows(
                [k for k in PageFault if k in self.tree["trials"] or k in self.tree["not_placed"]]
            )
            self.file.write_text(json.dumps(self.tree) + "\n")


async def run(book: Book, kinds: list[str], trials: int, seed: int, checked: bool, model: str, minutes: float) -> None:
    until = 0.0
    harness: Harness | None = None
    try:
        for kind in kinds:
            for number in book.missing(kind, trials):
                if harness is None:
                    harness = await Harness.start(spec_for(model, tuple(map(str, PageFault)), seed, checked), seed)
                    until = until or time.monotonic() + 60 * minutes  # starting engines does not count
                if time.monotonic() > until:
                    return
                try:
                    trial = await run_trial(harness, kind, number)
                except NotPlaced as error:
                    book.not_placed(kind, number)
                    print(f"{kind} trial {number}: not placed: {error}", file=sys.stderr)
                    continue
                book.keep(trial)
                if checked and not (trial.detected and trial.victims_only and trial.ledger_clean):
                    print(f"{trial}", file=sys.stderr)
                if not trial.engine_alive:
                    await harness.close()
                    harness = None
            book.save()
            print(line(book.rows([kind])[0]), file=sys.stderr, flush=True)
    finally:
        if harness is not None:
            await harness.close()


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


PROGRAMS = {"processes": "ops.chaos.processes.cli", "soak": "ops.chaos.pages.soak"}


def main(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        return int(importlib.import_module(PROGRAMS[argv[0]]).main(argv[1:]))
    parser = argparse.ArgumentParser(
        prog="pageferry chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", help=f"all, or one or more (comma) of: {', '.join(PageFault)}; or processes, or soak")
    parser.add_argument("--trials", type=int, default=10, help="trials a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", choices=("on", "off"), default="on", help="off: negative control")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no trial after this, engine start not counted"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--out", type=Path, help="keep trials in this file; those that are in it already are not repeated"
    )
    args = parser.parse_args(argv)
    kinds = list(map(str, PageFault)) if args.kind == "all" else args.kind.split(",")
    if unknown := [kind for kind in kinds if kind not in tuple(PageFault)]:
        parser.error(f"no fault {unknown[0]!r}; known: {', '.join(PageFault)}")
    checked = args.check == "on"
    book = Book(args.out, checked, args.seed)
    started = time.time()
    facts_now = facts.gather(argv)
    try:
        asyncio.run(run(book, kinds, args.trials, args.seed, checked, args.model, args.minutes))
    finally:
        command = " ".join(["pageferry", "chaos", *argv])
        book.tree["runs"].append({**facts_now, "command": command, "seconds": round(time.time() - started, 1)})
        book.save()
    rows = book.rows(kinds)
    whole = all(not book.missing(kind, args.trials) for kind in kinds)
    ok = whole and all(passed(row, checked) for row in rows)
    if args.json:
        report = {"check": args.check, "seed": args.seed, "trials": args.trials, "passed": ok, "kinds": rows}
        print_json(report)
    else:
        print(head())
        for row in rows:
            print(line(row))
        print("passed" if ok else "FAILED" if whole else "not all trials are done yet")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(run_json(main, sys.argv[1:]))
