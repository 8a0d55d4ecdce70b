"""Roofline: published rates, fitted and predicted, and laws that any step time must obey."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan.architecture import architecture
from cluster.plan.facts import PlanError, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolSettings
from cluster.plan.published import CONTEXT_SHARE, FREE, RATES, Rate, cost_changes, fit, orderings
from cluster.plan.roofline import Constants, Roofline
from cluster.plan.sharding import Parallel


def roofline(model: str, weights: str, kv: str, tp: int = 8, pp: int = 1, **given: object) -> Roofline:
    name, config, _ = model_config(model)
    arch = architecture(config, name)
    pool = PoolSettings(gpu("H200"), weight_format(weights, arch), kv_format(kv, arch), Parallel(tp=tp, pp=pp))
    return Roofline.of(arch, pool, Constants(**given))  # type: ignore[arg-type]


def test_the_defaults_are_what_the_fitted_rates_give() -> None:
    found = fit()
    for name in FREE:
        assert getattr(Constants(), name) == pytest.approx(found[name], rel=2e-3), name
    assert found["context_share"] == pytest.approx(CONTEXT_SHARE, rel=2e-3)


@pytest.mark.parametrize("rate", RATES, ids=lambda r: f"{r.model}-{r.weights}-{r.kv}-{r.batch}")
def test_published_rates_come_out(rate: Rate) -> None:
    assert rate.planned() == pytest.approx(rate.rate, rel=0.012 if rate.fitted else 0.06)


def test_the_five_published_orderings_come_out_with_their_sizes() -> None:
    rows = orderings()
    assert [row.predicted for row in rows].count("both sides fitted") == 3
    for row in rows:
        assert row.published > 1 and row.planned > 1, row.what
        assert row.planned == pytest.approx(row.published, rel=0.1), row.what


def test_a_cheaper_token_is_decodes_alone() -> None:
    decode, whole = cost_changes()
    assert decode.planned == pytest.approx(decode.published, abs=0.02)
    assert 0.8 < whole.planned < 0.9, "prefill costs the same, so a whole request is not 30 % cheaper"


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 256), context=st.integers(1, 100_000), more=st.integers(1, 64))
def test_more_work_never_takes_less_time(batch: int, context: int, more: int) -> None:
    line = ROOFLINES[(batch + more) % len(ROOFLINES)]
    total = batch * context
    assert line.decode_step_seconds(batch + more, total + more * context) >= line.decode_step_seconds(batch, total)
    assert line.decode_step_seconds(batch, total + more) >= line.decode_step_seconds(batch, total)
    assert line.prefill_seconds(context + more) >= line.prefill_seconds(context)
    assert line.prefill_seconds(context, more) >= line.prefill_seconds(context)


ROOFLINES = [
    roofline("kimi-k2.6", "int4", "bf16"),
    roofline("glm-5.2", "fp8", "fp8"),
    roofline("glm-4.5", "bf16", "bf16"),
]


def test_a_step_is_never_faster_than_reading_what_it_must() -> None:
    line = roofline("glm-4.5", "bf16", "bf16", layer_overhead_us=0.0, request_overhead_us=0.0, memory_efficiency=1.0)
    # GLM 4.5 at TP 8: one KV head a GPU, 92 layers x 2 x 128 x 2 B = 47,104 B a token.
    assert line.kv_row_bytes == 47_104
    step = line.decode_step(1, 100_000)
    assert step.kv_s == pytest.approx(100_000 * 47_104 / 4.8e12)
    assert step.seconds == max(step.memory_s, step.compute_s)


def test_sparse_attention_reads_only_its_selection_but_all_index_keys() -> None:
    line = roofline("glm-5.2", "int4", "fp8")
    near, far = line.decode_step(1, 2048), line.decode_step(1, 204_800)
    extra = (far.kv_s - near.kv_s) * 4.8e12 * 0.9
    assert extra == pytest.approx((204_800 - 2048) * 21 * 132)


def test_experts_touched_runs_from_active_to_all() -> None:
    line = roofline("kimi-k2.6", "int4", "fp8")
    assert line.experts_touched(1) == pytest.approx(8)
    assert 0.999 * 384 < line.experts_touched(2000) <= 384


def test_pipeline_stages_overlap_micro_batches() -> None:
    one, two = roofline("glm-4.5", "bf16", "bf16", tp=8), roofline("glm-4.5", "bf16", "bf16", tp=8, pp=2)
    assert two.decode_step_seconds(64, 64_000) == pytest.approx(one.decode_step_seconds(32, 32_000))
    assert two.prefill_tokens_per_second(8192) == pytest.approx(2 * one.prefill_tokens_per_second(8192))


def test_bound_names_the_largest_part() -> None:
    line = roofline("kimi-k2.6", "int4", "bf16")
    assert line.decode_step(1, 1000).bound == "overhead"
    assert line.decode_step(32, 686_000).bound == "kv"
    assert line.prefill(8192).bound == "compute"


@pytest.mark.parametrize(
    "given", [{"layer_overhead_us": -1.0}, {"prefill_efficiency": 0.0}, {"memory_efficiency": 1.1}]
)
def test_constants_out_of_range_name_the_field(given: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(given))):
        Constants(**given)
