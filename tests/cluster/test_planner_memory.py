"""Memory plans: published figures, what parallelism does, and laws.

1. Every byte of HBM has one use: weights + forward pass + runtime + KV pages + unused = HBM.
2. GPUs of a replica hold all of the checkpoint between them, and more only by what is replicated.
3. KV tokens never grow with a longer row, more weights or a larger reserve.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan.architecture import Architecture, architecture
from cluster.plan.facts import GIB, PlanError, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, implied_reserve, plan_pool
from cluster.plan.published import CLOSE, published_rows
from cluster.plan.render import memory_parts
from cluster.plan.sharding import Parallel, held_weights, stages
from cluster.plan.tensors import tensors

MODELS = ("kimi-k2.6", "glm-5.2", "glm-4.5", "glm-4.5-air", "smollm2-135m-instruct")


def arch(model: str) -> Architecture:
    return architecture(model_config(model)[1], model)


def pool(model: str, weights: str, kv: str, device: str = "H200", **given: object) -> PoolPlan:
    geometry = arch(model)
    parallel = Parallel(**{key: given.pop(key) for key in ("tp", "pp", "dp", "ep") if key in given})  # type: ignore[arg-type]
    shape = PoolSettings(gpu(device), weight_format(weights, geometry), kv_format(kv, geometry), parallel, **given)  # type: ignore[arg-type]
    return plan_pool(geometry, shape)


class TestPublished:
    def test_memory_figures_are_within_half_a_percent_or_explained(self) -> None:
        rows = {row.what: row for row in published_rows() if row.unit != "tok/s"}
        assert len(rows) == 7
        off = {what: row.off for what, row in rows.items() if abs(row.off) > CLOSE}
        # 52 is 52.6 without its fraction; 1.18M tokens follow from K2.6's reserve to 0.7 %.
        assert set(off) == {"GLM 5.2 share of a GPU, INT4", "GLM 5.2 KV tokens, INT4 + FP8 KV"}
        assert max(map(abs, off.values())) < 0.01
        assert "52.6" in rows["GLM 5.2 share of a GPU, INT4"].why

    def test_one_pool_explains_both_kimi_figures(self) -> None:
        bf16, fp8 = pool("kimi-k2.6", "int4", "bf16", tp=8), pool("kimi-k2.6", "int4", "fp8", tp=8)
        assert (bf16.kv_bytes_per_token, fp8.kv_bytes_per_token) == (70_272, 35_136)
        assert implied_reserve(bf16, 686_000)[0] == pytest.approx(implied_reserve(fp8, 1_370_000)[0], abs=0.1)

    def test_the_reserves_implied_by_both_models_are_alike(self) -> None:
        kimi = implied_reserve(pool("kimi-k2.6", "int4", "bf16", tp=8), 686_000)
        glm = implied_reserve(pool("glm-5.2", "int4", "fp8", tp=8), 1_180_000)
        assert kimi[1] == pytest.approx(0.830, abs=0.001)
        assert glm[1] == pytest.approx(0.815, abs=0.001)

    def test_implied_reserve_is_the_inverse_of_the_plan(self) -> None:
        plan = pool("glm-5.2", "int4", "fp8", tp=8)
        reserve, share = implied_reserve(plan, plan.kv_tokens)
        inside = plan.activation_bytes + plan.runtime_bytes + plan.hbm_bytes - plan.usable_bytes
        page = plan.tightest.page_bytes / GIB
        assert reserve == pytest.approx(inside / GIB, abs=page)
        assert share == pytest.approx(1 - reserve / plan.settings.gpu.hbm_gib)

    def test_checkpoint_sizes(self) -> None:
        assert pool("kimi-k2.6", "int4", "bf16", tp=8).checkpoint_bytes / GIB == pytest.approx(553.4, abs=0.1)
        assert pool("glm-5.2", "fp8", "bf16", tp=8).checkpoint_bytes / GIB == pytest.approx(703.7, abs=0.1)
        assert pool("glm-5.2", "int4", "bf16", tp=8).checkpoint_bytes / GIB == pytest.approx(419.9, abs=0.1)


Shape = tuple[str, str, str, tuple[int, int, int, bool]]
shapes = st.tuples(
    st.sampled_from(MODELS[:3]),
    st.sampled_from(["bf16", "int4"]),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from([(8, 1, 1, False), (4, 2, 1, False), (2, 1, 4, True), (1, 2, 4, True), (8, 3, 1, True)]),
)


def built(shape: Shape, **given: object) -> PoolPlan:
    model, weights, kv, (tp, pp, dp, ep) = shape
    return pool(model, weights, kv, "B200", tp=tp, pp=pp, dp=dp, ep=ep, **given)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, block=st.sampled_from([16, 64, 128]), utilization=st.floats(0.5, 1.0))
def test_law_1_every_byte_of_hbm_has_one_use(shape: Shape, block: int, utilization: float) -> None:
    plan = built(shape, block_tokens=block, utilization=utilization)
    parts = memory_parts(plan)
    if plan.kv_bytes_gpu > 0:
        assert sum(parts.values()) == pytest.approx(plan.settings.gpu.hbm_gib, rel=1e-9)
        tight = plan.tightest
        used = tight.held.total + plan.activation_bytes + plan.runtime_bytes + plan.blocks * tight.page_bytes
        assert plan.usable_bytes - tight.page_bytes < used <= plan.usable_bytes
    else:
        assert plan.kv_tokens == 0 and not plan.fits


@settings(max_examples=12, deadline=None)
@given(shape=shapes)
def test_law_2_ranks_hold_the_checkpoint_between_them(shape: Shape) -> None:
    plan = built(shape)
    parallel, weights = plan.settings.parallel, plan.settings.weights
    held = held_weights(plan.arch, weights, parallel, True)
    everything = sum(weights.tensor_bytes(t) for t in tensors(plan.arch, mtp=True))
    # GLM 4.5's router is held in float32; 16 B of shape a tensor do not shrink when it is cut.
    router = sum(weights.tensor_bytes(t) for t in tensors(plan.arch, mtp=True) if t.kind == "router" and not t.float32)
    ranks = parallel.tp * parallel.dp
    cut = sum((entry.total - entry.absorbed - entry.replicated) * ranks for entry in held)
    assert everything <= cut + ranks * 2000 and cut <= everything + router + 0.001 * everything
    assert all(entry.replicated >= 0 and entry.absorbed >= 0 for entry in held)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, more=st.floats(0.1, 20.0))
def test_law_3_less_room_never_means_more_tokens(shape: Shape, more: float) -> None:
    model, weights, kv, cut = shape
    plan = built(shape)
    assert built(shape, runtime_gib=3.0 + more).kv_tokens <= plan.kv_tokens
    assert built(shape, extra_weights_gib=more).kv_tokens <= plan.kv_tokens
    assert built((model, "bf16", kv, cut)).kv_tokens <= built((model, "int4", kv, cut)).kv_tokens
    assert built((model, weights, "bf16", cut)).kv_tokens <= built((model, weights, "fp8", cut)).kv_tokens
    assert plan.requests_of(8192) <= plan.requests_of(4096)


class TestParallelism:
    def test_mla_rows_are_whole_on_every_tensor_parallel_rank(self) -> None:
        one, eight = (pool("kimi-k2.6", "int4", "fp8", "B200", tp=tp, kv_space_gib=40.0) for tp in (1, 8))
        assert one.kv_bytes_per_token_gpu == eight.kv_bytes_per_token_gpu == 35_136
        assert one.kv_tokens == eight.kv_tokens

    def test_data_parallel_attention_gives_each_rank_its_own_rows(self) -> None:
        shared = pool("kimi-k2.6", "int4", "fp8", tp=8, kv_space_gib=20.0)
        own = pool("kimi-k2.6", "int4", "fp8", dp=8, ep=True, kv_space_gib=20.0)
        assert own.kv_tokens == 8 * shared.kv_tokens
        # The price: attention is whole on each rank.
        assert own.resident_bytes > shared.resident_bytes + 8 * GIB

    def test_kv_heads_are_cut_and_then_replicated(self) -> None:
        per_gpu = {tp: pool("glm-4.5", "int4", "bf16", "B200", tp=tp).kv_bytes_per_token_gpu for tp in (1, 2, 4, 8, 16)}
        assert per_gpu == {1: 376_832, 2: 188_416, 4: 94_208, 8: 47_104, 16: 47_104}

    def test_pipeline_stages_split_layers_as_the_engine_does(self) -> None:
        assert [len(part) for part in stages(61, 4)] == [15, 15, 16, 15]
        assert [len(part) for part in stages(78, 4)] == [19, 20, 20, 19]
        assert [len(part) for part in stages(6, 3)] == [2, 2, 2]
        plan = pool("glm-4.5", "bf16", "bf16", "B200", tp=4, pp=2)
        assert sum(stage.layers for stage in plan.stages) == 92
        assert plan.blocks == min(stage.blocks for stage in plan.stages)

    def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last(self) -> None:
        first, last = pool("glm-4.5", "bf16", "bf16", "B200", tp=4, pp=2).stages
        assert "embedding" in first.held.by_kind and "lm_head" not in first.held.by_kind
        assert "lm_head" in last.held.by_kind and "embedding" not in last.held.by_kind
        tied = pool("smollm2-135m-instruct", "bf16", "bf16", pp=2).stages
        assert all("embedding" in stage.held.by_kind for stage in tied)

    def test_whole_experts_and_slices_weigh_the_same(self) -> None:
        slices, whole = (pool("glm-5.2", "bf16", "bf16", "B200", tp=8, ep=ep) for ep in (False, True))
        assert slices.tightest.held.by_kind["expert"] == whole.tightest.held.by_kind["expert"]  # type: ignore[index]

    def test_prediction_layers_cost_weights_and_rows(self) -> None:
        without, with_it = (pool("glm-5.2", "int4", "fp8", tp=8, mtp=mtp) for mtp in (False, True))
        assert with_it.resident_bytes > without.resident_bytes
        assert with_it.kv_bytes_per_token == without.kv_bytes_per_token + 656 + 132
        assert with_it.checkpoint_bytes == without.checkpoint_bytes

    @pytest.mark.parametrize(
        ("model", "weights", "shape", "message"),
        [
            ("kimi-k2.6", "int4", {"tp": 3}, "tp 3 does not divide 64"),
            ("smollm2-135m-instruct", "bf16", {"tp": 9, "pp": 31}, "pp 31 is more stages"),
            ("smollm2-135m-instruct", "bf16", {"ep": True}, "is dense"),
            ("glm-4.5", "bf16", {"tp": 6}, "tp 6 and 8 KV heads"),
            ("glm-4.5", "fp8", {"tp": 8}, r"experts\.\*\.gate_proj\.weight is 192 x 5120 on a GPU.*use --ep"),
            ("glm-4.5-air", "int4", {"tp": 16}, "88 inputs on a GPU, not a multiple of group 32; use --ep"),
            ("glm-4.5", "bf16", {"tp": 0}, "tp 0"),
        ],
    )
    def test_what_the_engine_could_not_cut_is_refused(
        self, model: str, weights: str, shape: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(PlanError, match=message):
            pool(model, weights, "bf16", **shape)


class TestLimits:
    def test_one_page_of_each_cache_is_the_engines(self) -> None:
        plan = pool("smollm2-135m-instruct", "bf16", "bf16", "CPU", kv_space_gib=1.0, block_tokens=128)
        assert plan.blocks == GIB // (23_040 * 128) == 364
        assert plan.requests_of(363 * 128) == 1
        assert plan.requests_of(363 * 128 + 1) == 0

    def test_requests_take_whole_pages(self) -> None:
        plan = pool("smollm2-135m-instruct", "bf16", "bf16", "CPU", kv_space_gib=1.0, block_tokens=128)
        assert plan.requests_of(128) == 363
        assert plan.requests_of(129) == 181

    def test_problems_say_what_and_by_how_much(self) -> None:
        assert pool("glm-5.2", "int4", "fp8", tp=8).fits
        assert "exceed the 128.6 GiB" in pool("glm-5.2", "bf16", "fp8", tp=8).problems[0]
        assert "37 such requests" in pool("kimi-k2.6", "int4", "bf16", tp=8, context=21_400, concurrency=64).problems[0]
        assert "above the 8,192" in pool("smollm2-135m-instruct", "bf16", "bf16", context=9000).problems[0]

    def test_what_the_cpu_build_lacks_is_a_problem(self) -> None:
        assert "sparse attention" in pool("glm-5.2", "bf16", "bf16", "CPU", kv_space_gib=1.0).problems[0]
        assert "BF16 latent" in pool("kimi-k2.6", "bf16", "fp8", "CPU", kv_space_gib=1.0).problems[0]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"concurrency": 0}, "concurrency 0"),
            ({"utilization": 1.2}, "utilization 1.2"),
            ({"runtime_gib": -1.0}, "runtime_gib -1.0"),
            ({"device": "CPU"}, "kv_space_gib is needed"),
        ],
    )
    def test_settings_out_of_range_name_the_field(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            pool("smollm2-135m-instruct", "bf16", "bf16", **given)

    def test_a_number_of_pages_given_outright_is_taken_and_checked(self) -> None:
        shape = {"kv_space_gib": 1.0, "block_tokens": 32, "context": 1024}
        plan = pool("smollm2-135m-instruct", "bf16", "bf16", "CPU", blocks_override=256, **shape)
        assert plan.kv_tokens == 256 * 32 and plan.max_requests == 255 // 32 and plan.fits
        tight = pool("smollm2-135m-instruct", "bf16", "bf16", "CPU", blocks_override=1457, **shape)
        assert "above the 1.00 GiB" in tight.problems[0]

    def test_a_group_that_does_not_divide_names_one_that_does(self) -> None:
        geometry = arch("smollm2-135m-instruct")
        shape = PoolSettings(gpu("H200"), weight_format("int4", geometry, group=128), "bf16")
        with pytest.raises(PlanError, match="group 128; use a group that divides 576, such as 64"):
            plan_pool(geometry, shape)


class TestGpus:
    def test_driver_names_are_understood(self) -> None:
        assert gpu("NVIDIA H100 80GB HBM3") == gpu("H100")
        assert gpu("NVIDIA A100-SXM4-80GB") == gpu("a100-80gb")

    def test_unknown_names_are_errors_that_name_the_nearest(self) -> None:
        with pytest.raises(PlanError, match="did you mean 'H200'"):
            gpu("H2000")
        with pytest.raises(PlanError, match="--gpu-hbm-gib"):
            gpu("GB200")

    def test_what_the_caller_knows_replaces_the_table(self) -> None:
        mine = gpu("X1", hbm_gib=64.0, hbm_tb_s=2.0)
        assert (mine.name, mine.hbm_gib, mine.hbm_tb_s) == ("X1", 64.0, 2.0)
        assert gpu("H200", hbm_gib=140.4) == replace(gpu("H200"), hbm_gib=140.4)
        with pytest.raises(PlanError, match="hbm_gib 0"):
            gpu("H200", hbm_gib=0)
