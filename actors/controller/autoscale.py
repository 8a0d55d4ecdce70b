"""How many replicas each pool should have. Pure: inputs and effects are values, and the reason is part of the effect.

What each pool has to do is `load.py`'s, against what all replicas give that are there or on their way. Added is what
a spike of demand will have brought by the time that a replica ordered now is up, at most what the queue can hold; what
counts as a spike, and how fast it grows, is decided in `spike.py`.

Every decision starts from what the platform holds (`pool_sizes.py`); while that is not known, none is made.

Between `target_low` and `target_high` nothing happens; outside, the pool goes to the middle of the band. Going up needs
`up_hold_s` of pressure, or a spike, which chance does not explain; going down needs `down_hold_s`, or a
replica's start-up time, without any, and keeps what the inflow of the last `warm_up_s` holds in the long run. A replica
is cold for `warm_up_s` after it joined; its coming capacity counts, so that the same capacity is not ordered twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from actors.controller.forecast import SECOND, Forecast
from actors.controller.journal import Tracked, TrackedDeque, TrackedDict
from actors.controller.load import Load, decode_load, prefill_load
from actors.controller.pool_sizes import PoolSizes
from actors.controller.queue import AdmissionQueue
from actors.controller.registry import Registry
from actors.controller.spike import Trend
from actors.messages import Role, ScaleDecision
from cluster.spec import ClusterSpec, PoolSpec, ScalingSpec

EVERY_NS = SECOND // 2
REMEMBERED = 50


@dataclass(slots=True)
class _Track(Tracked):
    """A pool's recent pressures and since when it has been outside its band."""

    samples: TrackedDeque[tuple[int, float, bool]] = field(
        default_factory=TrackedDeque
    )  # (when, demand in replicas, idle)
    above_since_ns: int = 0
    grown_ns: int | None = None  # when it was last scaled up
    held_until_ns: int = 0
    by_hand_until_ns: int = 0
    reason: str = ""

    def add(self, now_ns: int, replicas: float, idle: bool, keep_ns: int) -> None:
        self.samples.append((now_ns, replicas, idle))
        while self.samples and self.samples[0][0] < now_ns - keep_ns:
            self.samples.popleft()

    def mean(self, now_ns: int, over_ns: int) -> float:
        recent = [need for when, need, _ in self.samples if when >= now_ns - over_ns]
        return sum(recent) / len(recent)

    def worst(self) -> float:
        return max(need for _, need, _ in self.samples)

    def covers(self, now_ns: int, over_ns: int) -> bool:
        return bool(self.samples) and self.samples[0][0] <= now_ns - over_ns + EVERY_NS

    def was_idle(self) -> bool:
        return all(idle for _, _, idle in self.samples)


