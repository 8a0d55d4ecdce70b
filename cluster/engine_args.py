"""Engine arguments that a pool may not pass to vLLM, and why: refused by name before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP_GPUS_MAX = 8  # of one node: the workers of a replica share the node's staging memory and its local socket

# Set by fields of the spec, which the rest of the service reads: a second setting would contradict it.
OWNED = {
    "model": "model.path or the pool's weights",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "served_model_name": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_model_len",
    "kv_cache_dtype": "the pool's kv_dtype",
    "block_size": "the pool's block_tokens",
    "max_num_seqs": "the pool's max_num_seqs",
    "max_num_batched_tokens": "the pool's max_num_batched_tokens",
    "enable_prefix_caching": "the pool's enable_prefix_caching",
    "tensor_parallel_size": "the pool's tensor_parallel",
    "distributed_executor_backend": "the pool's gpus_per_replica and executor",
    "kv_transfer_config": "transfer",
    "worker_extension_cls": "integrity",
    "scheduler_cls": "integrity",
    "disable_hybrid_kv_cache_manager": "the service: pages need one cache group",
}
_ONE_ENGINE = "a replica is one engine, and its pages are moved rank by rank; set replicas instead"
_ONE_STAGE = "only the first stage's pages would be moved; set tensor_parallel instead"
_WHOLE_CONTEXT = "a page would hold a part of its tokens only; set tensor_parallel instead"
_ONE_NODE = "the workers of a replica share one node's staging memory; set replicas and tensor_parallel instead"
_OWN_CONNECTOR = "the service's own KV connector takes its place; remove it"
# Accepted by vLLM with another value than this, and then wrong or hanging here.
ONLY = {
    "data_parallel_size": (1, _ONE_ENGINE),
    "data_parallel_size_local": (1, _ONE_ENGINE),
    "pipeline_parallel_size": (1, _ONE_STAGE),
    "decode_context_parallel_size": (1, _WHOLE_CONTEXT),
    "prefill_context_parallel_size": (1, _WHOLE_CONTEXT),
    "nnodes": (1, _ONE_NODE),
    "node_rank": (0, _ONE_NODE),
    "data_parallel_rank": (None, _ONE_ENGINE),
    "data_parallel_external_lb": (False, _ONE_ENGINE),
    "data_parallel_hybrid_lb": (False, _ONE_ENGINE),
    "enable_elastic_ep": (False, _ONE_ENGINE),
    "kv_offloading_size": (None, _OWN_CONNECTOR),
    "ec_transfer_config": (None, _OWN_CONNECTOR),
}

# What decides which token is drawn and what is said of it. Prefill draws the first token for decode.
SAMPLING = ("logits_processors", "logprobs_mode", "max_logprobs", "return_sampling_mask", "watermark_config")


def with_sampling_of(decode: Mapping[str, Any], prefill: Mapping[str, Any]) -> dict[str, Any]:
    """Prefill's arguments with decode's sampling."""
    return dict(prefill) | {name: decode[name] for name in SAMPLING if name in decode}


def sampling_problem(decode: Mapping[str, Any], prefill: Mapping[str, Any]) -> str:
    """Which of prefill's arguments would make it draw other tokens than decode does; "" when none."""
    for name in SAMPLING:
        if name in prefill and prefill[name] != decode.get(name):
            return (
                f"engine_args.{name} {prefill[name]!r}: prefill draws first tokens for decode, which has "
                f"{decode.get(name)!r}; set it in pools.decode.engine_args only, it holds for both"
            )
    return ""


def problem(engine_args: Mapping[str, Any]) -> str:
    """What is wrong with the first argument that cannot work; "" when all can."""
    for name, value in engine_args.items():
        if (owner := OWNED.get(name)) is not None:
            return f"engine_args.{name} is set by {owner}; remove it"
        if name in ONLY and value != ONLY[name][0]:
            return f"engine_args.{name} {value!r}: {ONLY[name][1]}"
    return ""
