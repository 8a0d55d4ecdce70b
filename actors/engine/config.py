"""From a pool of the cluster spec to the vLLM engine of one replica, and what that engine must share with its peers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from actors.messages import Fingerprint, Role
from cluster.engine_args import with_sampling_of
from cluster.spec import ClusterSpec, PoolSpec
from cluster.start_up import engine_s

# (connector class, its module, class of the worker's further methods)
CONNECTOR = ("FerryConnector", "actors.engine.connector", "actors.engine.utilities.FerryWorkerExtension")
FAULT_INJECTING_CONNECTOR = (
    "FaultInjectingConnector",
    "actors.engine.fault_injection",
    "actors.engine.fault_injection.FaultInjectingExtension",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "vocab.txt")


class ConfigError(ValueError):
    """An engine that cannot be built from the configuration; names the field and the way out."""


KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
"""For glibc, bytes, of a CPU engine's processes. By default it gives a layer's activations back to the kernel and takes
them again for the next layer: 89,000 page faults for one prompt of 1,000 tokens, a tenth to a fifth of its time."""

# Seconds that a reader of vLLM's queue between EngineCore and Worker yields in a loop before it sleeps (vLLM: 1).
# Not 0: ZeroMQ may drop a wake-up that follows another within about a millisecond, and the engine then stands still.
QUEUE_BUSY_LOOP = "PAGEFERRY_QUEUE_BUSY_LOOP_S"
QUEUE_BUSY_LOOP_S = "0.003"
CPU_EXECUTOR = "actors.engine.vllm_patches.MultiprocExecutor"

A_PERSON_MAY_SET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_MAX_N_SEQUENCES": "128",  # OpenAI's own bound; of vLLM's 16,384 one request holds all others up
}

PREFILL_SEED = 0x50F


def pool_of(spec: ClusterSpec, role: Role) -> PoolSpec:
    return spec.pools.prefill if role is Role.PREFILL else spec.pools.decode


def set_environment(spec: ClusterSpec, role: Role) -> None:
    """Environment of the engine processes; must run before vLLM is imported in this process."""
    pool = pool_of(spec, role)
    for name, value in A_PERSON_MAY_SET.items():
        os.environ.setdefault(name, value)
    defaults: dict[str, str] = {}
    if pool.gpus_per_replica == 0:
        # One thread an engine unless the pool says otherwise: with default binding two engines land on one core.
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, int(pool.cpus))),
            "OMP_WAIT_POLICY": "PASSIVE",
            QUEUE_BUSY_LOOP: QUEUE_BUSY_LOOP_S,
            **KEEP_FREED_MEMORY,
        }
        if pool.kv_cache_gib is not None:
            if pool.kv_cache_gib != int(pool.kv_cache_gib):
                raise ConfigError(
                    f"pools.{role}.kv_cache_gib {pool.kv_cache_gib}: vLLM's CPU cache takes whole GiB; "
                    "for less set engine_args.num_gpu_blocks_override (pages)"
                )
            defaults["VLLM_CPU_KVCACHE_SPACE"] = str(int(pool.kv_cache_gib))
    else:
        defaults["VLLM_ENGINE_READY_TIMEOUT_S"] = str(engine_s(spec, pool))
    # Ray sets OMP_NUM_THREADS to the replica's CPUs, which may be 0 or a fraction; ours is the considered one.
    # Else vLLM's decoder would unpickle what it gets.
    os.environ.update(defaults | pool.env | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"})


def engine_kwargs(
    spec: ClusterSpec, role: Role, replica_id: str, socket_path: str, life_path: str = "", incarnation: int = 0
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs for a replica of this pool. `life_path`: see `actors.engine.watch`.

    `incarnation`: of the replica, see `Announcement`; its pages' tags begin with what it and the name make.
    """
    pool, model = pool_of(spec, role), spec.model
    if pool.gpus_per_replica > 1:
        backend: str = pool.executor
    else:
        backend = "uni" if pool.gpus_per_replica else CPU_EXECUTOR
    connector, module, extension = FAULT_INJECTING_CONNECTOR if spec.faults.kinds else CONNECTOR
    kwargs: dict[str, Any] = {
        "model": pool.weights or model.path,
        "tokenizer": model.tokenizer or model.path,
        "revision": model.revision,
        "served_model_name": [model.served_name],
        "trust_remote_code": model.trust_remote_code,
        "max_model_len": model.max_model_len,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto" if pool.kv_dtype == "bfloat16" else "fp8_e4m3",
        "block_size": pool.block_tokens,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "enable_prefix_caching": pool.enable_prefix_caching,
        "tensor_parallel_size": pool.tensor_parallel,
        "distributed_executor_backend": backend,
        "disable_hybrid_kv_cache_manager": True,
        "worker_extension_cls": extension,
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
            # A page that cannot be opened is computed again by decode; the request does not fail for it.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "replica_id": replica_id,
                "incarnation": incarnation,
                "role": str(role),
                "socket": socket_path,
                "life": life_path,
                "kv_scales": list(pool.kv_scales),
                "kv_dtype": pool.kv_dtype,
                "integrity": spec.integrity.model_dump(),
                "faults": spec.faults.model_dump(),
            },
        },
    }
    if role is Role.PREFILL:
        # Both sides draw tokens of one request: with vLLM's one default they would use the same random numbers.
        kwargs["seed"] = PREFILL_SEED
        # Each prompt gets an equal share of a step, of what it needs: a short one waits for one chunk of a long one. A
        # prompt that is alone has the whole step. (The threshold itself is below every share.)
        kwargs |= {"long_prefill_token_threshold": 1, "long_prefill_token_threshold_adaptive": True}
        engine_args = with_sampling_of(spec.pools.decode.engine_args, pool.engine_args)
    else:
        engine_args = pool.engine_args
    if spec.integrity.mode == "check":
        kwargs["scheduler_cls"] = "actors.engine.integrity.scheduler.make_scheduler"
    return kwargs | engine_args


