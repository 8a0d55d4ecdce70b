"""The verdict. Laws: (1) nothing is good that was not compared and within its bounds; (2) a verdict speaks of the bytes
it was made for, and of no others; (3) what cannot be read is an error, not a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.quality import FILE_NAME, Bucket, Interval, Measures, State, Verdict, read_verdict
from ops.compress.quality import UNJUDGED, UNJUDGED_FILES, judge, parse_bounds, store_verdict

MEASURES = Measures(
    positions=4088,
    kl=Interval(0.02, 0.015, 0.03),
    flips=Interval(0.05, 0.04, 0.06),
    ppl_reference=Interval(6.0, 5.0, 7.0),
    ppl=Interval(6.1, 5.1, 7.1),
    ppl_ratio=Interval(1.01, 1.0, 1.02),
)
MEASURED = Verdict(State.MEASURED, "", MEASURES, (Bucket(0, 16, MEASURES),), "fp8", "source", "text")


def checkpoint(tmp_path: Path, quantised: bool = True) -> Path:
    config = {"quantization_config": {"quant_method": "compressed-tensors"}} if quantised else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    return tmp_path


def test_law_1_nothing_is_good_without_a_comparison_and_bounds(tmp_path: Path) -> None:
    assert not judge(UNJUDGED, {"max_kl": 1e9}).good
    assert judge(UNJUDGED, {"max_kl": 1e9}).state is State.UNJUDGED
    without = judge(MEASURED, {})
    assert without.state is State.MEASURED
    assert not without.good
    accepted = judge(MEASURED, {"max_kl": 0.03, "max_flips": 0.06, "max_ppl": 8, "max_ppl_ratio": 1.02})
    assert accepted.good
    assert judge(accepted, {"max_kl": 0.02}).state is State.REJECTED


@pytest.mark.parametrize(
    ("bounds", "unmet"),
    [
        ({"max_kl": 0.029}, "max_kl=0.029: 0.02, interval 0.015 to 0.03"),  # the mean holds, the upper end does not
        ({"max_ppl_ratio": 1.015}, "max_ppl_ratio=1.015"),
        ({"max_kl": 1.0, "max_flips": 0.01}, "max_flips=0.01"),
    ],
)
def test_law_1_the_upper_end_must_hold(bounds: dict[str, float], unmet: str) -> None:
    verdict = judge(MEASURED, bounds)
    assert verdict.state is State.REJECTED
    assert len(verdict.unmet) == 1
    assert unmet in verdict.reason


def test_law_1_nan_exceeds_every_bound() -> None:
    broken = Verdict(State.MEASURED, "", Measures(1, *[Interval(*[float("nan")] * 3)] * 5))
    assert judge(broken, {"max_kl": 1e9}).state is State.REJECTED


def test_a_fresh_result_is_unjudged(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert read_verdict(path).state is State.UNJUDGED
    (path / FILE_NAME).write_bytes(UNJUDGED_FILES[FILE_NAME])
    assert read_verdict(path) == UNJUDGED


def test_an_original_needs_no_verdict(tmp_path: Path) -> None:
    verdict = read_verdict(checkpoint(tmp_path, quantised=False))
    assert verdict.state is State.ORIGINAL
    assert verdict.good


def test_law_2_a_verdict_comes_back_whole_and_ends_with_its_bytes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    judged = judge(MEASURED, {"max_kl": 0.1})
    store_verdict(path, judged)
    assert read_verdict(path) == judged
    (path / "model.safetensors").write_bytes(b"123456789")
    changed = read_verdict(path)
    assert changed.state is State.UNJUDGED
    assert "other bytes" in changed.reason


@pytest.mark.parametrize(
    "damage", ["{", "{}", '{"state": "excellent"}', '{"state": "accepted", "measures": {"kl": 1}}']
)
def test_law_3_damage_is_an_error(tmp_path: Path, damage: str) -> None:
    path = checkpoint(tmp_path)
    (path / FILE_NAME).write_text(damage)
    with pytest.raises(ValueError, match="cannot be read"):
        read_verdict(path)


def test_bounds_from_the_command_line() -> None:
    assert parse_bounds(["max_kl=0.05,max_flips=0.1", "max_ppl_ratio=1.02"]) == {
        "max_kl": 0.05,
        "max_flips": 0.1,
        "max_ppl_ratio": 1.02,
    }
    with pytest.raises(ValueError, match="no bound 'max_k'; known: max_kl"):
        parse_bounds(["max_k=1"])
    with pytest.raises(ValueError, match="'a' is not a number"):
        parse_bounds(["max_kl=a"])
