"""Prefill and decode together: batch, transfer and cost against sums done here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.capacity import of_request
from cluster.plan.architecture import architecture
from cluster.plan.facts import PlanError, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool
from cluster.plan.service import ServicePlan, Workload
from cluster.plan.sharding import Parallel


def pool(model: str, weights: str, kv: str, tp: int = 8, **given: Any) -> PoolPlan:
    arch = architecture(model_config(model)[1], model)
    parallel = Parallel(tp=tp, dp=given.pop("dp", 1), ep=given.pop("ep", False))
    return plan_pool(
        arch, PoolSettings(gpu("H200"), weight_format(weights, arch), kv_format(kv, arch), parallel, **given)
    )


def glm(**work: Any) -> ServicePlan:
    return ServicePlan(pool("glm-5.2", "fp8", "bf16"), pool("glm-5.2", "int4", "fp8"), Workload(**work))


def test_cost_is_gpu_hours_over_tokens() -> None:
    service = glm(gpu_price=3.0, input_tokens=4096, output_tokens=500)
    assert service.cost_per_million is not None
    prompt, output = service.cost_per_million
    # Two replicas of eight GPUs for an hour, divided by what each does in it.
    assert prompt == pytest.approx(24.0 / (service.prefill_requests_s * 3600 * 4096) * 1e6)
    assert output == pytest.approx(24.0 / (service.decode_tokens_s * 3600) * 1e6)
    assert glm().cost_per_million is None
    lossy = glm(gpu_price=3.0, input_tokens=4096, output_tokens=500, failed=0.2, retried=0.1)
    assert lossy.cost_per_million == pytest.approx((prompt * 1.1 / 0.8, output * 1.1 / 0.8))


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


def test_a_token_time_limits_the_batch() -> None:
    free, bound = glm(), glm(tpot_ms=15.0)
    assert 0 < bound.decode_batch < free.decode_batch
    assert bound.tpot_ms <= 15.0
    context = (bound.decode_batch + 1) * bound.mean_context
    assert bound.decode_line.decode_step_seconds(bound.decode_batch + 1, context) > 0.015


def test_the_batch_ends_where_the_scarcest_of_what_admission_counts_does() -> None:
    service = glm(input_tokens=8193, output_tokens=500)
    assert service.request == of_request(
        8193,
        500,
        block_tokens=64,
        page_bytes=53_940 * 64,
        ranks=8,
        computed_tokens=8193,
        prompt_token_s=service.prefill_cost.seconds / 8193,
    )
    assert service.request.blocks == 136 and service.request.staging_bytes == 8 * 129 * 64 * 53_940
    assert service.decode_batch == (service.decode.blocks - 1) // 136 and service.decode_short_of == "blocks"
    few = replace(service, decode=pool("glm-5.2", "int4", "fp8", sequences=4))
    assert (few.decode_batch, few.decode_short_of) == (4, "slots")
    assert glm(tpot_ms=15.0).decode_short_of == "time a token"


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
    ("work", "message"),
    [
        ({"input_tokens": 1_048_000}, "above the 1,048,576"),
        ({"input_tokens": 500_000}, "prefill pool does not hold"),
        ({"tpot_ms": 1.0}, "within 1 ms a token"),
        ({"tpot_ms": 0.0}, "tpot_ms 0.0"),
        ({"output_tokens": 0}, "output_tokens 0"),
    ],
)
def test_what_cannot_be_served_says_why(work: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        glm(**work)
