"""One page of everything measured about integrity.

`python -m ops.bench.integrity_cost.report --on F --off F ... --to F.md` reads what
`pageferry chaos --out`, `pageferry chaos soak`, `ops.bench.integrity_cost.cli` and its `--check-alone` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ops.bench import facts
from ops.bench.integrity_cost.cli import text as cost_table
from ops.bench.integrity_cost.share import Burst, table


def read(path: Path | None) -> Any:
    return json.loads(path.read_text()) if path is not None and path.exists() else None


def runs(book: Any) -> list[str]:
    """Where the figures come from: every command once, and the machine."""
    lines = [f"- `{run['command']}`" for run in book["runs"]]
    return [*dict.fromkeys(lines), "", facts.one_line(book["runs"][-1])]


def chaos(on: Any, off: Any) -> list[str]:
    lines = ["## Faults", ""]
    controls = {row["kind"]: row for row in off["kinds"]} if off else {}
    lines += [
        "| fault | must notice | trials | detected | victim only | wrong tokens | false alarms | engine alive "
        "| ledger clean | without the check: wrong tokens (trials with some / trials) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in on["kinds"]:
        control = controls.get(row["kind"])
        escaped = "not placed" if control and not control["trials"] else "-"
        if control and control["trials"]:
            escaped = f"{control['wrong_tokens']} ({control['trials_with_wrong_tokens']} / {control['trials']})"
        lines.append(
            f"| {row['kind']} | {row['guard']} | {row['trials']} | {row['detected']} | {row['victims_only']} "
            f"| {row['wrong_tokens']} | {row['false_alarms']} | {row['engine_alive']} | {row['ledger_clean']} "
            f"| {escaped} |"
        )
    total = sum(row["trials"] for row in on["kinds"])
    lines += ["", f"{total} trials with the check on.", "", *runs(on)]
    if off:
        lines += ["", "Without the check (negative control):", "", *runs(off)]
    return lines


def soak(tally: Any) -> list[str]:
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(tally["outcomes"].items(), key=lambda item: -item[1]))
    return [
        "## False alarms",
        "",
        f"{tally['alarms']} in {tally['steps']:,} decode steps of mixed traffic (prefix sharing, chunked prefill, "
        f"{tally['preemptions']} preemptions, aborts, hand-overs, twins): {tally['rows_checked']:,} rows and "
        f"{tally['pages_checked']:,} block table entries checked, {tally['steps_unproven']} steps unproven, "
        f"{tally['breaches']} ledger breaches, {len(tally['laws_broken'])} laws broken when idle. "
        f"Requests: {outcomes}.",
        "",
        "- `pageferry chaos soak`",
    ]


def cost(book: Any) -> list[str]:
    return [
        "## Cost of a step",
        "",
        cost_table(table([Burst(**tree) for tree in book["bursts"]])),
        "",
        "Both parts timed inside one engine and divided by the time of the steps of the same burst; 95 % intervals by "
        "Student's t over bursts.",
        "",
        *runs(book),
    ]


def alone(figures: Any) -> list[str]:
    lines = [
        "## The batch check alone",
        "",
        "| requests x tokens | page | us | MB touched | GB/s | share of a copy of as many bytes | backend |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures:
        values = list(row.values())
        rows, tokens, page, _, backend, us, touched, rate, share = values
        lines.append(
            f"| {rows} x {tokens:,} | {page} | {us:.1f} | {touched / 1e6:.2f} | {rate:.1f} | {share:.2f} | {backend} |"
        )
    return [*lines, "", "- `python -m ops.bench.integrity_cost.cli --check-alone`"]


def no_op(figure: Any) -> list[str]:
    return [
        "## The no-op path against a build without the feature",
        "",
        f"{figure['ns_a_step']:.0f} ns a step of {figure['requests']} requests [{figure['low']:.0f}, "
        f"{figure['high']:.0f}]: the only calls that `mode: off` adds, timed alone. A step of the model above takes "
        "tens of milliseconds, so that no throughput measurement could tell it from none.",
        "",
        "- `python -m ops.bench.integrity_cost.cli --no-op-alone`",
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.integrity_cost.report", description=__doc__.split("\n")[0]
    )
    for name in ("on", "off", "soak", "cost", "alone", "no-op"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args(argv)
    parts: list[list[str]] = []
    if on := read(args.on):
        parts.append(chaos(on, read(args.off)))
    for path, part in ((args.soak, soak), (args.cost, cost), (args.alone, alone), (args.no_op, no_op)):
        if found := read(path):
            parts.append(part(found))
    page = "\n\n".join("\n".join(part) for part in parts)
    args.to.write_text(f"# Integrity: what is caught and what it costs\n\n{page}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
