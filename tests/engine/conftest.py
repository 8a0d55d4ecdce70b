"""Real engines, shared by a whole session: each costs a model load and about 2.5 GiB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from cluster.spec import ClusterSpec
from ops.engine_pair import EnginePair

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
        "transfer": {"staging_bytes_max": 64 << 20},
    }
    for dotted, value in overrides.items():
        node = tree
        *parents, last = dotted.split("__")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return ClusterSpec.parse(tree)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair() -> AsyncIterator[EnginePair]:
    """BF16 prefill in chunks of 256 tokens, FP8 decode with scales other than 1."""
    made = await EnginePair.start(pair_spec())
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)
