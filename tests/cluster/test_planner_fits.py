"""What does not fit is refused with settings that do, each of them planned again here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.plan.architecture import architecture
from cluster.plan.facts import gpu, model_config
from cluster.plan.fits import DoesNotFit, check_fit, nearest_that_fits
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool
from cluster.plan.sharding import Parallel


def pool(model: str, weights: str, kv: str, device: str = "H200", tp: int = 8, **given: Any) -> PoolPlan:
    arch = architecture(model_config(model)[1], model)
    shape = PoolSettings(gpu(device), weight_format(weights, arch), kv_format(kv, arch), Parallel(tp=tp), **given)
    return plan_pool(arch, shape)


CASES = [
    pytest.param("kimi-k2.6", "int4", "bf16", {"context": 21_400, "concurrency": 64}, id="too many requests"),
    pytest.param("glm-5.2", "fp8", "bf16", {"tp": 4}, id="weights too large"),
    pytest.param("kimi-k2.6", "bf16", "bf16", {"tp": 1, "context": 300_000}, id="everything too large"),
    pytest.param("glm-4.5", "bf16", "bf16", {"device": "H100", "context": 131_072, "concurrency": 32}, id="both"),
    pytest.param(
        "smollm2-135m-instruct",
        "bf16",
        "bf16",
        {"device": "CPU", "tp": 1, "kv_space_gib": 1.0, "context": 2048, "concurrency": 64},
        id="cpu",
    ),
]


@pytest.mark.parametrize(("model", "weights", "kv", "given"), CASES)
def test_three_settings_are_named_and_each_fits(model: str, weights: str, kv: str, given: dict[str, Any]) -> None:
    plan = pool(model, weights, kv, **given)
    with pytest.raises(DoesNotFit) as refused:
        check_fit(plan, "decode pool")
    nearest = refused.value.nearest
    assert len(nearest) == 3
    text = str(refused.value)
    assert text.startswith("decode pool does not fit: ")
    for number, entry in enumerate(nearest, 1):
        assert f"  {number}. {entry.describe()}" in text
        again = plan_pool(entry.plan.arch, entry.plan.settings)
        assert not again.problems and again.max_requests >= again.settings.concurrency
        assert entry.plan.settings != plan.settings
    fields = [frozenset(entry.changes) for entry in nearest]
    assert not any(a < b or (a == b and i != j) for i, a in enumerate(fields) for j, b in enumerate(fields))


def test_the_cheapest_change_comes_first() -> None:
    plan = pool("kimi-k2.6", "int4", "bf16", context=21_400, concurrency=64)
    assert nearest_that_fits(plan)[0].changes == {"kv": "bf16 -> fp8"}
    cpu = pool("smollm2-135m-instruct", "bf16", "fp8", "CPU", 1, kv_space_gib=1.0, context=4096, concurrency=30)
    assert nearest_that_fits(cpu)[0].changes == {"kv_space_gib": "1 -> 2"}


def test_computed_limits_are_tight() -> None:
    plan = pool("smollm2-135m-instruct", "bf16", "fp8", "CPU", 1, kv_space_gib=1.0, context=4096, concurrency=30)
    by_field = {next(iter(entry.changes)): entry.plan for entry in nearest_that_fits(plan)}
    for field, step in (("context", plan.settings.block_tokens), ("concurrency", 1)):
        found = by_field[field]
        more = replace(found.settings, **{field: getattr(found.settings, field) + step})
        assert plan_pool(plan.arch, more).problems


def test_experts_too_narrow_for_blocks_get_another_format_or_are_kept_whole() -> None:
    # 1536 over 8 ranks is not whole FP8 blocks, 1408 over 8 not whole INT4 groups.
    weights = [entry.changes.get("weights") for entry in nearest_that_fits(pool("glm-4.5", "bf16", "bf16", "H100"))]
    assert "bf16 -> fp8_channel" in weights and "bf16 -> fp8" not in weights
    air = nearest_that_fits(pool("glm-4.5-air", "fp8_channel", "bf16", "H100", 4, context=131_072, concurrency=128))
    assert all(plan_pool(entry.plan.arch, entry.plan.settings).fits for entry in air)


def test_a_plan_that_fits_passes() -> None:
    check_fit(pool("glm-5.2", "int4", "fp8", context=8192, concurrency=64))


def test_when_nothing_helps_it_says_so() -> None:
    plan = pool("glm-5.2", "bf16", "bf16", "CPU", 1, kv_space_gib=1.0)
    with pytest.raises(DoesNotFit, match="No change of format"):
        check_fit(plan)
