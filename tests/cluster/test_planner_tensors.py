"""The planner's tensors against real checkpoints that transformers wrote, name by name, and published totals."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.plan.architecture import architecture
from cluster.plan.checkpoint import stored
from cluster.plan.facts import PlanError, model_config
from cluster.plan.formats import weight_format
from cluster.plan.tensors import Kind, active_parameters, parameters, tensors

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / ".models" / "smollm2-135m-instruct"
FAMILIES = ("llama", "qwen3-moe", "glm4-moe", "glm4-moe-lite", "deepseek-v3", "glm-moe-dsa")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (TOKENIZER / "tokenizer.json").is_file():
        pytest.skip(f"no demo model at {TOKENIZER}: make model")
    out = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "ops.tiny_models.build", str(out), "--tokenizer", str(TOKENIZER)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return out


def header(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(size))
        found |= {name: (tuple(e["shape"]), e["dtype"]) for name, e in entries.items() if name != "__metadata__"}
    return found


@pytest.mark.compiles  # transformers builds the models
@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_types_are_those_of_the_checkpoint(tiny: Path, family: str) -> None:
    name, config, _ = model_config(str(tiny / family))
    planned = {
        tensor.name.replace("{e}", str(expert)): (tensor.shape, "F32" if tensor.float32 else "BF16")
        for tensor in tensors(architecture(config, name))
        for expert in range(tensor.copies)
    }
    assert planned == header(tiny / family)


@pytest.mark.compiles
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_bytes_are_the_bytes_on_disk(tiny: Path, family: str) -> None:
    name, config, folder = model_config(str(tiny / family))
    arch = architecture(config, name)
    disk = stored(folder) if folder else None
    assert disk is not None
    fmt = weight_format("auto", arch, config)
    assert sum(fmt.tensor_bytes(t) for t in tensors(arch)) == disk.total
    assert disk.has_layer(arch.layers - 1) and not disk.has_layer(arch.layers)


def test_the_demo_model_is_planned_to_the_byte() -> None:
    name, config, _ = model_config("smollm2-135m-instruct")
    assert parameters(architecture(config, name)) == 134_515_008
    if TOKENIZER.is_dir():
        disk = stored(TOKENIZER)
        assert disk is not None
        assert disk.total == 2 * 134_515_008
        assert architecture(model_config(str(TOKENIZER))[1], name) == architecture(config, name)


# Published sizes: Kimi K2 1.026e12 by its geometry and 32e9 active; GLM 5.2 743.9e9 and 753.9e9 with the prediction
# layer (with an indexer in every layer; 5.2 leaves 57 of them out); the model hubs count GLM 4.5 as 358e9, Air 110e9.
@pytest.mark.parametrize(
    ("model", "backbone", "with_mtp", "active"),
    [
        ("kimi-k2.6", 1.026e12, 1.026e12, 32e9),
        ("glm-5.2", 743.9e9, 753.9e9, 40e9),
        ("glm-4.5", 353e9, 358e9, 32e9),
        ("glm-4.5-air", 107e9, 110e9, 12.5e9),
    ],
)
def test_parameter_counts_are_the_published_ones(model: str, backbone: float, with_mtp: float, active: float) -> None:
    arch = architecture(model_config(model)[1], model)
    assert parameters(arch) == pytest.approx(backbone, rel=0.002)
    assert parameters(arch, mtp=True) == pytest.approx(with_mtp, rel=0.005)
    assert active_parameters(arch) == pytest.approx(active, rel=0.03)


def test_an_indexer_in_every_layer_gives_the_other_published_count() -> None:
    config = {**model_config("glm-5.2")[1], "index_topk_freq": 1}
    assert parameters(architecture(config, "glm")) == pytest.approx(743.91e9, rel=1e-5)


def test_indexer_schedules_agree_however_they_are_written() -> None:
    config = model_config("glm-5.2")[1]
    by_frequency = architecture(config, "glm").dsa
    assert by_frequency is not None
    assert sorted(by_frequency.layers)[:5] == [0, 1, 2, 6, 10]
    assert len(by_frequency.layers) == 21
    types = ["full" if layer in by_frequency.layers else "shared" for layer in range(78)]
    assert architecture({**config, "indexer_types": types}, "glm").dsa == by_frequency
    pattern = "".join("F" if kind == "full" else "S" for kind in types)
    assert architecture({**config, "index_topk_pattern": pattern}, "glm").dsa == by_frequency


def test_multimodal_wrappers_are_read_through_to_their_text_model() -> None:
    text = model_config("kimi-k2.6")[1]
    inner = {key: value for key, value in text.items() if key != "architectures"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner, "vision_config": {}}
    assert architecture(outer, "k") == architecture(text, "k")


def test_mixture_layers_follow_the_config() -> None:
    base = model_config("glm-4.5")[1]
    by_first = architecture(base, "m").moe
    assert by_first is not None and min(by_first.layers) == 3 and len(by_first.layers) == 89
    types = ["dense"] * 3 + ["sparse"] * 89
    assert architecture({**base, "mlp_layer_types": types, "first_k_dense_replace": 0}, "m").moe == by_first
    qwen = {
        **model_config("smollm2-135m-instruct")[1],
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    sparse = architecture(qwen, "q").moe
    assert sparse is not None and sorted(sparse.layers)[:3] == [1, 5, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GlmMoeDsaForCausalLLM"]}, "did you mean 'GlmMoeDsaForCausalLM'"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"num_hidden_layers": "78"}, "num_hidden_layers is '78'"),
        ({"num_hidden_layers": 0}, "must be above 0"),
    ],
)
def test_a_config_that_cannot_be_read_names_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        architecture({**model_config("glm-5.2")[1], **change}, "glm")


@pytest.mark.parametrize(
    ("model", "message"),
    [("glm-52", "did you mean 'glm-5.2'"), ("/no/such/folder", "neither a known model nor a file")],
)
def test_an_unknown_model_names_the_nearest(model: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        model_config(model)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no config\.json"):
        model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PlanError, match="is not JSON"):
        model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="holds list"):
        model_config(str(tmp_path))
    assert stored(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(PlanError, match="not a safetensors file"):
        stored(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x01")
    with pytest.raises(PlanError, match="not a safetensors file"):
        stored(tmp_path)


def test_kinds_cover_the_whole_checkpoint() -> None:
    kinds = {tensor.kind for tensor in tensors(architecture(model_config("glm-5.2")[1], "glm"))}
    assert kinds == set(Kind)
