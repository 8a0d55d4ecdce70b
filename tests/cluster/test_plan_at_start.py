"""A service that cannot hold its model is refused before anything starts, with settings that would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.plan.fits import DoesNotFit
from cluster.plan.preflight import refuse_unfit, refuse_unfit_cpu_pools
from cluster.spec import ClusterSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def spec(folder: Path, decode: dict[str, Any]) -> ClusterSpec:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tree = {"model": {"path": str(folder), "max_model_len": 4096}, "pools": {"decode": decode}}
    return ClusterSpec.parse(tree)


def test_a_pool_that_fits_passes(tmp_path: Path) -> None:
    assert refuse_unfit(spec(tmp_path, {"kv_cache_gib": 1, "kv_dtype": "fp8_e4m3"}), "decode")


def test_a_pool_too_small_for_one_request_is_refused_with_a_way_out(tmp_path: Path) -> None:
    small = spec(tmp_path, {"kv_cache_gib": 1, "engine_args": {"num_gpu_blocks_override": 20}})
    with pytest.raises(DoesNotFit, match=r"pools\.decode does not fit(.|\n)*Nearest settings that fit"):
        refuse_unfit_cpu_pools(small)


def test_gpu_pools_are_checked_by_the_gpu_that_is_there() -> None:
    overrides = {"model.path": "glm-4.5", "pools.decode.weights": "glm-4.5"}
    one_node = ClusterSpec.load("one-node", overrides)
    refuse_unfit_cpu_pools(one_node)  # nothing to say from here
    with pytest.raises(DoesNotFit) as caught:
        refuse_unfit(one_node, "decode", "NVIDIA H200")
    assert len(caught.value.nearest) == 3


def test_what_is_not_known_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Strange"], "model_type": "strange"}))
    strange = ClusterSpec.parse({"model": {"path": str(tmp_path)}, "pools": {"decode": {"kv_cache_gib": 1}}})
    assert not refuse_unfit(strange, "decode")
