"""The check at service start: what the plan says cannot fit is refused, with the three nearest settings that would."""

from __future__ import annotations

import logging

from cluster.plan.facts import Gpu, PlanError, gpu
from cluster.plan.fits import check_fit
from cluster.plan.from_spec import plan_spec
from cluster.spec import ClusterSpec

logger = logging.getLogger("pageferry.plan")


def refuse_unfit(spec: ClusterSpec, pool: str, device_name: str | None = None) -> bool:
    """Raises `DoesNotFit` when this pool cannot hold its model; True when it was planned and fits.

    `device_name`: the GPU's name as its driver gives it, for pools with GPUs. False, with a line in the log: a model or
    GPU that the planner does not know, or memory that is not stated; the engine will then find out for itself.
    """
    try:
        device: Gpu | None = gpu(device_name) if device_name else None
        others = {"prefill", "decode"} - {pool}
        plans = plan_spec(_only(spec, others), device)
    except PlanError as error:
        logger.warning("pools.%s is not planned: %s", pool, error)
        return False
    if pool not in plans:
        return False
    check_fit(plans[pool], f"pools.{pool}")
    return True


def refuse_unfit_cpu_pools(spec: ClusterSpec) -> None:
    """`refuse_unfit` for the CPU pools, from anywhere; GPU pools are checked by their replicas, where the GPUs are."""
    for name in ("prefill", "decode"):
        pool = getattr(spec.pools, name)
        if pool.gpus_per_replica == 0 and pool.bounds[1]:
            refuse_unfit(spec, name)


def _only(spec: ClusterSpec, others: set[str]) -> ClusterSpec:
    """The spec without the CPU memory of the other pool, so that only this one is planned."""
    pools = spec.pools
    for name in others:
        each = getattr(pools, name)
        pools = pools.model_copy(
            update={name: each.model_copy(update={"kv_cache_gib": None, "gpus_per_replica": 0, "tensor_parallel": 1})}
        )
    return spec.model_copy(update={"pools": pools})
