from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ops.kernels import aot, cli


def test_aot_prints_the_resources_of_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--aot", "--arch", "sm_90", "--only", "finish_digest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["kernels"]
    assert {"kernel", "arch", "config", "registers", "spills", "shared_bytes"} <= set(row)
    assert (row["kernel"], row["arch"], row["spills"]) == ("finish_digest", "sm_90", 0)
    assert cli.main(["--aot", "--arch", "sm_90", "--only", "finish_digest"]) == 0
    assert "1 compiled, 0 with spills" in capsys.readouterr().out


def test_aot_fails_on_spills_and_on_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = aot.compile_one
    monkeypatch.setattr(aot, "compile_one", lambda config, arch: replace(real(config, arch), spills=16))
    assert cli.main(["--aot", "--arch", "sm_90", "--only", "finish_digest"]) == 1
    assert "1 with spills: finish_digest all on sm_90" in capsys.readouterr().out
    assert cli.main(["--aot", "--only", "no such kernel"]) == 1


def test_spills_are_read_from_ptxas() -> None:
    """A kernel that must spill: 256 weights a thread in 255 registers. Zero spills is not a blind eye."""
    config = next(c for c in aot.configs() if (c.kernel, c.name) == ("pack", "g128-symmetric-bf16-1"))
    wide = replace(config, constants={**config.constants, "TILE": 64}, num_warps=1)
    assert aot.compile_one(wide, "sm_90").spills > 0
