from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops.kernels import aot, bench, cli, vectors


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


def test_bench_reports_every_figure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "page_figures", lambda backend, counts, n, real=bench.page_figures: real(backend, [1], 1)
    )
    assert cli.main(["--bench", "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {row["backend"] for row in figures["pages"]} == {"numba", "reference"}
    assert len(figures["pages"]) == 6
    assert len(figures["check_tags"]) == 16
    assert all(row["chain_share"] > 0 for row in figures["pages"])
    # No float32 copy of the pages, in either backend.
    for memory in figures["peak_memory"].values():
        assert memory["seal_extra_mib"] < memory["float32_copy_mib"]
    assert "chain/copy" in bench.report(figures)


def test_bench_gives_no_figures_for_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "verify", lambda backend: [f"{backend}: pages 0: bytes"])
    with pytest.raises(AssertionError, match="no figures: numba: pages 0"):
        cli.main(["--bench", "--quick"])


def test_vectors_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli.main(["--vectors"]) == 0
    assert "all equal" in capsys.readouterr().out
    monkeypatch.setattr(vectors, "FOLDER", tmp_path)
    assert cli.main(["--write-vectors"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e4m3.json", "int4.json", "pages.json", "tags.json"]
    wrong: list[Any] = ["x"]
    monkeypatch.setattr(vectors, "verify", lambda backend: wrong)
    assert cli.main(["--vectors", "--json"]) == 1
