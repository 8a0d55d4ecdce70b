"""The planner against figures published for Kimi K2.6 and GLM 5.2 on H200 nodes (TP 8), which no machine here can run.

One number that was not published, the share of HBM the engine may use, is read off one figure (K2.6, BF16); every
other row of memory is then a prediction. Where one is more than 0.5 % away its `why` says where the difference is.
Rates come from the roofline, whose constants are fitted to seven of the ten published ones; three are predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from cluster.plan.architecture import architecture
from cluster.plan.calibrate import least_squares
from cluster.plan.facts import GIB, gpu, model_config
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, implied_reserve, plan_pool
from cluster.plan.roofline import Constants, Roofline
from cluster.plan.sharding import Parallel

# Tokens of a request in the published runs: 686,000 / 32 and 1,370,000 / 64 are both about this.
REQUEST_TOKENS = 21_400
# The share of those that requests held on average while the rates were measured. Not published, so fitted with the
# constants: the cache was full of reservations, not of tokens. GLM 5.2's workload is taken to be the same.
CONTEXT_SHARE = 0.1747
PROMPT_TOKENS, OUTPUT_TOKENS = 8192, 1000
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


@cache
def _line(model: str, weights: str, kv: str) -> Roofline:
    plan = published_pool(model, weights, kv)
    return Roofline.of(plan.arch, plan.settings)


@dataclass(frozen=True)
class Rate:
    """A published rate of 8 H200 at TP 8, tokens a second; `batch` 0 is prefill. `fitted`: a constant was fitted to
    it; the others are predicted."""

    model: str
    weights: str
    kv: str
    batch: int
    rate: float
    fitted: bool

    def planned(self, constants: Constants | None = None, context_share: float = CONTEXT_SHARE) -> float:
        line = _line(self.model, self.weights, self.kv)
        if constants is not None:
            line = replace(line, constants=constants)
        if not self.batch:
            return line.prefill_tokens_per_second(PROMPT_TOKENS)
        return line.decode_tokens_per_second(self.batch, int(self.batch * REQUEST_TOKENS * context_share))


RATES = (
    Rate("kimi-k2.6", "int4", "bf16", 1, 137, fitted=True),
    Rate("kimi-k2.6", "int4", "fp8", 1, 125, fitted=True),
    Rate("kimi-k2.6", "int4", "bf16", 32, 1555, fitted=True),
    Rate("kimi-k2.6", "int4", "fp8", 64, 2192, fitted=True),
    Rate("glm-5.2", "int4", "fp8", 1, 92, fitted=False),
    Rate("glm-5.2", "fp8", "fp8", 1, 60, fitted=True),
    Rate("glm-5.2", "int4", "fp8", 64, 1933, fitted=False),
    Rate("glm-5.2", "fp8", "fp8", 64, 1672, fitted=False),
    Rate("glm-5.2", "fp8", "bf16", 0, 10_160, fitted=True),
    Rate("glm-5.2", "int4", "bf16", 0, 8_660, fitted=True),
)
FREE = (
    "layer_overhead_us",
    "request_overhead_us",
    "fp8_kv_us",
    "fp8_experts_us",
    "prefill_efficiency",
    "fp8_prefill_gain",
)


@dataclass(frozen=True)
class Ordering:
    """Which of two settings is ahead, and by how much: `published` and `planned` are ratios of rates."""

    what: str
    published: float
    planned: float
    predicted: str


def fit() -> dict[str, float]:
    """The constants and the context share that the fitted rates give: what the defaults were rounded from."""

    def residuals(values: dict[str, float]) -> list[float]:
        constants = Constants(**{name: values[name] for name in FREE})
        return [math.log(rate.planned(constants, values["context_share"]) / rate.rate) for rate in RATES if rate.fitted]

    start = {name: getattr(Constants(), name) for name in FREE}
    return least_squares(start | {"context_share": CONTEXT_SHARE}, residuals)


def orderings() -> list[Ordering]:
    """The five published orderings."""
    bf16_1, fp8_1, bf16_32, fp8_64, int4_1, fp8w_1, int4_64, fp8w_64, fp8_prefill, int4_prefill = RATES
    pairs = (
        ("K2.6 alone: BF16 ahead of FP8 KV", bf16_1, fp8_1),
        ("K2.6 full: FP8 at 64 ahead of BF16 KV at 32", fp8_64, bf16_32),
        ("GLM 5.2 decode alone: INT4 ahead of FP8", int4_1, fp8w_1),
        ("GLM 5.2 decode at 64: INT4 ahead of FP8", int4_64, fp8w_64),
        ("GLM 5.2 prefill: FP8 ahead of INT4", fp8_prefill, int4_prefill),
    )
    words = {0: "predicted", 1: "one side fitted, the other predicted", 2: "both sides fitted"}
    return [
        Ordering(what, a.rate / b.rate, a.planned() / b.planned(), words[a.fitted + b.fitted]) for what, a, b in pairs
    ]


def cost_changes() -> list[Ordering]:
    """Cost with an FP8 cache over cost with a BF16 one, full pools, GPU price and pool sizes the same."""
    bf16, fp8 = (next(r for r in RATES if (r.kv, r.batch) == key) for key in (("bf16", 32), ("fp8", 64)))
    decode = bf16.planned() / fp8.planned()
    prompt = 1 / _line("kimi-k2.6", "int4", "bf16").prefill_tokens_per_second(PROMPT_TOKENS)
    whole = [PROMPT_TOKENS * prompt + OUTPUT_TOKENS / rate.planned() for rate in (bf16, fp8)]
    return [
        Ordering("cost of an output token, decode's GPUs alone", 0.70, decode, "both sides fitted"),
        Ordering(
            f"cost of a request of {PROMPT_TOKENS:,} + {OUTPUT_TOKENS:,} tokens, prefill's GPUs too",
            0.70,
            whole[1] / whole[0],
            "prefill is not cheaper",
        ),
    ]


def _rates() -> list[Published]:
    return [
        Published(
            f"{r.model} {r.weights} " + (f"decode, {r.kv} KV, {r.batch} requests" if r.batch else "prefill"),
            r.rate,
            r.planned(),
            "tok/s",
            "fitted" if r.fitted else "predicted",
        )
        for r in RATES
    ]
