"""What a GPU runs, on a CPU: the staging ring, and model runner V2 with the asynchronous scheduler
(`support/v2_runner`).

The hand-over tests in a process of their own: what is changed for them must be changed before anything imports vLLM.
Triton's interpreter is slow, so only in the soak.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANE = ROOT / "tests" / "support" / "v2_runner"
TIMEOUT_S = 4 * 3600


@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("changed", ["PAGEFERRY_RING_ON_CPU", "PAGEFERRY_V2_ON_CPU PAGEFERRY_RING_ON_CPU"])
def test_hand_over(changed: str) -> None:
    path = os.pathsep.join(filter(None, (str(LANE), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} | dict.fromkeys(changed.split(), "1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/engine/test_hand_over.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]
