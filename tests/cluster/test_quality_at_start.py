"""What a service makes of a compressed checkpoint at its start. Laws: (1) what was found bad is refused, with a way
out; (2) what has no verdict is served with a warning, and refused where that is required; (3) what was judged good
under the pool's own KV format is served in silence; (4) a file that cannot be read is no pass."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from app.commands import serve
from app.main import application
from cluster.quality import Interval, Measures, PoorQuality, State, Verdict, check_quality, refuse_poor_quality
from cluster.spec import ClusterSpec
from ops.compress.quality import UNJUDGED_FILES, judge, store_verdict

MEASURES = Measures(4088, *(Interval(mean, mean * 0.9, mean * 1.1) for mean in (0.02, 0.05, 6.0, 6.1, 1.01)))
BOUNDS = {State.REJECTED: {"max_kl": 0.001}, State.ACCEPTED: {"max_kl": 0.1}, State.MEASURED: {}}


def compressed(folder: Path, state: State | None, kv: str = "fp8") -> Path:
    folder.mkdir()
    config = {"model_type": "strange", "quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"12345678")
    if state is State.UNJUDGED:
        (folder / "quality.json").write_bytes(UNJUDGED_FILES["quality.json"])
    elif state is not None:
        store_verdict(folder, judge(Verdict(State.MEASURED, "", MEASURES, (), kv), BOUNDS[state]))
    return folder


def spec(weights: Path, **decode: Any) -> ClusterSpec:
    pool = {"weights": str(weights), "kv_dtype": "fp8_e4m3", "kv_cache_gib": 1, **decode}
    return ClusterSpec.parse({"model": {"path": "original"}, "pools": {"decode": pool}})


def test_law_1_what_was_found_bad_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = compressed(tmp_path / "int4", State.REJECTED)
    with pytest.raises(PoorQuality) as caught:
        check_quality(spec(folder), "decode")
    said = str(caught.value)
    assert f"pools.decode: {folder} was found bad: max_kl=0.001: 0.02, interval 0.018 to 0.022" in said
    assert "--method gptq or awq" in said and "pools.decode.weights_quality: ignore" in said
    assert "rejected: KL 0.0200" in check_quality(spec(folder, weights_quality="ignore"), "decode")


@pytest.mark.parametrize("state", [None, State.UNJUDGED])
def test_law_2_what_has_no_verdict_is_warned_of_or_refused(
    tmp_path: Path, state: State | None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compressed(tmp_path / "int4", state)
    with caplog.at_level(logging.WARNING, "pageferry.quality"):
        refuse_poor_quality(spec(folder))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has not been compared with its original" in record.message and "its answers may be poor" in record.message
    assert f"pageferry compress SRC {folder} --evaluate TEXT --kv-cache-dtype fp8 --require" in record.message
    with pytest.raises(PoorQuality, match=r"is unjudged(.|\n)*weights_quality is require"):
        check_quality(spec(folder, weights_quality="require"), "decode")


def test_law_2_measured_without_bounds_is_not_good(tmp_path: Path) -> None:
    folder = compressed(tmp_path / "int4", State.MEASURED)
    said = check_quality(spec(folder), "decode")
    assert "is measured: KL 0.0200 [0.0180, 0.0220] nats, 5.0% of top-1 tokens differ" in said
    with pytest.raises(PoorQuality, match="is measured"):
        check_quality(spec(folder, weights_quality="require"), "decode")


def test_law_3_what_was_judged_good_is_served_in_silence(tmp_path: Path) -> None:
    good = compressed(tmp_path / "int4", State.ACCEPTED)
    for choice in ("require", "check", "ignore"):
        assert check_quality(spec(good, weights_quality=choice), "decode") == ""
    other = compressed(tmp_path / "other", State.ACCEPTED, kv="auto")
    assert "judged with kv_cache_dtype auto, this pool keeps fp8_e4m3" in check_quality(spec(other), "decode")


def test_law_3_an_original_needs_no_verdict(tmp_path: Path) -> None:
    published = compressed(tmp_path / "int4", None)
    as_model = ClusterSpec.parse({"model": {"path": str(published)}, "pools": {"decode": {"kv_cache_gib": 1}}})
    assert check_quality(as_model, "decode") == "", "its makers published it so"
    store_verdict(published, judge(Verdict(State.MEASURED, "", MEASURES), BOUNDS[State.REJECTED]))
    with pytest.raises(PoorQuality):
        check_quality(as_model, "decode")
    assert check_quality(spec(tmp_path / "elsewhere"), "decode") == "", "its replicas look where they run"


def test_law_4_damage_is_refused(tmp_path: Path) -> None:
    folder = compressed(tmp_path / "int4", State.ACCEPTED)
    (folder / "quality.json").write_text("{")
    with pytest.raises(PoorQuality, match=r"cannot be read(.|\n)*weights_quality: ignore"):
        check_quality(spec(folder), "decode")
    (folder / "model.safetensors").write_bytes(b"123")
    store_verdict(folder, judge(Verdict(State.MEASURED, "", MEASURES), BOUNDS[State.ACCEPTED]))
    (folder / "model.safetensors").write_bytes(b"1234")
    assert "speaks of other bytes" in check_quality(spec(folder), "decode")


def test_serve_refuses_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = compressed(tmp_path / "int4", State.REJECTED)
    assert serve.main(["local-cpu", f"pools.decode.weights={folder}"]) == 2
    assert "was found bad" in capsys.readouterr().err


def test_serve_run_and_rolling_updates_refuse_too(tmp_path: Path) -> None:
    with pytest.raises(PoorQuality, match="was found bad"):
        application(spec(compressed(tmp_path / "int4", State.REJECTED)))
