"""Which modules are packed. Laws: (1) `ignore` matches exactly the kept modules; (2) what engines fuse is never mixed;
(3) what carries no INT4 anywhere (router, embeddings, norms, lm_head) cannot be asked for."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_checkpoint import Geometry, tensor_shapes

from ops.compress.families import (
    FAMILIES,
    KINDS,
    PACKABLE,
    check_fused,
    choose,
    family_of,
    ignore_patterns,
    kind_of,
)

DEEPSEEK_MODULES = [
    name.removesuffix(".weight")
    for name, shape in tensor_shapes(Geometry(layers=5, dense_layers=2, mtp_layers=1))
    if name.endswith(".weight") and len(shape) == 2
]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.3.mlp.experts.17.down_proj", "routed_experts"),
        ("model.layers.3.mlp.shared_experts.gate_proj", "shared_experts"),
        ("model.layers.3.mlp.shared_expert.gate_proj", "shared_experts"),
        ("model.layers.3.mlp.shared_expert_gate", "router"),
        ("model.layers.3.mlp.gate", "router"),
        ("model.layers.3.mlp.gate_proj", "mlp"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", "attention_latent"),
        ("model.layers.3.self_attn.q_b_proj", "attention"),
        ("model.layers.3.self_attn.indexer.wk", "indexer"),
        ("model.layers.3.block_sparse_moe.experts.1.w2", "routed_experts"),
        ("model.layers.61.eh_proj", "mtp_projection"),
        ("model.layers.61.shared_head.head", "mtp_projection"),
        ("model.layers.61.enorm", "norm"),
        ("language_model.model.layers.3.self_attn.o_proj", "attention"),
        ("vision_tower.blocks.3.self_attn.q_proj", "vision"),
        ("mm_projector.proj.0", "vision"),
        ("model.embed_tokens", "embedding"),
        ("lm_head", "lm_head"),
        ("model.layers.0.linear_attn.in_proj_qkvz", "other"),
    ],
)
def test_kind_of_known_names(module: str, kind: str) -> None:
    assert kind_of(module) == kind


def _ignored(patterns: list[str], module: str) -> bool:
    return _any_of(tuple(patterns)).match(module) is not None


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern.removeprefix('re:')})" for pattern in patterns) or "(?!)")


@given(
    pack=st.sets(st.sampled_from(PACKABLE)),
    keep=st.sets(st.sampled_from(PACKABLE)),
    keep_match=st.sampled_from([[], [r"layers\.[02]\."], [r"experts\.(3|5)\."], [r"layers\.1\.self_attn"]]),
    root=st.sampled_from(["model.", "language_model.model.", "model.language_model.", ""]),
)
def test_law_1_ignore_matches_exactly_the_kept_modules(
    pack: set[str], keep: set[str], keep_match: list[str], root: str
) -> None:
    choice = choose(family_of("deepseek_v3"), pack - keep, keep, keep_match)
    packed = {module: choice.packs(module) for module in DEEPSEEK_MODULES}
    patterns = ignore_patterns(packed)
    for module, is_packed in packed.items():
        renamed = module if module == "lm_head" else root + module.removeprefix("model.")
        assert _ignored(patterns, renamed) == (not is_packed), renamed


def test_ignore_lists_are_short_and_name_the_fused_projections() -> None:
    packed = {module: kind_of(module) == "routed_experts" for module in DEEPSEEK_MODULES}
    patterns = ignore_patterns(packed)
    assert len(patterns) < 25
    assert _ignored(patterns, "model.layers.4.self_attn.fused_qkv_a_proj")
    assert _ignored(patterns, "model.layers.0.mlp.gate_up_proj")
    assert not _ignored(patterns, "model.layers.4.mlp.experts.0.gate_up_proj")


def test_law_2_fused_projections_are_never_mixed() -> None:
    base = "model.layers.0.self_attn"
    packed = {f"{base}.q_proj": True, f"{base}.k_proj": True, f"{base}.v_proj": False, f"{base}.o_proj": False}
    with pytest.raises(ValueError, match=re.escape(f"{base}: v_proj would be kept")):
        check_fused(packed)
    check_fused({**packed, f"{base}.v_proj": True})


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(PACKABLE)))
def test_law_3_what_must_stay_cannot_be_packed(kind: str) -> None:
    with pytest.raises(ValueError, match=f"--pack {kind}: it always stays as it is"):
        choose(family_of("deepseek_v3"), [kind], [], [])


def test_defaults_of_every_family() -> None:
    for family in FAMILIES:
        assert set(family.packed) <= set(PACKABLE)
        for model_type in family.model_types:
            assert family_of(model_type) is family
    assert family_of("kimi_k2").name == "deepseek"
    assert family_of("glm_moe_dsa").name == "glm"
    assert family_of("never_seen").name == "generic"


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="no such kind"):
        choose(family_of("llama"), ["expert"], [], [])
    with pytest.raises(ValueError, match="both in --pack and in --keep"):
        choose(family_of("llama"), ["mlp"], ["mlp"], [])
    with pytest.raises(ValueError, match="not a regular expression"):
        choose(family_of("llama"), [], [], ["("])
