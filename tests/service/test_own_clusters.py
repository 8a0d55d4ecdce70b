"""Cases with a Ray cluster of their own, each file in a process of its own, apart from the service of this session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = {
    "two_nodes_cases.py": 5,
    "two_machines_cases.py": 8,
    "placement_group_cases.py": 1,
    "applications_cases.py": 4,
    "deploy_cases.py": 5,
}


@pytest.mark.timeout(960)
@pytest.mark.parametrize("file", CASES)
def test_in_a_cluster_of_its_own(file: str) -> None:
    # Nothing of the service's cluster may leak into the cluster of these cases.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PAGEFERRY_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=900, env=env, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{CASES[file]} passed" in done.stdout
    print("\n".join(line for line in done.stdout.splitlines() if "ready after" in line))
