"""What the compressor wrote, read by two programs that know nothing of it: vLLM and transformers. Both must see the
weights that the compressed-tensors library decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_checkpoint import Geometry, make_checkpoint
from transformers import AutoModelForCausalLM

from actors.engine.cpu_fp8 import runs_int4
from cluster.quality import State, read_verdict
from ops.compress.cli import EXIT_UNMET
from ops.compress.cli import main as compress_main
from ops.compress.verify import library_decode
from ops.tiny_models.build import build

TOKENIZER = Path(".models/smollm2-135m-instruct")
TEXT = Path("LICENSE")
WINDOW = [(7 * index * index + 3 * index) % 1000 + 3 for index in range(96)]


def decoded(checkpoint: Path, destination: Path) -> Path:
    """The checkpoint as plain BF16, every INT4 weight decoded by the library."""
    destination.mkdir()
    stored: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        stored.update(load_file(file))
    plain = {}
    for name, tensor in stored.items():
        base, _, part = name.rpartition(".weight_")
        if part == "packed":
            scale = stored[f"{base}.weight_scale"]
            group = tensor.shape[1] * 8 // scale.shape[1]
            zero = stored.get(f"{base}.weight_zero_point")
            plain[f"{base}.weight"] = library_decode(tensor, scale, zero, group).bfloat16()
        elif not base:
            plain[name] = tensor
    save_file(plain, destination / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config))
    return destination


def transformers_logits(checkpoint: Path) -> torch.Tensor:
    model, loading = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, output_loading_info=True)
    assert not loading["missing_keys"], loading["missing_keys"]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([WINDOW])).logits[0].float()
    return logits


def nll(logits: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(WINDOW[1:]), reduction="none")
    return losses.numpy()


def vllm_nll(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Per position, by a vLLM engine of its own. W4A8 is off: it rounds activations too, which is not asked here."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    spec = {"checkpoint": str(checkpoint), "kv_cache_dtype": "auto", "tensor_parallel": 1, "windows": [WINDOW],
            "tap_file": str(tmp_path / "tap.f32"), "record": True}  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [
        sys.executable,
        "-m",
        "ops.compress.engine_pass",
        str(tmp_path / "spec.json"),
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    return np.array(json.loads((tmp_path / "out.json").read_text())["figures"])[0, :, 0]


def test_deepseek_fp8_to_int4_in_transformers(tmp_path: Path) -> None:
    """MLA, routed experts and an MTP layer, from FP8 blocks: the same logits, bit for bit, as from decoded weights."""
    make_checkpoint(tmp_path / "source", Geometry(), fp8=True)
    assert compress_main([str(tmp_path / "source"), str(tmp_path / "int4"), "--workers", "1", "--verify"]) == 0
    logits = transformers_logits(tmp_path / "int4")
    assert torch.equal(logits, transformers_logits(decoded(tmp_path / "int4", tmp_path / "plain")))
    assert logits.std() > 0.1


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's INT4 experts on CPU need AMX")
def test_int4_experts_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen3-moe", tmp_path / "source", TOKENIZER)
    arguments = [str(tmp_path / "source"), str(tmp_path / "int4"), "--group-size", "64", "--workers", "1"]
    assert compress_main(arguments) == 0
    expected = nll(transformers_logits(tmp_path / "int4"))
    assert expected == pytest.approx(nll(transformers_logits(decoded(tmp_path / "int4", tmp_path / "plain"))))
    found = vllm_nll(tmp_path / "int4", tmp_path, monkeypatch)
    # These experts compute in INT8 on CPU, so the comparison is loose; wrong codes or scales are off by nats.
    assert np.corrcoef(found, expected)[0, 1] > 0.99
    assert abs(found - expected).mean() < 0.3


@pytest.mark.skipif(not runs_int4(), reason="vLLM's INT4 kernel on CPU needs AVX-512")
def test_a_result_is_judged_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unjudged, then measured against its original in two engines, then judged by bounds: exit status and file."""
    build("llama", tmp_path / "source", TOKENIZER)
    base = [str(tmp_path / "source"), str(tmp_path / "int4"), "--group-size", "64", "--workers", "1"]
    assert compress_main(base) == 0
    assert read_verdict(tmp_path / "int4").state is State.UNJUDGED
    assert compress_main([*base, "--require", "max_kl=100"]) == EXIT_UNMET
    capsys.readouterr()
    evaluate = ["--evaluate", str(TEXT), "--tokens", "512", "--window", "64", "--kv-cache-dtype", "fp8"]
    assert compress_main([*base, *evaluate, "--require", "max_kl=0.000001"]) == EXIT_UNMET
    assert "rejected: max_kl=1e-06" in capsys.readouterr().out
    verdict = read_verdict(tmp_path / "int4")
    assert verdict.measures is not None
    assert verdict.kv_cache_dtype == "fp8"
    assert verdict.measures.positions == 8 * 63
    assert 1e-6 < verdict.measures.kl.mean < 1.0
    assert [(bucket.first, bucket.last) for bucket in verdict.by_position] == [(0, 16), (16, 63)]
    assert compress_main([*base, "--require", "max_kl=100,max_flips=1"]) == 0
    assert read_verdict(tmp_path / "int4").good
