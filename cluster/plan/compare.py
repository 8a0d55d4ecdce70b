"""Plan against reality: a running service's `/status`, and published figures of models that do not fit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.plan.facts import PlanError
from cluster.plan.memory import PoolPlan

TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """One number planned and seen. `off` is seen over planned, less one."""

    where: str
    what: str
    planned: float
    real: float
    tolerance: float

    @property
    def off(self) -> float:
        if self.planned == self.real:
            return 0.0
        return float("inf") if not self.planned else self.real / self.planned - 1

    @property
    def ok(self) -> bool:
        return abs(self.off) <= self.tolerance


def compare_status(status: Mapping[str, Any], plans: Mapping[str, PoolPlan], tolerance: float = TOLERANCE) -> list[Row]:
    """Every number that both the status and the plan have, for each replica of the pools in `plans`.

    `status["pools"][pool]["replicas"]` lists replicas with `blocks_total` and, at the replica, its pool or the top,
    `layout` (a page layout's fields) and `engine` (`kv_cache_bytes`, `weights_bytes`, `weights_loaded_bytes`).
    Geometry must agree exactly, sizes within `tolerance`. Raises PlanError when nothing can be compared: a check that
    cannot fail is none.
    """
    rows: list[Row] = []
    pools = status.get("pools")
    if not isinstance(pools, Mapping):
        raise PlanError("the status has no pools; is this the /status of a pageferry service?")
    for pool, plan in plans.items():
        entry = pools.get(pool)
        if not isinstance(entry, Mapping) or not isinstance(entry.get("replicas"), Sequence):
            continue
        replicas = entry["replicas"]
        for number, replica in enumerate(replicas):
            if isinstance(replica, Mapping) and replica.get("state") != "starting":
                name = f"{pool} {replica.get('replica_id', replica.get('name', number))}"
                rows += _replica_rows(name, [replica, entry, status], plan, tolerance)
    if not rows:
        raise PlanError(f"the status names no replica of {' or '.join(plans)} with numbers to compare")
    return rows


def _replica_rows(name: str, scopes: Sequence[Mapping[str, Any]], plan: PoolPlan, tolerance: float) -> list[Row]:
    rows = []

    def add(what: str, planned: float, real: Any, exact: bool = False) -> None:
        if isinstance(real, int | float) and not isinstance(real, bool):
            rows.append(Row(name, what, planned, real, 0.0 if exact else tolerance))

    layout = _nearest(scopes, "layout")
    engine = _nearest(scopes, "engine")
    blocks = scopes[0].get("blocks_total")
    block_tokens = layout.get("page_tokens", plan.settings.block_tokens)
    if isinstance(blocks, int):
        # A service counts the pages that requests can have: all but the one vLLM keeps for itself in each cache.
        usable = max(0, plan.blocks - 1) * plan.settings.parallel.dp * plan.settings.block_tokens
        add("KV tokens", usable, blocks * block_tokens)
    if layout:
        arch = plan.arch
        latent = arch.mla is not None
        add("layers", arch.layers, layout.get("num_layers"), exact=True)
        heads = 1 if arch.mla else max(1, arch.kv_heads // plan.settings.parallel.tp)
        add("KV heads a rank", heads, layout.get("num_kv_heads"), exact=True)
        add(
            "row values a head", arch.mla.latent if arch.mla and latent else arch.head_dim, layout.get("head_dim"), True
        )
        if layout.get("page_tokens") == plan.settings.block_tokens:
            add("page bytes", plan.page_bytes, layout.get("page_bytes"), exact=arch.dsa is None)
    add("KV cache bytes", plan.blocks * plan.page_bytes, engine.get("kv_cache_bytes"))
    if plan.settings.gpu.is_cpu:
        # The CPU build moves linear layers into packed copies that no tensor shows; only a count taken at loading can
        # be compared, and MLA's absorbed copies come after it.
        held = plan.tightest.held
        add("weights bytes", held.total - held.absorbed, engine.get("weights_loaded_bytes"))
    else:
        add("weights bytes", plan.resident_bytes, engine.get("weights_bytes"))
    return rows


def _nearest(scopes: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """The mapping under `key` in the innermost scope that has one."""
    return next((scope[key] for scope in scopes if isinstance(scope.get(key), Mapping)), {})
