"""The side-by-side comparison as far as it goes without an engine: portions, figures as text and as a picture."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.quality import Interval, Measures
from ops.compress.bench_quality import OutOfTime, Row, _Pieces, _variants, draw, main, parser, table

MEASURES = Measures(4088, *(Interval(mean, mean * 0.9, mean * 1.1) for mean in (0.02, 0.05, 6.0, 6.1, 1.01)))
ROWS = [
    Row("BF16 weights", "BF16", 269 << 20, 270 << 20, 23040.0, MEASURES),
    Row("INT4 RTN g64", "FP8", 105 << 20, 106 << 20, 11520.0, MEASURES),
]


def test_a_portion_always_gets_one_piece_done_and_then_stops() -> None:
    pieces = _Pieces(minutes=1e-6)
    time.sleep(0.001)
    pieces.begin("first")
    with pytest.raises(OutOfTime, match="stopped before: second"):
        pieces.begin("second")
    whole = _Pieces(minutes=0)
    for number in range(20):
        whole.begin(str(number))


def test_portions_need_a_place_to_go_on_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "text", "--minutes", "1"]) == 2
    assert "--minutes needs --keep DIR" in capsys.readouterr().err


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "absent.txt"), "--keep", str(tmp_path / "keep")]) == 2
    assert "absent.txt" in capsys.readouterr().err


def test_calibrated_forms_are_compared_where_the_calibrator_is(tmp_path: Path) -> None:
    plain = _variants(parser().parse_args(["source", "text"]), tmp_path)
    assert len(plain) == 3 and not any("GPTQ" in name for name in plain)
    site = _variants(parser().parse_args(["source", "text", "--calibrator-site", "site", "--samples", "8"]), tmp_path)
    (gptq,) = (options for name, options in site.items() if "GPTQ" in name)
    assert gptq[:6] == ["--method", "gptq", "--calibrate", str(tmp_path), "--samples", "8"]
    assert set(site) - set(plain) == {"INT4 GPTQ g64", "INT4 AWQ g64"}


def test_the_table_holds_sizes_and_intervals() -> None:
    head, rule, original, int4 = table(ROWS).splitlines()
    assert head.count("|") == rule.count("|") == original.count("|") == int4.count("|")
    assert "| INT4 RTN g64 | FP8 | 105.0 | 106.0 | 11,520 | 0.0200 [0.0180, 0.0220] |" in int4


def test_the_picture_is_one(tmp_path: Path) -> None:
    draw(tmp_path / "quality.png", ROWS)
    data = (tmp_path / "quality.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
