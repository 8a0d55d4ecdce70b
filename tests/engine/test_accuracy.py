"""`pageferry eval` at its small size, on engines of its own, with the processors that force tokens and plant faults.

1. The good pair is within the margins that so few prompts can show; the BF16 engine agrees with itself far better.
2. Each planted fault (K scale, a layer that was never copied, K and V swapped) is found, though all digests are right.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.accuracy import gates, planted
from ops.bench import stats


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_faults_are_found_and_a_good_pair_passes(tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    command = [sys.executable, "-m", "app.cli", "eval", "--small", "--seed", "7", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert file.exists(), done.stderr[-2000:]
    raw = json.loads(file.read_text())
    assert raw["breaches"] == []
    planted_rows = {row["fault"]: row for row in raw["planted"]}
    assert set(planted_rows) == {gates.AGAIN, *planted.FAULTS} and gates.sees(raw["planted"])
    passed = {gate["name"]: gate["passed"] for gate in raw["gates"]}
    assert passed["kl"] and passed["kl, many turns"] and passed["kl beyond one FP8 engine"]
    single = stats.cluster_bootstrap(gates.of(raw, "text", gates.FP8, gates.KL))
    assert planted_rows[gates.AGAIN]["kl"]["high"] < single.low / 4
