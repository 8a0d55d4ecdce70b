"""The pools of a topology file as plans, for the check at service start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.plan.architecture import architecture
from cluster.plan.facts import CPU, Gpu, PlanError, gpu, model_config, native_weights
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import RUNTIME_GIB, UTILIZATION, PoolPlan, PoolSettings, plan_pool
from cluster.plan.sharding import Parallel
from cluster.spec import ClusterSpec, PoolSpec

POOLS = ("prefill", "decode")


def plan_spec(
    spec: ClusterSpec,
    device: Gpu | None = None,
    model: str | None = None,
    weights: Mapping[str, str] | None = None,
) -> dict[str, PoolPlan]:
    """`{"prefill": plan, "decode": plan}` of the pools that have replicas and whose memory is known.

    `device` is the GPU of pools with GPUs (`gpu(torch.cuda.get_device_name())`). `model` stands in for checkpoints
    that are not on this machine (a known name or a config), `weights` then says what format a pool's is in. A CPU pool
    without `kv_cache_gib` is left out: its engine takes a share of whatever memory the machine then has. Raises
    PlanError as `plan_pool` does, and when a pool has GPUs but `device` is None.
    """
    plans = {}
    for name in POOLS:
        pool: PoolSpec = getattr(spec.pools, name)
        if pool.bounds[1] < 1 or (pool.gpus_per_replica == 0 and pool.kv_cache_gib is None):
            continue
        plans[name] = _plan(spec, name, device, model, (weights or {}).get(name, "auto"))
    return plans


def _plan(spec: ClusterSpec, name: str, device: Gpu | None, stand_in: str | None, weights: str) -> PoolPlan:
    pool: PoolSpec = getattr(spec.pools, name)
    on_cpu = pool.gpus_per_replica == 0
    if not on_cpu and device is None:
        raise PlanError(f"pools.{name} has GPUs: name their type (--gpu)")
    model, config, _ = model_config(stand_in or pool.weights or spec.model.path)
    arch = architecture(config, model)
    extra = pool.engine_args
    parallel = Parallel(
        tp=pool.tensor_parallel,
        pp=_integer(name, extra, "pipeline_parallel_size", 1),
        dp=_integer(name, extra, "data_parallel_size", 1),
        ep=bool(extra.get("enable_expert_parallel", False)),
    )
    if not on_cpu and parallel.gpus > pool.gpus_per_replica:
        raise PlanError(
            f"pools.{name}.gpus_per_replica {pool.gpus_per_replica} is less than the {parallel.gpus} GPUs that "
            f"{parallel.describe()} takes"
        )
    settings = PoolSettings(
        gpu=gpu(CPU) if on_cpu or device is None else device,
        weights=weight_format(weights, arch, config, native=native_weights(model)),
        kv=kv_format(pool.kv_dtype, arch),
        parallel=parallel,
        replicas=max(1, pool.replicas),
        block_tokens=pool.block_tokens,
        context=spec.model.max_model_len or arch.context,
        utilization=float(extra.get("gpu_memory_utilization", UTILIZATION)),
        runtime_gib=0.0 if on_cpu else RUNTIME_GIB,
        kv_space_gib=pool.kv_cache_gib,
        blocks_override=_integer(name, extra, "num_gpu_blocks_override", 0) or None,
        batched_tokens=pool.max_num_batched_tokens or 8192,
        sequences=pool.max_num_seqs,
    )
    return plan_pool(arch, settings)


def _integer(pool: str, extra: dict[str, Any], key: str, default: int) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or (value != default and value < 1):
        raise PlanError(f"pools.{pool}.engine_args.{key} {value!r} must be a whole number of at least 1")
    return value
