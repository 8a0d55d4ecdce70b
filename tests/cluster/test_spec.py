"""The cluster spec refuses what it does not understand and names the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.engine_args import ONLY, OWNED
from cluster.spec import TOPOLOGIES, ClusterSpec, SpecError, find_topology, parse_overrides


def tree(**decode: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, "pools": {"decode": {"kv_dtype": "fp8_e4m3", **decode}}}


@pytest.mark.parametrize("file", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_topologies_are_valid(file: Path) -> None:
    spec = ClusterSpec.load(file)
    assert spec.pools.prefill.bounds[1] >= 1 and spec.pools.decode.kv_dtype == "fp8_e4m3"
    assert ClusterSpec.parse(spec.model_dump()) == spec


def test_defaults_and_derived_values() -> None:
    spec = ClusterSpec.parse({"model": {"path": "/a/b/model-x"}, "pools": {"decode": {}}})
    assert spec.model.served_name == "model-x"
    assert spec.pools.prefill.replicas == 0
    assert spec.pools.decode.bounds == (1, 1)
    assert spec.integrity.mode == "off"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica": 2}, "unknown key pools.decode.replica; did you mean pools.decode.replicas?"),
        ({"zzz": 2}, "unknown key pools.decode.zzz; known here: replicas"),
        ({"replicas": -1}, "pools.decode.replicas: Input should be greater than or equal to 0 (got -1)"),
        ({"kv_dtype": "fp9"}, "pools.decode.kv_dtype: Input should be 'bfloat16' or 'fp8_e4m3' (got 'fp9')"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is above max_replicas 2"),
        ({"replicas": 5, "max_replicas": 2}, "min_replicas 5 is above max_replicas 2"),
        ({"replicas": 1, "min_replicas": 2, "max_replicas": 3}, "replicas 1 is outside"),
        ({"tensor_parallel": 2}, "tensor_parallel 2 on a CPU pool"),
        ({"gpus_per_replica": 16, "tensor_parallel": 16}, "more than one node's 8"),
        ({"gpus_per_replica": 1, "tensor_parallel": 2}, "tensor_parallel 2 needs more than gpus_per_replica 1"),
        ({"kv_dtype": "bfloat16", "kv_scales": [0.5, 0.5]}, "only an fp8_e4m3 cache has scales"),
        ({"kv_scales": [0.0, 1.0]}, "both must be above 0"),
    ],
)
def test_a_bad_pool_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        ClusterSpec.parse(tree(**change), "file.yaml")
    assert str(caught.value).startswith("file.yaml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ({"replicas": 1, "block_tokens": 64}, "pages move whole, so set both to the same"),
        ({"replicas": 1, "gpus_per_replica": 2, "tensor_parallel": 2}, "each rank moves its own shard"),
    ],
)
def test_pools_that_cannot_share_pages(prefill: dict[str, Any], message: str) -> None:
    bad = tree()
    bad["pools"]["prefill"] = prefill
    with pytest.raises(SpecError, match=message):
        ClusterSpec.parse(bad)


def test_fp8_prefill_with_bf16_decode_has_no_codec() -> None:
    bad = tree(kv_dtype="bfloat16")
    bad["pools"]["prefill"] = {"replicas": 1, "kv_dtype": "fp8_e4m3"}
    with pytest.raises(SpecError, match="use bfloat16 on prefill"):
        ClusterSpec.parse(bad)


def test_missing_sections() -> None:
    with pytest.raises(SpecError, match="model is missing; it has no default"):
        ClusterSpec.parse({"pools": {"decode": {}}})
    with pytest.raises(SpecError, match=r"pools\.decode is missing"):
        ClusterSpec.parse({"model": {"path": "m"}, "pools": {}})


def test_overrides() -> None:
    overrides = parse_overrides(["pools.decode.replicas=2", "pools.decode.max_replicas=4", "integrity.mode=check"])
    spec = ClusterSpec.load("local-cpu", overrides)
    assert (spec.pools.decode.replicas, spec.integrity.mode) == (2, "check")
    with pytest.raises(SpecError, match="is not KEY=VALUE"):
        parse_overrides(["pools.decode.replicas"])
    with pytest.raises(SpecError, match="not a section"):
        ClusterSpec.load("local-cpu", {"model.path.x": 1})


def test_a_missing_file_lists_what_ships() -> None:
    with pytest.raises(SpecError, match="local-cpu, local-scale, one-node, two-node, two-node-glm"):
        find_topology("nowhere")


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("- a\n- b\n")
    with pytest.raises(SpecError, match="must hold a mapping"):
        ClusterSpec.load(file)
    file.write_text("a: [")
    with pytest.raises(SpecError, match="is not YAML"):
        ClusterSpec.load(file)


def test_frozen() -> None:
    spec = ClusterSpec.load("local-cpu")
    with pytest.raises(ValidationError):
        spec.pools.decode.replicas = 3  # type: ignore[misc]


def test_a_fault_that_does_not_exist_is_refused_with_the_nearest() -> None:
    assert ClusterSpec.load("local-cpu", {"faults.kinds": ["bit_flip"]}).faults.kinds == ("bit_flip",)
    with pytest.raises(SpecError, match=r"faults: kinds: 'bit_flop' is no kind of fault; did you mean bit_flip\?"):
        ClusterSpec.load("local-cpu", {"faults.kinds": ["bit_flop"]})


@pytest.mark.parametrize("name", sorted([*OWNED, *ONLY]))
def test_an_engine_argument_that_cannot_work_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match=rf"pools\.decode: engine_args\.{name}\b"):
        ClusterSpec.load("local-cpu", {f"pools.decode.engine_args.{name}": 2})


def test_an_engine_argument_at_its_only_value_is_harmless() -> None:
    for name, (value, _) in ONLY.items():
        assert ClusterSpec.load("local-cpu", {f"pools.decode.engine_args.{name}": value}).pools.decode.engine_args
