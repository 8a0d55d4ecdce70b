"""Two Ray nodes on this machine, in a process of their own: this one may be connected to the service's cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("two_nodes_cases.py")


def test_pages_cross_nodes() -> None:
    # Nothing of the service's cluster may leak into the cluster of these cases.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PAGEFERRY_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, env=env, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout
