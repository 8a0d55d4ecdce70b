"""The page layouts a pool's engines will have, and whether a prefill pool's pages can become a decode pool's."""

from __future__ import annotations

from cluster.plan.facts import PlanError
from cluster.plan.formats import index_row_bytes
from cluster.plan.memory import PoolPlan
from kernels.layout import LayoutError, PageDtype, PageLayout, PageOrder, Rounding, check_convertible


def page_layout(plan: PoolPlan) -> PageLayout:
    """The layout of one tensor-parallel rank's KV pages over all layers, scales 1.

    K and V are `cpu_vec` on a CPU (on one with AMX the engine says `cpu_amx`: as many bytes) and `kv_packed` on a GPU.
    Index keys of sparse attention are a region of their own.
    """
    arch, s = plan.arch, plan.settings
    dtype = PageDtype.BF16 if s.kv == "bf16" else PageDtype.E4M3
    if arch.mla:
        order = PageOrder.FP8_DS_MLA if s.kv == "fp8_ds_mla" else PageOrder.MLA
        heads, width = 1, arch.mla.latent
    else:
        order = PageOrder.CPU_VEC if s.gpu.is_cpu else PageOrder.KV_PACKED
        heads, width = max(1, arch.kv_heads // s.parallel.tp), arch.head_dim
    index = (
        ()
        if arch.dsa is None
        else (
            PageLayout(
                num_layers=len(arch.dsa.layers),
                page_tokens=s.block_tokens,
                num_kv_heads=1,
                head_dim=index_row_bytes(arch),
                dtype=PageDtype.UINT8,
                order=PageOrder.BYTES,
            ),
        )
    )
    return PageLayout(
        num_layers=arch.layers,
        page_tokens=s.block_tokens,
        num_kv_heads=heads,
        head_dim=width,
        dtype=dtype,
        order=order,
        rounding=Rounding.TRUNCATE if s.gpu.is_cpu and not arch.mla else Rounding.NEAREST_EVEN,
        further_regions=index,
    )


def check_pair(prefill: PoolPlan, decode: PoolPlan) -> None:
    """Raises PlanError when pages of `prefill` cannot be handed to `decode`."""
    ours, theirs = prefill.settings.parallel.tp, decode.settings.parallel.tp
    if ours != theirs:
        raise PlanError(
            f"tp {ours} on prefill and {theirs} on decode: each rank moves its own shard, so both need the same"
        )
    try:
        check_convertible(page_layout(prefill), page_layout(decode))
    except LayoutError as error:
        raise PlanError(f"prefill and decode: {error}") from None
