"""The planner against figures published for Kimi K2.6 and GLM 5.2 on H200 nodes (TP 8), which no machine here can run.

One number that was not published, the share of HBM the engine may use, is read off one figure (K2.6, BF16); every
other row is then a prediction. Where a row is more than 0.5 % away its `why` says where the difference is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.plan.architecture import architecture
from cluster.plan.facts import GIB, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, implied_reserve, plan_pool
from cluster.plan.roofline import Roofline
from cluster.plan.sharding import Parallel

# Tokens of a request in the published runs: 686,000 / 32 and 1,370,000 / 64 are both about this.
REQUEST_TOKENS = 21_400
CLOSE = 0.005


@dataclass(frozen=True)
class Published:
    what: str
    published: float
    planned: float
    unit: str
    why: str

    @property
    def off(self) -> float:
        return self.planned / self.published - 1


def published_pool(model: str, weights: str, kv: str, utilization: float | None = None, mtp: bool = False) -> PoolPlan:
    """A pool of the published system: one replica of 8 H200 at TP 8. With `utilization` given, that share of HBM is
    weights and KV and nothing else is subtracted."""
    name, config, _ = model_config(model)
    arch = architecture(config, name)
    settings = PoolSettings(
        gpu("H200"), weight_format(weights, arch), kv_format(kv, arch), Parallel(tp=8), context=REQUEST_TOKENS, mtp=mtp
    )
    if utilization is not None:
        settings = replace(settings, utilization=utilization, activation_gib=0.0, runtime_gib=0.0)
    return plan_pool(arch, settings)


def published_rows() -> list[Published]:
    """Every published figure the planner has an answer to."""
    bf16 = published_pool("kimi-k2.6", "int4", "bf16")
    reserve, share = implied_reserve(bf16, 686_000)
    share = round(share, 3)

    def tokens(model: str, kv: str, mtp: bool = False) -> float:
        return published_pool(model, "int4", kv, share, mtp).kv_tokens

    glm_fp8, glm_int4 = (published_pool("glm-5.2", weights, "fp8") for weights in ("fp8", "int4"))
    glm_reserve, glm_share = implied_reserve(glm_int4, 1_180_000)
    indexers = (
        "indexers of the 57 layers that share a selection are not in the checkpoint; the published figure is rounded"
    )
    return [
        Published(
            "K2.6 KV tokens, BF16",
            686_000,
            tokens("kimi-k2.6", "bf16"),
            "tokens",
            f"by choice: utilization {share:g} is read off this figure, {reserve:.1f} GiB a GPU for all the rest",
        ),
        Published(
            "K2.6 KV tokens, FP8", 1_370_000, tokens("kimi-k2.6", "fp8"), "tokens", "predicted from the row above"
        ),
        Published("GLM 5.2 checkpoint, FP8", 705, glm_fp8.checkpoint_bytes / GIB, "GiB", indexers),
        Published("GLM 5.2 checkpoint, INT4", 421, glm_int4.checkpoint_bytes / GIB, "GiB", indexers),
        Published("GLM 5.2 share of a GPU, FP8", 88, glm_fp8.even_share_bytes / GIB, "GiB", _resident(glm_fp8)),
        Published(
            "GLM 5.2 share of a GPU, INT4",
            52,
            glm_int4.even_share_bytes / GIB,
            "GiB",
            f"published without its fraction: 421 / 8 is 52.6; {_resident(glm_int4)}",
        ),
        Published(
            "GLM 5.2 KV tokens, INT4 + FP8 KV",
            1_180_000,
            tokens("glm-5.2", "fp8", mtp=True),
            "tokens",
            f"with K2.6's utilization and the prediction layer loaded; without it {tokens('glm-5.2', 'fp8'):,.0f}, and "
            f"1.18M exactly means utilization {glm_share:.3f}, {glm_reserve:.1f} GiB a GPU for the rest",
        ),
        *_rates(),
    ]


def _resident(plan: PoolPlan) -> str:
    held = plan.tightest.held
    return (
        f"a GPU really holds {plan.resident_bytes / GIB:.1f}: +{held.replicated / GIB:.1f} replicated, "
        f"+{held.absorbed / GIB:.1f} absorbed copies, prediction layer not loaded"
    )


_DECODE = (
    ("kimi-k2.6", "int4", "bf16", 1, 137),
    ("kimi-k2.6", "int4", "fp8", 1, 125),
    ("kimi-k2.6", "int4", "bf16", 32, 1555),
    ("kimi-k2.6", "int4", "fp8", 64, 2192),
    ("glm-5.2", "int4", "fp8", 1, 92),
    ("glm-5.2", "fp8", "fp8", 1, 60),
    ("glm-5.2", "int4", "fp8", 64, 1933),
    ("glm-5.2", "fp8", "fp8", 64, 1672),
)


def _rates() -> list[Published]:
    rows = []
    for model, weights, kv, batch, rate in _DECODE:
        plan = published_pool(model, weights, kv)
        line = Roofline.of(plan.arch, plan.settings)
        why = "the overhead a layer is fitted to these" if model == "kimi-k2.6" else "not fitted: the roofline's error"
        planned = line.decode_tokens_per_second(batch, batch * REQUEST_TOKENS)
        rows.append(Published(f"{model} {weights} decode, {kv} KV, {batch} requests", rate, planned, "tok/s", why))
    for weights, rate in (("fp8", 10_160), ("int4", 8_660)):
        plan = published_pool("glm-5.2", weights, "bf16")
        planned = Roofline.of(plan.arch, plan.settings).prefill_tokens_per_second(8192)
        rows.append(
            Published(f"glm-5.2 {weights} prefill", rate, planned, "tok/s", "the prefill efficiency is fitted to these")
        )
    return rows
