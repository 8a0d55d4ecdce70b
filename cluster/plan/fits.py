"""Does it fit, and if not, which three nearest settings would.

Nearest is counted in steps away from what was asked: a cheaper cache format, another weight format, twice the GPUs,
half the requests and so on each cost about one. Every proposal is itself planned, so what is named really fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cluster.plan.facts import GIB, PlanError, gpu, known_gpus
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.memory import PoolPlan, PoolSettings, plan_pool

MOST_CHANGES = 3
LEAST_CONTEXT = 256
MOST_UTILIZATION = 0.95


class DoesNotFit(ValueError):
    """The pool cannot run as asked. `problems` says why, `nearest` holds settings that would."""

    def __init__(self, pool: str, problems: tuple[str, ...], nearest: list[Alternative]) -> None:
        self.problems = problems
        self.nearest = nearest
        lines = [f"{pool} does not fit: {'; '.join(problems)}."]
        if nearest:
            lines.append("Nearest settings that fit:")
            lines += [f"  {number}. {entry.describe()}" for number, entry in enumerate(nearest, 1)]
        else:
            lines.append("No change of format, parallelism, context or GPU known here makes it fit.")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Alternative:
    """Settings that fit: what to change (`{"kv": "bf16 -> fp8"}`) and the plan they give."""

    changes: dict[str, str]
    plan: PoolPlan

    def describe(self) -> str:
        changes = ", ".join(f"{name} {change}" for name, change in self.changes.items())
        plan = self.plan
        return (
            f"{changes}: {plan.gpus} GPU{'s' if plan.gpus != 1 else ''}, {plan.kv_tokens:,} KV tokens, "
            f"{plan.max_requests:,} requests of {plan.settings.context:,} tokens"
        )


@dataclass(frozen=True)
class _Move:
    field: str
    change: str
    cost: float
    apply: Callable[[PoolSettings], PoolSettings]


def check_fit(plan: PoolPlan, pool: str = "pool") -> None:
    """Raises DoesNotFit with the three nearest settings that would; returns when the plan fits."""
    if plan.problems:
        raise DoesNotFit(pool, plan.problems, nearest_that_fits(plan))


def nearest_that_fits(plan: PoolPlan, count: int = 3) -> list[Alternative]:
    """Up to `count` settings that fit, nearest first, no one a superset of another's changes."""
    moves = list(_moves(plan))
    sets = [
        group
        for size in range(1, MOST_CHANGES + 1)
        for group in itertools.combinations(moves, size)
        if len({move.field for move in group}) == size
    ]
    sets.sort(key=_base_cost)
    best: list[tuple[float, frozenset[str], Alternative]] = []
    for group in sets:
        fields = frozenset(move.field for move in group)
        if len(best) >= count and _base_cost(group) >= best[count - 1][0]:
            break
        if any(seen <= fields for _, seen, _ in best):
            continue
        alternative = _apply(plan, group)
        if alternative:
            best.append((_base_cost(group) + _given_up(plan, alternative), fields, alternative))
            best.sort(key=lambda entry: entry[0])
    return [alternative for _, _, alternative in best[:count]]


def _base_cost(group: tuple[_Move, ...]) -> float:
    return sum(move.cost for move in group) + 0.25 * (len(group) - 1)


def _given_up(plan: PoolPlan, alternative: Alternative) -> float:
    """Halvings of context and of concurrency, and doublings of CPU space: how far a computed limit had to move."""
    old, new = plan.settings, alternative.plan.settings
    halved = math.log2(old.context / new.context) + math.log2(old.concurrency / new.concurrency)
    return halved + math.log2((new.kv_space_gib or 1.0) / (old.kv_space_gib or 1.0))


def _apply(plan: PoolPlan, group: tuple[_Move, ...]) -> Alternative | None:
    settings = plan.settings
    try:
        # Limits that are computed (context, concurrency, CPU space) come after the moves that change the pool.
        for move in sorted(group, key=lambda move: move.field in _COMPUTED):
            settings = move.apply(settings)
        changed = plan_pool(plan.arch, settings)
    except PlanError:
        return None
    if changed.problems:
        return None
    changes = {
        move.field: move.change or f"{getattr(plan.settings, move.field):,g} -> {getattr(settings, move.field):,g}"
        for move in group
    }
    return Alternative(changes, changed)


_COMPUTED = ("context", "concurrency", "kv_space_gib")


