"""A results page as a whole: what was run, where, on which commit, where the raw data lie, and what came out. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench import facts


def page(
    title: str,
    command: str,
    rows: Sequence[dict[str, Any]],
    record: Path,
    intro: str,
    body: str,
    picture: Path | None = None,
) -> str:
    """`rows`: of the record, with `commit`, where known `load` and `set`. Record and picture lie beside the page."""
    machine: dict[str, Any] = facts.gather([])["machine"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row["commit"])) or "unknown"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    lines = [
        f"# {title}",
        f"Command: `{command}`. {date}, commit {commits}; {where}. Raw data: `{record.name}`.",
        *_circumstances(rows),
        intro,
        *([f"![{title}]({picture.name})"] if picture is not None else []),
        body.rstrip(),
    ]
    return "\n\n".join(lines) + "\n"


def _circumstances(rows: Sequence[dict[str, Any]]) -> list[str]:
    loads = [row["load"] for row in rows if "load" in row]
    settings = dict.fromkeys(setting for row in rows for setting in row.get("set", ()))
    found = []
    if loads:
        found.append(f"Load average of the machine before each repeat: {min(loads):.1f} to {max(loads):.1f}.")
    if settings:
        found.append(f"Set over the topology's own: {', '.join(f'`{setting}`' for setting in settings)}.")
    return [" ".join(found)] if found else []
