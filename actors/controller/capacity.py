"""What a request takes and what a replica has left, as one vector. Pure.

Four things run out: KV blocks and sequence slots of a decode replica, staging bytes of a node, and prefill time. The
choice of a replica, the queue's forecast, `Retry-After` and scaling all take them from here. The arithmetic of one
request is `cluster.capacity`, which the planner reads as well.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from actors.controller.forecast import SECOND, Forecast, blocks_for, per_sequence, predict_occupancy
from actors.controller.registry import Registry, Replica
from actors.messages import AdmitRequest, Role
from cluster.capacity import staging_bytes

CERTAINTY = 2.0  # standard deviations of expected lengths that are kept free: 2 % chance that a full replica preempts
PREFILL_AHEAD_NS = 2 * SECOND  # a prefill replica with this much work before it takes no further prompt
ALONE_AFTER_NS = SECOND // 2  # of waiting for prefill: below, decode never computes a prompt for that reason
UNKNOWN_NS = 1 << 62  # unknown: there is no replica and none is on its way


class Short(StrEnum):
    """What there is not enough of."""

    REPLICA = "no decode replica is ready"
    BLOCKS = "the KV blocks of decode are taken"
    SLOTS = "the sequence slots of decode are taken"
    PREFILL = "prefill is busy"
    STAGING = "the staging memory is taken"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request takes of whichever replica it gets."""

    request: AdmitRequest
    prompt: int  # tokens to have in the cache before the next one can be computed
    output: int  # tokens of each sequence at its expected end
    spread: float  # standard deviation of `output`
    lasts_ns: int  # from its place to its expected end
    token_ns: float

    @classmethod
    def of(cls, request: AdmitRequest, forecast: Forecast) -> Demand:
        output, spread = forecast.output_tokens(request), forecast.spread_tokens(request)
        emitted = per_sequence(request, request.num_output_tokens)
        prompt = request.num_prompt_tokens + emitted
        lasts_ns = forecast.prefill_ns(prompt) + forecast.token_ns * max(1, output - emitted)
        return cls(request, prompt, output, spread, int(lasts_ns), forecast.token_ns)

    def sequences(self, replica: Replica) -> int:
        """That run at once; an engine starts the others when a slot is free again."""
        return min(self.request.num_sequences, replica.slots)

    def slots(self, replica: Replica) -> int:
        """That it takes: all of them, where nothing else may run beside it."""
        return replica.slots if self.request.alone else self.sequences(replica)

    def blocks(self, replica: Replica) -> int:
        return blocks_for(self.request, self.output, replica.announcement.block_tokens, self.sequences(replica))

    def variance(self, replica: Replica) -> float:
        """Of `blocks`."""
        return self.sequences(replica) * (self.spread / replica.announcement.block_tokens) ** 2

    def growth(self, replica: Replica) -> float:
        """Blocks a second."""
        return self.sequences(replica) * SECOND / (self.token_ns * replica.announcement.block_tokens)

    def staging_bytes(self, decode: Replica) -> int:
        ranks = int(decode.announcement.fingerprint.geometry.get("tensor_parallel", 1))
        return staging_bytes(self.prompt, decode.announcement.block_tokens, decode.page_bytes, ranks)


@dataclass(frozen=True, slots=True)
class Hold:
    """A place that is kept for the request whose turn is next: others may use it until then."""

    replica: Replica | None = None  # decode; None: it waits for prefill, which no other request may take
    start_ns: int = 0
    blocks: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """A request on a decode replica that has room for it; in blocks."""

    blocks: int
    at_end: int
    peak: int


def limit_of(replica: Replica, occupancy_limit: float) -> int:
    return int(replica.announcement.blocks_total * occupancy_limit)


def fit(demand: Demand, replica: Replica, limit: int, hold: Hold | None, now_ns: int) -> Fit | Short:
    """`limit`: blocks that may be promised. A request larger than that fits where nothing else is."""
    blocks, slots = min(demand.blocks(replica), limit), demand.slots(replica)
    ends_ns, margin = now_ns + demand.lasts_ns, reserve(replica.variance + demand.variance(replica))
    taken, free = blocks, replica.slots - replica.slots_taken
    if hold is not None and hold.replica is replica and ends_ns > hold.start_ns:
        taken, free = blocks + hold.blocks, free - hold.slots
    if slots > free:
        return Short.SLOTS
    peak, at_end = predict_occupancy(replica, now_ns, ends_ns, taken, demand.growth(replica))
    committed = replica.committed
    if committed and min(peak, committed + taken) + min(margin, limit - blocks) > limit:
        return Short.BLOCKS
    return Fit(blocks, at_end, peak)


def reserve(variance: float) -> int:
    """Blocks that are kept free because lengths are only expected."""
    return math.ceil(CERTAINTY * math.sqrt(variance)) if variance > 0 else 0