class Autoscaler(Tracked):
    """`fresh`: the application starts with this life of the controller, so its pools get the sizes of the spec."""

    def __init__(self, spec: ClusterSpec, now_ns: int, fresh: bool = True) -> None:
        self._spec = spec
        self._scaling: ScalingSpec = spec.scaling
        self.sizes = PoolSizes({role: self._pool(role).replicas for role in self._roles} if fresh else None)
        self._tracks = {Role.PREFILL: _Track(), Role.DECODE: _Track()}
        self._next_ns = now_ns
        self._trend = Trend()
        self._blocks = 0.0  # of a decode replica, as last seen: also known while there is none
        self.decisions: TrackedDeque[tuple[int, ScaleDecision]] = TrackedDeque(maxlen=REMEMBERED)
        # How many since the start, by (pool, direction, cause); see `cluster.metrics`.
        self.decided: TrackedDict[tuple[Role, str, str], int] = TrackedDict()

    def configure(self, spec: ClusterSpec) -> None:
        """A pool whose `replicas` has changed gets that size; else the platform keeps what it has."""
        before = {role: self._pool(role).replicas for role in Role}
        self._spec, self._scaling = spec, spec.scaling
        for role in self._roles:
            if (replicas := self._pool(role).replicas) != before[role]:
                self.sizes.want(role, replicas)

    def reason(self, pool: Role) -> str:
        why = self._tracks[pool].reason or ("off" if self._scaling.mode == "off" else "nothing decided yet")
        return f"{self.sizes.unplaced_text(pool)}; {why}" if self.sizes.unplaced(pool) else why

    def start_up_s(self, role: Role) -> float:
        """Seconds from the order of a replica to its first ticket: as seen, or `warm_up_s` before any was."""
        return self.sizes.start_up_ns(role) / SECOND or self._scaling.warm_up_s

    def arriving(self, now_ns: int) -> list[tuple[int, float, int]]:
        """Decode replicas on their way: (when each should take its first ticket, its blocks, its slots), soonest first.

        Of a pool at zero it is the one that the next request wakes.
        """
        if not self._blocks:
            return []  # no decode replica was ever seen
        took_ns = int(self.start_up_s(Role.DECODE) * SECOND)
        times = self.sizes.arriving(Role.DECODE, now_ns, took_ns)
        asleep = self.sizes.target(Role.DECODE, now_ns) == 0 and self._scaling.mode != "off"
        if asleep and not times and not self.sizes.unplaced(Role.DECODE):
            times = [now_ns + took_ns]
        return [(when, self._blocks, self._pool(Role.DECODE).max_num_seqs) for when in times]

    def set_by_hand(self, role: Role, target: int, hold_s: float, now_ns: int) -> str:
        """In every mode; nothing is decided for that pool until the hold ends. Returns why not, "" when taken."""
        low, high = self._pool(role).bounds
        if role not in self._roles:
            return f"there is no {role} pool: set pools.{role}.replicas or max_replicas and deploy"
        if not low <= target <= high:
            return f"{target} {role} replicas are outside pools.{role}.min_replicas {low} .. max_replicas {high}"
        current = self.sizes.target(role, now_ns)
        if current is None:
            return "the platform has not said for some seconds how many replicas it holds; try again"
        if target > current and target > (fits := self._affordable(role, now_ns)):
            return f"scaling.gpu_budget {self._scaling.gpu_budget} allows {fits} {role} replicas, not {target}"
        hold_ns = int(hold_s * SECOND)
        self._tracks[role].by_hand_until_ns = now_ns + hold_ns
        why = f"set by hand, held for {hold_s:g} s" if self._scaling.mode != "off" else "set by hand"
        self._tracks[role].reason = why
        self.sizes.want(role, target)
        if target != current:
            self._record(
                ScaleDecision(pool=role, current=current, target=target, reason=why, hold_until_ns=now_ns + hold_ns),
                "by_hand",
                now_ns,
            )
        return ""

    def decide(self, registry: Registry, room: AdmissionQueue, forecast: Forecast, now_ns: int) -> list[ScaleDecision]:
        if self._scaling.mode == "off" or now_ns < self._next_ns:
            return []
        self._next_ns = now_ns + EVERY_NS
        decode = decode_load(registry, room, forecast, self._spec, self._blocks, now_ns)
        look_ns, warm_ns = int(self._scaling.look_back_s * SECOND), int(self._scaling.warm_up_s * SECOND)
        ahead_ns = int(self.start_up_s(Role.DECODE) * SECOND)
        self._trend.add(forecast, decode.blocks, look_ns, warm_ns, ahead_ns, now_ns)
        unit = decode.per_replica / decode.blocks_each
        decode = replace(decode, growth=self._trend.growth * unit, steady=self._trend.steady * unit)
        if any(r.role is Role.DECODE for r in registry.replicas.values()):
            self._blocks = decode.blocks_each
        loads = {Role.DECODE: decode, Role.PREFILL: prefill_load(registry, room, forecast, self._spec, now_ns)}
        unknown = [role for role in self._roles if self.sizes.target(role, now_ns) is None]
        for role in unknown:
            self._tracks[role].reason = "the platform has not said how many replicas it holds: nothing is decided"
        wishes = {} if unknown else {role: self._wish(role, loads[role], now_ns) for role in self._roles}
        return self._within_budget(wishes, now_ns)

    # -- one pool

    def _pool(self, role: Role) -> PoolSpec:
        return self._spec.pools.decode if role is Role.DECODE else self._spec.pools.prefill

    @property
    def _roles(self) -> tuple[Role, ...]:
        """Of the pools that are deployed. Decode holds what has been paid for already: it goes first."""
        return (Role.DECODE, Role.PREFILL) if self._spec.has_prefill else (Role.DECODE,)

    def _held(self, role: Role, now_ns: int) -> int:
        """What the platform holds or is about to."""
        wanted = self.sizes.wanted(role)
        return self.sizes.target(role, now_ns) or 0 if wanted is None else wanted

    def _wish(self, role: Role, load: Load, now_ns: int) -> tuple[int, str]:
        """The target this pool wants by itself, and why."""
        scaling, track, current = self._scaling, self._tracks[role], self._held(role, now_ns)
        up_ns = int(scaling.up_hold_s * SECOND)
        # What is given up costs a start-up to get back: what was needed within that time is kept.
        down_ns = int(max(scaling.down_hold_s, self.start_up_s(role)) * SECOND)
        look_ns = int(scaling.look_back_s * SECOND)
        track.add(now_ns, load.demand / load.per_replica, load.idle, max(down_ns, look_ns))
        coming = min(load.growth * self.start_up_s(role), max(0.0, load.holds - load.demand))
        if current == 0:
            return self._wake(role, load, now_ns)
        need = track.mean(now_ns, look_ns)
        if load.queued or coming:  # no averaging of what waits or is certain to come
            need = max(need, (load.demand + coming) / load.per_replica)
        pressure = need / current
        reason = f"{load.demand:.0f} {load.unit} needed ({load.queued:.0f} of them waiting"
        reason += f", {coming:.0f} more to come" if coming else ""
        reason += f") of {load.per_replica * current:.0f}: {pressure:.0%}"
        reason += f"; {load.cold} cold" if load.cold else ""
        reason += f"; {load.stale} stale" if load.stale else ""
        if pressure > scaling.target_high:
            track.above_since_ns = track.above_since_ns or now_ns
            if not coming and now_ns - track.above_since_ns < up_ns:
                return current, f"{reason}, above {scaling.target_high:.0%}, for less than {scaling.up_hold_s:g} s"
            wanted = math.ceil(pressure * current / self._middle)
            return self._bounded(role, current, wanted, f"{reason}, above {scaling.target_high:.0%}")
        track.above_since_ns = 0
        return self._down(role, load, reason, now_ns, down_ns)

    def _wake(self, role: Role, load: Load, now_ns: int) -> tuple[int, str]:
        """From zero: decode at once, prefill when there is work for it, since decode computes the prompts meanwhile."""
        track, (low, _) = self._tracks[role], self._pool(role).bounds
        look_ns = int(self._scaling.look_back_s * SECOND)
        if role is Role.DECODE:
            if load.idle:
                return low, "idle at zero"
            return self._bounded(role, 1, max(1, math.ceil(load.demand / load.per_replica)), "woken by a request")
        need = track.mean(now_ns, look_ns)
        if need < self._scaling.target_low or not track.covers(now_ns, look_ns):
            return low, "idle at zero" if not need else f"decode computes the prompts: {need:.0%} of a replica's work"
        return max(low, 1), f"woken by {need:.0%} of a replica's work"

    def _down(self, role: Role, load: Load, reason: str, now_ns: int, down_ns: int) -> tuple[int, str]:
        track, current = self._tracks[role], self._held(role, now_ns)
        low, _ = self._pool(role).bounds
        if current <= low or not track.covers(now_ns, down_ns):
            return current, f"{reason}, held"
        if load.growth:
            return current, f"{reason}, held: demand grows"
        if track.grown_ns is not None and now_ns - track.grown_ns < self._scaling.warm_up_s * SECOND:
            return current, f"{reason}, held: what was ordered last is not warm yet"
        worst = max(track.worst(), load.steady / load.per_replica)
        if worst / current >= self._scaling.target_low:
            return current, f"{reason}, in its band"
        if current == 1:
            if low == 0 and track.was_idle():
                return 0, f"idle for {down_ns / SECOND:.0f} s"
            return 1, f"{reason}, one replica is the least while requests come"
        wanted = max(1, math.ceil(worst / self._middle))
        why = f"{reason}, never above {worst / current:.0%} in {down_ns / SECOND:.0f} s"
        return self._bounded(role, current, min(wanted, current), why)

    @property
    def _middle(self) -> float:
        return (self._scaling.target_low + self._scaling.target_high) / 2

    def _bounded(self, role: Role, current: int, wanted: int, why: str) -> tuple[int, str]:
        low, high = self._pool(role).bounds
        step = min(max(wanted, current - self._scaling.step_down_max), current + self._scaling.step_up_max)
        target = min(max(step, low), high)
        if target != wanted:
            limit = "its bounds say" if target != step else "the step limit says"
            why += f"; {wanted} wanted, {limit} {target}"
        return target, why

    # -- both pools

    def _within_budget(self, wishes: dict[Role, tuple[int, str]], now_ns: int) -> list[ScaleDecision]:
        orders = []
        for role, (wanted, why) in wishes.items():
            target, current, track = wanted, self._held(role, now_ns), self._tracks[role]
            if now_ns < track.by_hand_until_ns:
                continue
            if target > current and (fits := self._affordable(role, now_ns)) < target:
                target = max(current, fits)
                why = f"{why}; the GPU budget of {self._scaling.gpu_budget} allows {fits}"
            refused = self.sizes.refused(role, now_ns)
            track.reason = f"{refused}; {why}" if refused else why
            if target == current or now_ns < track.held_until_ns or refused or self.sizes.wanted(role) is not None:
                continue
            orders.append(self._order(role, current, target, why, now_ns))
        return orders

    def _order(self, role: Role, current: int, target: int, why: str, now_ns: int) -> ScaleDecision:
        track = self._tracks[role]
        self.sizes.want(role, target)
        track.above_since_ns = 0
        hold_s = self._scaling.up_hold_s if target > current else self._scaling.down_hold_s
        decision = ScaleDecision(
            pool=role, current=current, target=target, reason=why, hold_until_ns=now_ns + int(hold_s * SECOND)
        )
        if target < current:
            track.samples.clear()  # the next step down is earned anew
        else:
            track.grown_ns = now_ns
        if target > current:
            cause = "pressure" if current else "woken"
        else:
            cause = "low" if target else "idle"
        self._record(decision, cause, now_ns)
        return decision

    def _record(self, decision: ScaleDecision, cause: str, now_ns: int) -> None:
        self.decisions.append((now_ns, decision))
        key = (decision.pool, "up" if decision.target > decision.current else "down", cause)
        self.decided[key] = self.decided.get(key, 0) + 1

    def _affordable(self, role: Role, now_ns: int) -> int:
        """Replicas of `role` that the GPU budget allows beside the other pool's."""
        budget, each = self._scaling.gpu_budget, self._pool(role).gpus_per_replica
        if budget is None or each == 0:
            return self._pool(role).bounds[1]
        other = Role.PREFILL if role is Role.DECODE else Role.DECODE
        return (budget - self._held(other, now_ns) * self._pool(other).gpus_per_replica) // each
