"""What the engine tests start: the demo model in two pools, small and eager."""

from __future__ import annotations

from typing import Any

from cluster.spec import ClusterSpec

MODEL = ".models/smollm2-135m-instruct"
BLOCK = 32
NUM_BLOCKS = 256


def pair_spec(**overrides: Any) -> ClusterSpec:
    engine = {"enforce_eager": True, "num_gpu_blocks_override": NUM_BLOCKS}
    pool = {"block_tokens": BLOCK, "kv_cache_gib": 1, "max_num_seqs": 16, "engine_args": engine}
    tree: dict[str, Any] = {
        "model": {"path": MODEL, "name": "smol", "max_model_len": 2048},
        "pools": {
            "prefill": {**pool, "kv_dtype": "bfloat16", "max_num_batched_tokens": 256},
            "decode": {
                **pool,
                "kv_dtype": "fp8_e4m3",
                "kv_scales": [0.5, 0.25],
                "max_num_batched_tokens": 512,
            },
        },
        "transfer": {"staging_bytes_max": 64 << 20, "hand_over_s": 600, "lease_s": 600},  # other tests load the machine
    }
    for dotted, value in overrides.items():
        node = tree
        *parents, last = dotted.split("__")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return ClusterSpec.parse(tree)
