"""Bytes of weight and KV formats, counted by hand, and how a checkpoint's own declaration is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.plan.architecture import Architecture, architecture
from cluster.plan.facts import PlanError, model_config
from cluster.plan.formats import WeightFormat, index_row_bytes, kv_format, kv_row_bytes, weight_format
from cluster.plan.tensors import Cut, Kind, Tensor, tensors


def arch(model: str) -> Architecture:
    return architecture(model_config(model)[1], model)


def matrix(out: int, into: int, kind: Kind = Kind.EXPERT) -> Tensor:
    return Tensor("model.layers.0.mlp.experts.{e}.up_proj.weight", (out, into), kind, Cut.EXPERT_OUT, 0)


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (WeightFormat("bf16"), 2048 * 7168 * 2),
        (WeightFormat("fp8_channel"), 2048 * 7168 + 2048 * 2),
        (WeightFormat("fp8"), 2048 * 7168 + 16 * 56 * 4),
        # Half a byte a weight, 2 bytes a group of 32, and the 16 bytes of weight_shape: 0.5625 B a weight.
        (WeightFormat("int4", group=32), 2048 * 7168 // 2 + 2048 * 224 * 2 + 16),
        (WeightFormat("int4", group=128), 2048 * 7168 // 2 + 2048 * 56 * 2 + 16),
    ],
)
def test_a_matrix_in_each_format(fmt: WeightFormat, expected: int) -> None:
    assert fmt.tensor_bytes(matrix(2048, 7168)) == expected


def test_odd_sides_round_up_to_blocks_groups_and_words() -> None:
    assert WeightFormat("fp8").tensor_bytes(matrix(129, 257)) == 129 * 257 + 2 * 3 * 4
    assert WeightFormat("int4", group=64).tensor_bytes(matrix(3, 100)) == 3 * (13 * 4 + 2 * 2) + 16


@given(out=st.integers(1, 4096), into=st.integers(1, 4096), group=st.sampled_from([32, 64, 128]))
def test_smaller_formats_are_smaller(out: int, into: int, group: int) -> None:
    sizes = [WeightFormat(name, group).tensor_bytes(matrix(out, into)) for name in ("bf16", "int4")]
    assert sizes[1] <= sizes[0] + out * 8 + 16
    if out >= 128 and into >= 128:
        fp8 = WeightFormat("fp8").tensor_bytes(matrix(out, into))
        assert sizes[1] < fp8 < sizes[0]


def test_what_stays_high_precision() -> None:
    glm = arch("glm-5.2")
    storage = {
        fmt.name: {t.name: fmt.storage(t) for t in tensors(glm)} for fmt in (WeightFormat("fp8"), WeightFormat("int4"))
    }
    layer = "model.layers.40."
    kept = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", layer + "mlp.gate.weight"]
    for name in (*kept, "model.layers.2.self_attn.indexer.weights_proj.weight", "model.layers.78.eh_proj.weight"):
        assert storage["fp8"][name] == storage["int4"][name] == "bf16"
    assert storage["fp8"][layer + "self_attn.q_b_proj.weight"] == "fp8"
    assert storage["int4"][layer + "self_attn.q_b_proj.weight"] == "bf16"
    assert storage["int4"][layer + "mlp.shared_experts.up_proj.weight"] == "bf16"
    assert storage["int4"][layer + "mlp.experts.{e}.up_proj.weight"] == "int4"
    assert storage["int4"][layer + "mlp.gate.e_score_correction_bias"] == "f32"


def test_int4_covers_what_is_asked() -> None:
    glm, llama = arch("glm-5.2"), arch("smollm2-135m-instruct")
    assert weight_format("int4", glm).int4_modules == "experts"
    assert weight_format("int4", llama).int4_modules == "linear"
    rest = weight_format("int4", glm, rest="fp8")
    attention = next(t for t in tensors(glm) if t.name.endswith("q_b_proj.weight"))
    assert rest.storage(attention) == "fp8"
    assert weight_format("int4", glm, int4_modules="linear").storage(attention) == "int4"


KIMI_QUANT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def test_auto_reads_the_checkpoints_own_declaration() -> None:
    kimi = arch("kimi-k2.6")
    fmt = weight_format("auto", kimi, {"quantization_config": KIMI_QUANT})
    plain = weight_format("int4", kimi)
    assert (fmt.name, fmt.group) == ("int4", 32)
    assert [fmt.storage(t) for t in tensors(kimi)] == [plain.storage(t) for t in tensors(kimi)]
    nested = {"text_config": {"model_type": "kimi_k2", "quantization_config": KIMI_QUANT}}
    assert weight_format("auto", kimi, nested) == fmt


def test_auto_reads_fp8_blocks_with_exceptions() -> None:
    kimi = arch("kimi-k2.6")
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.1"]}
    fmt = weight_format("auto", kimi, {"quantization_config": quant})
    by_name = {t.name: fmt.storage(t) for t in tensors(kimi)}
    assert by_name["model.layers.1.self_attn.o_proj.weight"] == "bf16"
    assert by_name["model.layers.10.self_attn.o_proj.weight"] == "fp8"


@pytest.mark.parametrize(("strategy", "name"), [("channel", "fp8_channel"), ("block", "fp8")])
def test_auto_tells_fp8_blocks_from_channels(strategy: str, name: str) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    quant = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}, "ignore": ["lm_head"]}
    assert weight_format("auto", arch("glm-4.5"), {"quantization_config": quant}).name == name


def test_auto_without_a_declaration_is_the_published_format_or_bf16() -> None:
    glm = arch("glm-5.2")
    assert weight_format("auto", glm, {}, native="fp8").name == "fp8"
    assert weight_format("auto", glm, {}).name == "bf16"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: weight_format("int5", a), "did you mean 'int4'"),
        (lambda a: weight_format("int4", a, group=12), "multiple of 8"),
        (lambda a: weight_format("int4", a, int4_modules="expert"), "did you mean 'experts'"),
        (lambda a: weight_format("int4", a, rest="int8"), "must be bf16 or fp8"),
        (lambda a: weight_format("auto", a, {"quantization_config": {"quant_method": "awq"}}), "awq"),
        (lambda a: kv_format("fp9", a), "did you mean 'fp8'"),
        (lambda a: kv_format("fp8_ds_mla", a), "use fp8"),
    ],
)
def test_unknown_formats_name_the_nearest(call: Callable[[Architecture], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call(arch("glm-4.5"))


@pytest.mark.parametrize(
    ("model", "kv", "row", "layers"),
    [
        ("kimi-k2.6", "bf16", 1152, 61),
        ("kimi-k2.6", "fp8", 576, 61),
        ("glm-5.2", "bf16", 1152, 78),
        ("glm-5.2", "fp8_uniform", 576, 78),
        # 512 e4m3 + 4 float32 + 64 BF16.
        ("glm-5.2", "fp8", 656, 78),
        ("glm-4.5", "bf16", 4096, 92),
        ("glm-4.5", "fp8_e4m3", 2048, 92),
        ("smollm2-135m-instruct", "bfloat16", 768, 30),
    ],
)
def test_cache_rows(model: str, kv: str, row: int, layers: int) -> None:
    geometry = arch(model)
    assert geometry.layers == layers
    assert kv_row_bytes(geometry, kv_format(kv, geometry)) == row


def test_index_keys_are_e4m3_with_a_scale() -> None:
    assert index_row_bytes(arch("glm-5.2")) == 128 + 4
    assert index_row_bytes(arch("kimi-k2.6")) == 0
