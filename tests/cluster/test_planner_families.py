"""Every model family through planner and codecs: the planned page is what the codec seals, moves and opens.

This is how GLM 5 (MLA with sparse attention) and FP8 latent rows are tried where no engine runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.plan.architecture import architecture
from cluster.plan.facts import PlanError, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool
from cluster.plan.pages import check_pair, page_layout
from cluster.plan.sharding import Parallel
from kernels.dispatch import open_pages, seal_pages
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding

pytestmark = pytest.mark.compiles  # the real kernels

# (model, decode KV, tp, order); two layers are enough for a codec that works a layer at a time.
FAMILIES = [
    pytest.param("smollm2-135m-instruct", "fp8", 1, PageOrder.KV_PACKED, id="Llama: GQA"),
    pytest.param("glm-4.5", "fp8", 8, PageOrder.KV_PACKED, id="GLM 4.5: GQA + MoE"),
    pytest.param("kimi-k2.6", "fp8", 8, PageOrder.MLA, id="Kimi K2: MLA + MoE"),
    pytest.param("glm-5.2", "fp8", 8, PageOrder.FP8_DS_MLA, id="GLM 5: MLA + DSA"),
    pytest.param("glm-5.2", "fp8_uniform", 8, PageOrder.MLA, id="GLM 5: MLA + DSA, uniform rows"),
]
LAYERS = 2
BLOCKS = 5
BINDING = SealBinding(ticket_hash=0x1234_5678_9ABC_DEF0, attempt=1)


def pool(model: str, kv: str, tp: int = 1, device: str = "H200", layers: int | None = None, **given: Any) -> PoolPlan:
    name, config, _ = model_config(model)
    if layers:
        config |= {"num_hidden_layers": layers, "first_k_dense_replace": 1}
    arch = architecture(config, name)
    shape = PoolSettings(gpu(device), weight_format("bf16", arch), kv_format(kv, arch), Parallel(tp=tp), **given)
    return plan_pool(arch, shape)


@pytest.mark.parametrize(("model", "kv", "tp", "order"), FAMILIES)
def test_planned_bytes_are_the_layouts(model: str, kv: str, tp: int, order: PageOrder) -> None:
    for plan in (pool(model, "bf16", tp), pool(model, kv, tp)):
        assert page_layout(plan).page_bytes == plan.page_bytes
    assert page_layout(pool(model, kv, tp)).order is order
    assert page_layout(pool(model, kv, tp)).dtype is PageDtype.E4M3


@pytest.mark.parametrize(("model", "kv", "tp", "order"), FAMILIES)
def test_pages_of_the_family_are_sealed_moved_and_opened(model: str, kv: str, tp: int, order: PageOrder) -> None:
    source = page_layout(pool(model, "bf16", tp, layers=LAYERS))
    wire = page_layout(pool(model, kv, tp, layers=LAYERS))
    torch.manual_seed(0)
    held = [torch.randn(source.cache_shape(BLOCKS)).to(torch.bfloat16) for _ in range(LAYERS)]
    keys = [index_keys(region) for region in source.further_regions for _ in range(region.num_layers)]
    out = torch.zeros(3, wire.page_bytes, dtype=torch.uint8)
    digests = seal_pages(held + keys, source, wire, [4, 0, 2], out, BINDING, 0)
    caches = [torch.zeros(wire.cache_shape(BLOCKS), dtype=torch.uint8) for _ in range(LAYERS)]
    caches += [torch.zeros_like(each) for each in keys]
    assert open_pages(out, wire, digests, caches, wire, [1, 3, 0], BINDING, 0).all()
    for before, after in zip(keys, caches[LAYERS:], strict=True):
        assert torch.equal(after[[1, 3, 0]], before[[4, 0, 2]]) and not after[[2, 4]].any()
    for before, after in zip(held, caches[:LAYERS], strict=True):
        rows = readable(after, wire)[[1, 3, 0]]
        wanted = before[[4, 0, 2]].float()
        # e4m3 keeps 3 mantissa bits, and ds_mla scales tiles of 128 first: within a sixteenth of the row's largest.
        assert (rows - wanted).abs().max() <= wanted.abs().max() / 16
        assert not readable(after, wire)[[2, 4]].any()
    out[1, wire.page_bytes // 2] ^= 1
    again = open_pages(out, wire, digests, caches, wire, [1, 3, 0], BINDING, 0)
    assert again.tolist() == [True, False, True]


def index_keys(region: PageLayout) -> torch.Tensor:
    return torch.randint(1, 256, region.cache_shape(BLOCKS)).to(torch.uint8)


def readable(cache: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The cache's values as float32, read by the format's own definition."""
    if layout.order is not PageOrder.FP8_DS_MLA:
        return cache.view(torch.float8_e4m3fn).float()
    latent = cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = cache[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=-1)
    rope = cache[..., 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([latent * scales, rope], dim=-1)


def test_cpu_pools_have_the_cpu_order_and_its_rounding() -> None:
    plan = pool("smollm2-135m-instruct", "fp8", device="CPU", kv_space_gib=1.0, block_tokens=32)
    layout = page_layout(plan)
    assert (layout.order, str(layout.rounding)) == (PageOrder.CPU_VEC, "truncate")
    assert layout.page_bytes == plan.page_bytes == 32 * 11_520


def test_pairs_that_cannot_be_handed_over_are_refused() -> None:
    check_pair(pool("glm-5.2", "bf16", 8), pool("glm-5.2", "fp8", 8))
    with pytest.raises(PlanError, match="cannot become bfloat16"):
        check_pair(pool("kimi-k2.6", "fp8", 8), pool("kimi-k2.6", "bf16", 8))
    with pytest.raises(PlanError, match="tp 4 on prefill and 8 on decode"):
        check_pair(pool("glm-4.5", "bf16", 4), pool("glm-4.5", "fp8", 8))
    with pytest.raises(PlanError, match="num_layers"):
        check_pair(pool("glm-4.5", "bf16", 8), pool("glm-4.5-air", "fp8", 8))