def _moves(plan: PoolPlan) -> Iterator[_Move]:
    s, arch = plan.settings, plan.arch
    if s.kv == "bf16":
        kv = kv_format("fp8", arch)
        yield _Move("kv", f"bf16 -> {kv}", 1.0, lambda now: replace(now, kv=kv))
    yield _Move("context", "", 1.3, lambda now: _shorter(plan, now))
    yield _Move("concurrency", "", 1.3, lambda now: _fewer(plan, now))
    if s.gpu.is_cpu:
        yield _Move("kv_space_gib", "", 0.5, lambda now: _more_space(plan, now))
        return
    if s.kv_space_gib is None and s.utilization < MOST_UTILIZATION:
        change = f"{s.utilization:g} -> {MOST_UTILIZATION:g}"
        yield _Move("utilization", change, 0.8, lambda now: replace(now, utilization=MOST_UTILIZATION))
    ladder = {"fp8": 1.2, "fp8_channel": 1.3, "int4": 1.8}
    smaller = ladder if s.weights.name == "bf16" else {"int4": 1.2} if s.weights.name.startswith("fp8") else {}
    for name, cost in smaller.items():
        weights = replace(weight_format(name, arch), ignore=s.weights.ignore)
        yield _Move("weights", f"{s.weights.name} -> {name}", cost, _with(weights=weights))
    yield from _parallel_moves(s, arch.mla is not None, arch.moe is not None)
    for name in known_gpus():
        bigger = gpu(name) if name.lower() != "cpu" else s.gpu
        if bigger.hbm_gib > s.gpu.hbm_gib:
            # Other hardware is a bigger step than other settings.
            cost = 2.0 + 0.5 * math.log2(bigger.hbm_gib / s.gpu.hbm_gib)
            yield _Move("gpu", f"{s.gpu.name} -> {name}", cost, _with(gpu=bigger))


def _parallel_moves(s: PoolSettings, latent: bool, experts: bool) -> Iterator[_Move]:
    for doublings in (1, 2, 3, 4):
        tp, pp, replicas = s.parallel.tp << doublings, s.parallel.pp << doublings, s.replicas << doublings
        # Every doubling costs money, so a second one is dearer than the first.
        cost = doublings**1.3
        yield _Move("tp", f"{s.parallel.tp} -> {tp}", cost, _parallel(tp=tp))
        yield _Move("pp", f"{s.parallel.pp} -> {pp}", 0.6 + cost, _parallel(pp=pp))
        yield _Move("replicas", f"{s.replicas} -> {replicas}", 0.1 + cost, _with(replicas=replicas))
    if experts and not s.parallel.ep and s.parallel.expert_ranks > 1:
        # Costs nothing by itself; it is what lets narrow experts keep their FP8 blocks or INT4 groups whole.
        yield _Move("ep", "off -> on", 0.3, _parallel(ep=True))
    if latent and s.parallel.dp == 1 and s.parallel.tp > 1:
        # The same GPUs: a rank then holds only its own requests' rows instead of a copy of everybody's.
        change = f"TP {s.parallel.tp} -> DP {s.parallel.tp}" + (" with EP" if experts else "")
        yield _Move("dp_attention", change, 1.4, _parallel(tp=1, dp=s.parallel.tp, ep=experts))


def _with(**changes: object) -> Callable[[PoolSettings], PoolSettings]:
    return lambda now: replace(now, **changes)  # type: ignore[arg-type]


def _parallel(**changes: int) -> Callable[[PoolSettings], PoolSettings]:
    return lambda now: replace(now, parallel=replace(now.parallel, **changes))  # type: ignore[arg-type]


def _per_rank(settings: PoolSettings) -> int:
    return -(-settings.concurrency // (settings.parallel.dp * settings.replicas))


def _shorter(plan: PoolPlan, now: PoolSettings) -> PoolSettings:
    """The longest context at which the asked number of requests fits."""
    pages = max(0, plan_pool(plan.arch, now).blocks - 1) // _per_rank(now)
    context = min(pages * now.block_tokens, plan.arch.context, now.context)
    if context < LEAST_CONTEXT:
        raise PlanError(f"context would be {context}")
    return replace(now, context=context)


def _fewer(plan: PoolPlan, now: PoolSettings) -> PoolSettings:
    """As many requests of the asked context as fit."""
    requests = plan_pool(plan.arch, now).requests_of(now.context)
    if requests < 1:
        raise PlanError("not one request fits")
    return replace(now, concurrency=min(requests, now.concurrency))


def _more_space(plan: PoolPlan, now: PoolSettings) -> PoolSettings:
    """Whole GiB of KV space that hold the asked requests and the page the engine keeps."""
    shaped = plan_pool(plan.arch, now)
    pages = 1 + _per_rank(now) * -(-now.context // now.block_tokens)
    return replace(now, kv_space_gib=float(-(-pages * shaped.tightest.page_bytes // GIB)))
