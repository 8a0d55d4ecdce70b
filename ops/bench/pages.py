"""A results page as a whole: what was run, where, on which commit, where the raw data lie, and what came out. Pure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ops.bench import facts


def page(
    title: str, command: str, commits: list[str], record: Path, intro: str, body: str, picture: Path | None = None
) -> str:
    """`commits`: of the rows of the record. The picture lies beside the page, as the record does."""
    machine: dict[str, Any] = facts.gather([])["machine"]
    named = ", ".join(dict.fromkeys(commit for commit in commits if commit)) or "unknown"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    lines = [
        f"# {title}",
        f"Command: `{command}`. {date}, commit {named}; {where}. Raw data: `{record.name}`.",
        intro,
        *([f"![{title}]({picture.name})"] if picture is not None else []),
        body.rstrip(),
    ]
    return "\n\n".join(lines) + "\n"