def earliest(demand: Demand, replica: Replica, limit: int, now_ns: int) -> int:
    """When the replica will have room for the request, if everything there ends as expected."""
    blocks, slots = min(demand.blocks(replica), limit), demand.slots(replica)
    free, free_slots, when = limit - replica.committed, replica.slots - replica.slots_taken, now_ns
    for end_ns, _, reserved, _, held in replica.ends:
        if free >= blocks and free_slots >= slots:
            break
        free, free_slots, when = free + reserved, free_slots + held, max(now_ns, end_ns)
    return when


def prefill_ahead(replica: Replica) -> int:
    """Prompt tokens that a prefill replica still has to compute, as far as we know."""
    return max(replica.inflight_tokens, replica.occupancy.waiting_prompt_tokens)


@dataclass(slots=True)
class Schedule:
    """When each request that waits will get its place, if all ends as expected and replicas are taken together."""

    starts: list[int] = field(default_factory=list)  # in the queue's order; `UNKNOWN_NS`: not foreseeable
    _blocks: float = 0
    _slots: int = 0
    _most_blocks: int = 0  # that a single replica can have
    _most_slots: int = 0
    _now_ns: int = 0
    _prefill_ns: float = 0  # when prefill will have computed everything before this request
    _prefills: int = 0
    _ends: list[tuple[int, float, int]] = field(default_factory=list)  # heap: (when, blocks, slots) given back

    @classmethod
    def of(
        cls,
        registry: Registry,
        forecast: Forecast,
        tokenizer: str,
        occupancy_limit: float,
        arriving: Iterable[tuple[int, float, int]],
        now_ns: int,
    ) -> Schedule:
        """`arriving`: (when, blocks, slots) of decode replicas on their way."""
        new = cls(_now_ns=now_ns, _ends=list(arriving))
        ahead = 0
        for replica in registry.replicas.values():
            speaks = tokenizer in ("", replica.announcement.fingerprint.tokenizer)
            if not replica.usable or not speaks:
                continue
            if replica.role is Role.PREFILL:
                new._prefills += 1
                ahead += prefill_ahead(replica)
                continue
            limit = limit_of(replica, occupancy_limit)
            free = limit - replica.committed - reserve(replica.variance)
            new._most_blocks, new._most_slots = max(new._most_blocks, limit), max(new._most_slots, replica.slots)
            new._blocks += max(0, free)
            new._slots += replica.slots - replica.slots_taken
            debt = max(0, -free)  # promised beyond its limit: its own ends pay for it, no other replica's room does
            for end_ns, _, reserved, _, slots in replica.ends:
                paid = min(debt, reserved)
                debt -= paid
                new._ends.append((end_ns, reserved - paid, slots))
        new._prefill_ns = now_ns + forecast.prefill_ns(ahead) / max(1, new._prefills)
        heapq.heapify(new._ends)
        return new

    def add(self, demand: Demand, block_tokens: int, prefill_ns: float) -> int:
        """The next request in order, with what it takes of one prefill replica; returns when it will get its place."""
        blocks: float = blocks_for(demand.request, demand.output, block_tokens)
        slots, when = demand.request.num_sequences, self._now_ns
        if self._most_slots:  # one that is larger than any replica gets a whole one
            blocks, slots = min(blocks, self._most_blocks), min(slots, self._most_slots)
        while self._blocks < blocks or self._slots < slots:
            if not self._ends:
                self.starts.append(UNKNOWN_NS)
                return UNKNOWN_NS
            end_ns, back, back_slots = heapq.heappop(self._ends)
            when, self._blocks, self._slots = max(when, end_ns), self._blocks + back, self._slots + back_slots
        if self._prefills and demand.request.disaggregate:
            when = max(when, int(self._prefill_ns) - PREFILL_AHEAD_NS)
            self._prefill_ns = max(self._prefill_ns, when) + prefill_ns / self._prefills
        self._blocks, self._slots = self._blocks - blocks, self._slots - slots
        heapq.heappush(self._ends, (when + demand.lasts_ns, blocks, slots))
        self.starts.append(when)
        return when


@dataclass(frozen=True, slots=True)
class Pressure:
    """What decode's replicas and those who wait need, in each dimension, and what one replica has."""

    blocks: float
    blocks_queued: float
    slots: float
    slots_queued: float


def decode_pressure(registry: Registry, waiting: Iterable[AdmitRequest], forecast: Forecast) -> Pressure:
    """Of what is placed, blocks at the expected ends with their reserve; of what waits, the same."""
    there = [r for r in registry.replicas.values() if r.role is Role.DECODE and not r.fenced]
    block_tokens = there[0].announcement.block_tokens if there else 1
    blocks = sum(min(r.committed + reserve(r.variance), r.announcement.blocks_total) for r in there)
    queued = slots_queued = 0
    for request in waiting:
        most = there[0].slots if there else request.num_sequences
        sequences = min(request.num_sequences, most)
        queued += blocks_for(request, forecast.output_tokens(request), block_tokens, sequences)
        slots_queued += sequences
    return Pressure(blocks, queued, sum(r.slots_taken for r in there), slots_queued)