def generation(spec: ClusterSpec) -> str:
    """Equal for replicas whose pages and streams may be continued by one another: of one model and its checkpoints.

    It is what a rolling change to another model must not mix. A checkpoint that is replaced under its own name is not
    seen: give it another name.
    """
    parts = (spec.model.path, spec.model.revision, spec.pools.prefill.weights, spec.pools.decode.weights)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def fingerprint(vllm_config: Any, tokenizer_path: str) -> Fingerprint:
    """Model geometry and tokenizer: what must be equal on both sides. Weight format and names are left out."""
    model, hf = vllm_config.model_config, vllm_config.model_config.hf_text_config
    names = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "vocab_size",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
    )
    geometry = {name: value for name in names if (value := getattr(hf, name, None)) is not None}
    geometry["head_size"] = model.get_head_size()
    geometry["use_mla"] = model.use_mla
    geometry["tensor_parallel"] = vllm_config.parallel_config.tensor_parallel_size
    return Fingerprint(geometry=geometry, tokenizer=hash_tokenizer(tokenizer_path))


def tokenizer_of(spec: ClusterSpec) -> str:
    """What `Fingerprint.tokenizer` is for this cluster's frontends, which turn text into the tokens of all pools."""
    return hash_tokenizer(spec.model.tokenizer or spec.model.path)


def tokenizer_path(spec: ClusterSpec, role: Role) -> str:
    """Where the tokenizer lies that the pool's weights were made for: beside them, unless `model.tokenizer` speaks for
    both pools or the pool's checkpoint has none."""
    own = pool_of(spec, role).weights
    if spec.model.tokenizer is None and own and any((Path(own) / name).is_file() for name in TOKENIZER_FILES):
        return own
    return spec.model.tokenizer or spec.model.path


def hash_tokenizer(path: str) -> str:
    """SHA-256 over what decides which tokens a text becomes; `path` itself when it is no folder (a name in the hub
    cache).

    Of `tokenizer.json` that is the vocabulary, merges, added tokens and what splits the text, in one spelling: tools
    that convert checkpoints write the file anew. Without it, the bytes of the vocabulary files.
    """
    folder = Path(path)
    digest = hashlib.sha256()
    if (folder / "tokenizer.json").is_file():
        digest.update(_tokens_of(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))))
        return digest.hexdigest()
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        return path
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _tokens_of(tree: dict[str, Any]) -> bytes:
    model = tree.get("model") or {}
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    added = [[token.get("id"), token.get("content")] for token in tree.get("added_tokens") or ()]
    kept = [model.get("type"), model.get("vocab"), merges, added, tree.get("normalizer"), tree.get("pre_tokenizer")]
    return json.dumps(kept, sort_keys=True).encode()
