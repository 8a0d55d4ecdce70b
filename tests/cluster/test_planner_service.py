"""Prefill and decode together: split, staging, transfer and cost against sums done here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planner import (
    Parallel,
    PlanError,
    PoolPlan,
    PoolSettings,
    ServicePlan,
    Workload,
    architecture,
    gpu,
    kv_format,
    model_config,
    plan_pool,
    weight_format,
)


def pool(model: str, weights: str, kv: str, tp: int = 8, **given: Any) -> PoolPlan:
    arch = architecture(model_config(model)[1], model)
    parallel = Parallel(tp=tp, dp=given.pop("dp", 1), ep=given.pop("ep", False))
    return plan_pool(
        arch, PoolSettings(gpu("H200"), weight_format(weights, arch), kv_format(kv, arch), parallel, **given)
    )


def glm(**work: Any) -> ServicePlan:
    return ServicePlan(pool("glm-5.2", "fp8", "bf16"), pool("glm-5.2", "int4", "fp8"), Workload(**work))


@settings(max_examples=25, deadline=None)
@given(inputs=st.integers(64, 60_000), outputs=st.integers(1, 8_000), extra=st.integers(0, 12))
def test_no_other_split_of_the_same_gpus_is_faster(inputs: int, outputs: int, extra: int) -> None:
    service = glm(input_tokens=inputs, output_tokens=outputs)
    gpus = 16 + 8 * extra
    best = service.recommend(gpus)
    assert best.gpus <= gpus
    replicas = gpus // 8
    for prefill in range(1, replicas):
        assert service.rate(prefill, replicas - prefill) <= best.requests_s + 1e-12
    assert max(best.busy_prefill, best.busy_decode) == pytest.approx(1.0)


def test_split_without_a_number_of_gpus_is_small_and_near_the_best() -> None:
    service = glm(input_tokens=8192, output_tokens=1000)
    split = service.recommend()
    best = max(service.rate(p, d) / (8 * (p + d)) for p in range(1, 9) for d in range(1, 9))
    assert split.requests_s / split.gpus >= 0.95 * best
    assert all(
        service.rate(p, d) / (8 * (p + d)) < 0.95 * best
        for p in range(1, 9)
        for d in range(1, 9)
        if 8 * (p + d) < split.gpus
    )


def test_longer_answers_move_gpus_to_decode_and_longer_prompts_to_prefill() -> None:
    def share(inputs: int, outputs: int) -> float:
        split = glm(input_tokens=inputs, output_tokens=outputs).recommend(128)
        return split.prefill / (split.prefill + split.decode)

    assert share(1024, 4000) < share(8192, 1000) < share(32_768, 200)


def test_a_wanted_rate_gets_the_fewest_replicas() -> None:
    service = glm(rate=10.0)
    split = service.recommend()
    assert split.requests_s >= 10.0
    assert service.rate(split.prefill - 1, split.decode) < 10.0
    assert service.rate(split.prefill, split.decode - 1) < 10.0


def test_reason_names_both_rates_and_the_bottleneck() -> None:
    service = glm()
    split = service.recommend(16)
    assert f"{service.prefill_requests_s:.2f} prompts/s" in split.reason
    assert f"{service.decode_requests_s:.2f} answers/s" in split.reason
    assert "prefill fills first" in split.reason


def test_cost_is_gpu_hours_over_tokens() -> None:
    service = glm(gpu_price=3.0, input_tokens=4096, output_tokens=500)
    split = service.recommend(24)
    cost = service.cost_per_million(split)
    assert cost is not None
    an_hour = split.requests_s * 3600
    assert cost[0] == pytest.approx(24 * 3.0 / (an_hour * 500) * 1e6)
    assert cost[1] == pytest.approx(24 * 3.0 / (an_hour * 4596) * 1e6)
    assert glm().cost_per_million(split) is None


def test_a_hand_over_moves_whole_pages_in_the_decode_format() -> None:
    service = glm(input_tokens=8192)
    assert service.wire_bytes_token == 78 * 656 + 21 * 132
    assert service.wire_bytes_request == 8192 * 53_940
    assert replace(service, work=Workload(input_tokens=8193)).wire_bytes_request == (8192 + 64) * 53_940
    # MLA: eight ranks each fetch every row. GQA: eight ranks share eight heads.
    assert service.wire_bytes_request_ranks == 8 * service.wire_bytes_request
    gqa = ServicePlan(pool("glm-4.5", "bf16", "bf16"), pool("glm-4.5", "bf16", "fp8"), Workload())
    assert gqa.wire_bytes_request_ranks == gqa.wire_bytes_request == 8192 * 188_416
    assert service.transfer_seconds == pytest.approx(8192 * 53_940 / 50e9)


def test_staging_is_rate_times_the_time_bytes_stay() -> None:
    service = glm(lease_s=60.0)
    held = service.prefill_line.prefill_seconds(8192) + service.transfer_seconds
    assert service.staging_bytes(10.0) == pytest.approx(10.0 * held * service.wire_bytes_request_ranks, rel=1e-9)
    assert service.staging_bytes(0.001) == 2 * service.wire_bytes_request_ranks
    assert service.staging_bytes_worst(10.0) == 600 * service.wire_bytes_request_ranks
    assert service.network_gbit_s(2.0) == pytest.approx(2 * 8 * service.wire_bytes_request_ranks / 1e9)


def test_a_token_time_limits_the_batch() -> None:
    free, bound = glm(), glm(tpot_ms=15.0)
    assert 0 < bound.decode_batch < free.decode_batch
    assert bound.tpot_ms <= 15.0
    context = (bound.decode_batch + 1) * bound.mean_context
    assert bound.decode_line.decode_step_seconds(bound.decode_batch + 1, context) > 0.015


def test_a_cached_prefix_saves_compute_but_not_the_hand_over() -> None:
    cold, warm = glm(input_tokens=8192), glm(input_tokens=8192, prefix_hit=0.75)
    assert warm.prefill_cost == cold.prefill_line.prefill(2048, 6144)
    assert warm.prefill_requests_s > 3 * cold.prefill_requests_s
    assert warm.wire_bytes_request == cold.wire_bytes_request
    with pytest.raises(PlanError, match="prefix_hit 1"):
        glm(prefix_hit=1.0)


def test_first_token_takes_prefill_transfer_and_a_step() -> None:
    service = glm()
    parts = service.prefill_line.prefill_seconds(8192) + service.transfer_seconds + service.tpot_ms / 1e3
    assert service.ttft_seconds == pytest.approx(parts)


@pytest.mark.parametrize(
    ("work", "gpus", "message"),
    [
        ({"input_tokens": 1_048_000}, None, "above the 1,048,576"),
        ({"input_tokens": 500_000}, None, "prefill pool does not hold"),
        ({"tpot_ms": 1.0}, None, "within 1 ms a token"),
        ({}, 8, "8 GPUs are fewer"),
        ({"rate": 0.0}, None, "rate 0.0"),
        ({"output_tokens": 0}, None, "output_tokens 0"),
    ],
)
def test_what_cannot_be_served_says_why(work: dict[str, Any], gpus: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        glm(**work).recommend(gpus)
