"""The record of runs: JSON lines, and a table per kind."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("requests", "complete", "clear_errors", "left", "broken", "lost", "token_faults")
HEAD = ("kind", "runs", *(name.replace("_", " ") for name in COLUMNS), "leaked", "tokens", "at rest after s", "good")


def append(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def table(results: Iterable[dict[str, Any]]) -> str:
    """A Markdown table, one row a kind and one for all."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_kind.setdefault(result["kind"], []).append(result)
    rows = [_row(kind, runs) for kind, runs in sorted(by_kind.items())]
    rows.append(_row("all", [run for runs in by_kind.values() for run in runs]))
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _row(kind: str, runs: list[dict[str, Any]]) -> list[str]:
    sums = [str(sum(run["findings"][name] for run in runs)) for name in COLUMNS]
    leaked = sum(len(run["leaked"]) for run in runs)
    tokens = sum(run["findings"]["tokens"] for run in runs)
    rest = statistics.median(run["rest_s"] for run in runs) if runs else 0.0
    good = sum(bool(run["good"]) for run in runs)
    return [kind, str(len(runs)), *sums, str(leaked), str(tokens), f"{rest:.1f}", f"{good}/{len(runs)}"]


def line(result: dict[str, Any]) -> str:
    """One run on a terminal line, and under it what was wrong."""
    found = result["findings"]
    counts = ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in COLUMNS if found[name])
    head = f"{'ok  ' if result['good'] else 'FAIL'} {result['kind']} seed {result['seed']}: {counts}"
    head += f"; at {result['phase'] or 'rest'}; {result['seconds']:.1f} s, at rest after {result['rest_s']:.1f} s"
    return "\n".join([head, *(f"     {each}" for each in (*found["problems"], *result["leaked"]))])
