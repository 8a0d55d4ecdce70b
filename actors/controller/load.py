"""What each pool has to do now, against what one replica gives. Pure.

Decode: KV blocks that running requests will have taken at their expected ends plus what waits in the queue, or sequence
slots, whichever is shorter. Prefill: prompt tokens that are not computed yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.controller.capacity import decode_pressure
from actors.controller.forecast import SECOND, Forecast, blocks_for
from actors.controller.queue import AdmissionQueue
from actors.controller.registry import Registry, Replica
from actors.messages import Role
from cluster.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class Load:
    """One pool at one moment, in its own unit: blocks or sequence slots (decode), or prompt tokens (prefill)."""

    demand: float  # what is or will be needed
    queued: float  # part of `demand` that has no place yet
    per_replica: float  # what one replica gives
    unit: str
    idle: bool  # no request runs or waits
    growth: float = 0.0  # of `demand`, a second, beyond what chance explains
    steady: float = 0.0  # what the present inflow holds in the long run
    holds: float = 0.0  # all replicas that are there and the queue, filled to its bound
    blocks: float = 0.0  # of decode: `demand` in blocks, whatever its unit
    blocks_each: float = 1.0
    cold: int = 0  # replicas there, not warm yet
    stale: int = 0


def _warm(replicas: Iterable[Replica], warm_ns: int, now_ns: int) -> tuple[list[Replica], int]:
    there = [r for r in replicas if not r.fenced and not r.draining_since_ns]
    warm = [r for r in there if r.ready_ns and now_ns - r.joined_ns >= warm_ns]
    return warm, len(there) - len(warm)


def decode_load(
    registry: Registry,
    room: AdmissionQueue,
    forecast: Forecast,
    spec: ClusterSpec,
    blocks_seen: float,
    now_ns: int,
) -> Load:
    """In the dimension that is shorter, blocks or sequence slots. `blocks_seen`: of a replica, while there is none.

    Before any was seen, all that waits needs one replica.
    """
    everyone = [r for r in registry.replicas.values() if r.role is Role.DECODE]
    warm, cold = _warm(everyone, int(spec.scaling.warm_up_s * SECOND), now_ns)
    there = [r for r in everyone if not r.fenced]
    requests = [waiting.request for waiting in room]
    if there:
        pressure = decode_pressure(registry, requests, forecast)
        blocks, blocks_queued = pressure.blocks, pressure.blocks_queued
        blocks_each = sum(r.announcement.blocks_total for r in there) / len(there)
        slots, slots_queued = pressure.slots, pressure.slots_queued
        slots_each = sum(r.slots for r in there) / len(there)
    else:
        size, blocks, slots, slots_each = (
            spec.pools.decode.block_tokens,
            0.0,
            0.0,
            float(spec.pools.decode.max_num_seqs),
        )
        blocks_queued = float(sum(blocks_for(each, forecast.output_tokens(each), size) for each in requests))
        slots_queued = float(sum(min(each.num_sequences, slots_each) for each in requests))
        middle = (spec.scaling.target_low + spec.scaling.target_high) / 2
        blocks_each = blocks_seen or max(1.0, blocks_queued / middle)
    blocks, slots = blocks + blocks_queued, slots + slots_queued
    by_slots = slots / slots_each > blocks / blocks_each
    each = slots_each if by_slots else blocks_each
    live = any(r.tickets for r in there) or any(r.occupancy.running for r in there)
    return Load(
        demand=slots if by_slots else blocks,
        queued=slots_queued if by_slots else blocks_queued,
        per_replica=each,
        unit="sequence slots" if by_slots else "KV blocks",
        idle=not live and not requests,
        cold=cold,
        stale=sum(r.stale for r in warm),
        holds=(len(there) + room.size_max * forecast.mean_blocks / blocks_each) * each,
        blocks=blocks,
        blocks_each=blocks_each,
    )


def prefill_load(registry: Registry, room: AdmissionQueue, forecast: Forecast, spec: ClusterSpec, now_ns: int) -> Load:
    there = [r for r in registry.replicas.values() if r.role is Role.PREFILL and not r.fenced]
    _, cold = _warm(there, int(spec.scaling.warm_up_s * SECOND), now_ns)
    per_replica = float(spec.scaling.prefill_queue_tokens)
    alone = spec.admission.local_prefill_max_tokens
    if alone is None:
        streams = [len(r.tickets) for r in registry.replicas.values() if r.role is Role.DECODE and not r.fenced]
        alone = forecast.local_prefill_tokens(sum(streams) // max(1, len(streams)))
    queued = float(
        sum(w.request.num_prompt_tokens for w in room if w.request.disaggregate and w.request.num_prompt_tokens > alone)
    )
    if not there:  # what decode computes now, by the forecast, only because there is no prefill replica
        queued += sum(
            live.request.num_prompt_tokens
            for live in registry.tickets.values()
            if live.request.disaggregate
            and live.request.num_prompt_tokens > alone
            and now_ns - live.placed_ns < forecast.prompt_token_ns * live.request.num_prompt_tokens
        )
    demand = sum(max(r.inflight_tokens, r.occupancy.waiting_prompt_tokens) for r in there)
    return Load(
        demand=demand + queued,
        queued=queued,
        per_replica=per_replica,
        unit="prompt tokens",
        idle=demand == 0 and queued == 0,
        cold=cold,
        stale=sum(r.stale for r in there),
    )
