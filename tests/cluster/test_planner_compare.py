"""Plan against a running service's status: what is compared, and that it can fail."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.plan.architecture import architecture
from cluster.plan.compare import compare_status
from cluster.plan.facts import PlanError, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool
from cluster.plan.sharding import Parallel


def plan(model: str = "smollm2-135m-instruct", kv: str = "fp8", device: str = "CPU", tp: int = 1) -> PoolPlan:
    arch = architecture(model_config(model)[1], model)
    space = 1.0 if device == "CPU" else None
    shape = PoolSettings(
        gpu(device),
        weight_format("bf16", arch),
        kv_format(kv, arch),
        Parallel(tp=tp),
        block_tokens=32,
        kv_space_gib=space,
    )
    return plan_pool(arch, shape)


def status(**changes: Any) -> dict[str, Any]:
    """What a CPU service of SmolLM2 says: 1 GiB of FP8 pages of 32 tokens, one of them kept by the engine."""
    replica = {
        "replica_id": "decode-1",
        "blocks_total": 2911,
        "layout": {"num_layers": 30, "page_tokens": 32, "num_kv_heads": 3, "head_dim": 64, "dtype": "float8_e4m3fn"},
        "engine": {"kv_cache_bytes": 2912 * 32 * 11_520, "weights_bytes": 57_742_432},
    }
    return {"pools": {"decode": {"replicas": [replica | changes]}}}


def test_a_service_that_is_as_planned_agrees() -> None:
    rows = compare_status(status(), {"decode": plan(), "prefill": plan(kv="bf16")})
    assert all(row.ok for row in rows)
    assert {row.what for row in rows} == {
        "KV tokens",
        "layers",
        "KV heads a rank",
        "row values a head",
        "KV cache bytes",
    }
    assert all(row.off == 0.0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"blocks_total": 2850}, "KV tokens"),
        ({"layout": {"num_layers": 29, "page_tokens": 32, "num_kv_heads": 3, "head_dim": 64}}, "layers"),
        ({"layout": {"num_layers": 30, "page_tokens": 32, "num_kv_heads": 4, "head_dim": 64}}, "KV heads a rank"),
        ({"layout": {"num_layers": 30, "page_tokens": 32, "page_bytes": 999}}, "page bytes"),
        ({"engine": {"kv_cache_bytes": 2 * 2912 * 32 * 11_520}}, "KV cache bytes"),
        ({"engine": {"weights_loaded_bytes": 280_000_000}}, "weights bytes"),
    ],
)
def test_each_number_can_fail(changes: dict[str, Any], what: str) -> None:
    rows = compare_status(status(**changes), {"decode": plan()})
    assert [row.what for row in rows if not row.ok] == [what]


def test_tolerance_is_two_percent_and_adjustable() -> None:
    near = status(blocks_total=2860)
    assert all(row.ok for row in compare_status(near, {"decode": plan()}))
    assert not all(row.ok for row in compare_status(near, {"decode": plan()}, tolerance=0.01))


def test_layout_and_engine_are_found_at_the_pool_too() -> None:
    tree = status()
    pool = tree["pools"]["decode"]
    for key in ("layout", "engine"):
        pool[key] = pool["replicas"][0].pop(key)
    assert len(compare_status(tree, {"decode": plan()})) == 5


def test_gpu_pools_compare_the_weights_a_gpu_holds() -> None:
    shape = plan("glm-4.5-air", "fp8", "H200", tp=4)
    replica = {
        "blocks_total": shape.blocks - 1,
        "layout": {
            "num_layers": 46,
            "page_tokens": 32,
            "num_kv_heads": 2,
            "head_dim": 128,
            "page_bytes": shape.page_bytes,
        },
        "engine": {
            "kv_cache_bytes": shape.blocks * shape.page_bytes,
            "weights_bytes": round(shape.resident_bytes * 1.03),
        },
    }
    rows = compare_status({"pools": {"decode": {"replicas": [replica]}}}, {"decode": shape})
    assert [row.what for row in rows if not row.ok] == ["weights bytes"]
    assert len(rows) == 7


@pytest.mark.parametrize("tree", [{}, {"pools": {}}, {"pools": {"decode": {"replicas": []}}}, {"pools": {"decode": 3}}])
def test_nothing_to_compare_is_an_error(tree: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        compare_status(tree, {"decode": plan()})
