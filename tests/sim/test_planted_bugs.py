"""One-line bugs in shipped code, planted one at a time: the simulator's checkers see every one of them."""

from __future__ import annotations

import json
import subprocess
import sys

import planted_bugs
import pytest
from planted_bugs import BUGS, ROOT, Bug, places


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_the_line_that_a_bug_changes_is_there(bug: Bug) -> None:
    """A bug whose line has changed would not be planted: bring `planted_bugs.py` up to date."""
    assert places(bug) == 1, f"{bug.file} has {bug.old!r} {places(bug)} times"


def test_every_planted_bug_is_found() -> None:
    command = [sys.executable, planted_bugs.__file__, "--known"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    table = "\n".join(f"{row['seed']:4d}  {row['bug']}: {row['violation'][:100]}" for row in found)
    print(table)
    assert len(found) == len(BUGS) >= 15
    assert [row["bug"] for row in found if row["seed"] < 0] == [], table
