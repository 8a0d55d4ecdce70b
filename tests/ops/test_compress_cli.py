"""The command: what it prints, what it leaves, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_checkpoint import Geometry, make_checkpoint

from ops.compress.cli import EXIT_FAILED, EXIT_UNMET, EXIT_USAGE, main
from ops.compress.progress import ProgressBar

pytestmark = pytest.mark.compiles  # in the workers


def tiny_llama(path: Path) -> Path:
    """One layer, tied embeddings, one file and no index: the smallest form of checkpoint there is."""
    path.mkdir()
    torch.manual_seed(0)
    base = "model.layers.0"
    shapes = {
        "model.embed_tokens": (64, 128),
        f"{base}.self_attn.q_proj": (128, 128),
        f"{base}.self_attn.k_proj": (64, 128),
        f"{base}.self_attn.v_proj": (64, 128),
        f"{base}.self_attn.o_proj": (128, 128),
        f"{base}.mlp.gate_proj": (256, 128),
        f"{base}.mlp.up_proj": (256, 128),
        f"{base}.mlp.down_proj": (128, 256),
    }
    tensors = {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    tensors["model.norm.weight"] = torch.ones(128, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "vocab_size": 64,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_tied_model_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, result = tiny_llama(tmp_path / "source"), tmp_path / "int4"
    arguments = [str(source), str(result), "--workers", "1"]
    assert main([*arguments, "--json", "--verify"]) == 0
    captured = capsys.readouterr()
    out = json.loads(captured.out)
    assert out["verdict"]["state"] == "unjudged"
    assert out["verify"]["problems"] == []
    assert 0 < out["run"]["peak_bytes"] < out["run"]["max_memory_bytes"]
    assert "llama: family dense" in captured.err
    written, original = load_file(result / "model.safetensors"), load_file(source / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    assert "lm_head.weight" not in written
    assert "re:(.*\\.)?lm_head$" in json.loads((result / "config.json").read_text())["quantization_config"]["ignore"]
    assert sum(name.endswith("weight_packed") for name in written) == 7

    assert main(arguments) == 0  # there already: nothing is done twice
    assert "is there already" in capsys.readouterr().out
    assert main([*arguments, "--require", "max_kl=1"]) == EXIT_UNMET
    assert "unjudged" in capsys.readouterr().out
    (source / "model.safetensors").touch()
    assert main(arguments) == EXIT_USAGE
    assert "was made from another checkpoint" in capsys.readouterr().err
    (result / "report.json").unlink()
    assert main(arguments) == EXIT_USAGE
    assert "was not made by this command" in capsys.readouterr().err


def test_dry_run_shows_the_plan_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m", Geometry(layers=2, experts=2, vocab=256), fp8=True)
    assert main([str(tmp_path / "m"), str(tmp_path / "out"), "--dry-run", "--pack", "shared_experts"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["routed_experts"][1:3] == ["12", "12"]
    assert rows["shared_experts"][1:3] == ["6", "6"]
    assert rows["mlp"][1:3] == ["3", "0"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--group-size", "48"], "--group-size 48"),
        (["--clip", "0"], "--clip 0"),
        (["--pack", "router"], "--pack router: it always stays"),
        (["--require", "max_ppl"], "'' is not a number"),
        (["--method", "gptq"], "needs a text: --calibrate TEXT"),
        (["--method", "awq", "--calibrate", "LICENSE", "--evaluate", "LICENSE"], "cannot both calibrate and judge"),
        (
            ["--method", "gptq", "--calibrate", "LICENSE", "--calibrator-site", "/nowhere"],
            "calibrator.txt, and then",
        ),
        (["--keep", "mlp", "--keep", "attention"], "nothing in"),
        (["--max-memory", "0.1"], "it needs"),
    ],
)
def test_wrong_usage_says_what_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    source = tiny_llama(tmp_path / "m")
    assert main([str(source), str(tmp_path / "out"), "--workers", "1", *extra]) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_checkpoint_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == EXIT_USAGE
    assert "has no config.json" in capsys.readouterr().err


def test_a_cut_file_is_named_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_llama(tmp_path / "m")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-2])
    assert main([str(source), str(tmp_path / "out")]) == EXIT_USAGE
    assert "it was cut or is still being written" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


def test_weights_that_cannot_be_packed_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_llama(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, source / "model.safetensors")
    assert main([str(source), str(tmp_path / "out"), "--workers", "1"]) == EXIT_FAILED
    assert "mlp.up_proj.weight in model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_in_a_log_names_rate_and_time_left() -> None:
    bar = ProgressBar(4_000_000_000)
    bar.advance(1_000_000_000)  # done by an earlier run: counts as done, not as speed
    bar.advance(500_000_000)
    assert bar.line(2 * 10**9) == " 37.5%  1500 of 4000 MB  250 MB/s  10 s left"
    fresh = ProgressBar(4_000_000_000)
    fresh.advance(0)
    assert fresh.line(10**9) == "  0.0%  0 of 4000 MB  0 MB/s  time left not known yet"
    fresh.advance(1_000_000_000)
    assert fresh.line(2 * 10**9) == " 25.0%  1000 of 4000 MB  500 MB/s  6 s left"


def test_asymmetric_experts_are_cautioned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "source", Geometry(layers=2, experts=2, vocab=256, mtp_layers=0), fp8=False)
    base = [str(tmp_path / "source"), str(tmp_path / "int4"), "--group-size", "64", "--dry-run"]
    assert main(base) == 0
    assert "caution" not in capsys.readouterr().out
    assert main([*base, "--asymmetric"]) == 0
    assert "caution: asymmetric experts load only in vLLM's CUDA kernels" in capsys.readouterr().out
    assert main([*base, "--asymmetric", "--keep", "routed_experts"]) == 0
    assert "caution" not in capsys.readouterr().out
