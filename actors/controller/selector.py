"""Which replicas a request gets. Pure.

Decode is chosen by the KV occupancy predicted for the request's expected end and for the worst moment until then (what
ends just before it still shares the batch); prefill by the prompt tokens in flight. Sessions and known prefixes are
preferred where that costs little. What is stale, draining or fenced is not in the indexes, so it counts as full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from actors.controller.affinity import HashRing, LoadIndex, PrefixIndex
from actors.controller.capacity import (
    ALONE_AFTER_NS,
    PREFILL_AHEAD_NS,
    UNKNOWN_NS,
    Demand,
    Fit,
    Hold,
    Short,
    earliest,
    fit,
    limit_of,
    prefill_ahead,
)
from actors.controller.forecast import Forecast
from actors.controller.journal import Tracked, TrackedDict
from actors.controller.moves import Move, Staging
from actors.controller.registry import Registry, Replica
from actors.messages import AdmitRequest, ReplicaId, Role
from cluster.spec import AdmissionSpec

CANDIDATES = 3  # least loaded replicas that are looked at closely
HOLD_LOOKS = 8  # replicas among which the place that a request will get first is looked for
SESSION_SLACK = 0.25  # a session's own replica may be this much fuller (share of its blocks) than the best one
PREFIX_WORTH = 0.25  # a full prefix hit is worth this share of a replica's blocks
PREFILL_FULL_TOKENS = 1 << 20  # in-flight prompt tokens at which the prefill index stops telling loads apart


@dataclass(frozen=True, slots=True)
class Choice:
    decode: Replica
    prefill: Replica | None
    reserved: int  # blocks on decode
    growth: float  # blocks a second
    slots: int  # sequences on decode
    variance: float  # of `reserved`
    ends_ns: int
    prefill_tokens: int
    staging_bytes: int
    reason: str
    hit_pages: int = 0  # of the prompt, that the replica which computes it probably has cached
    hit_used: int = 0  # see `PrefixIndex.used`


@dataclass(slots=True)
class _Pool(Tracked):
    """The replicas of one role and generation."""

    tokenizer: str
    index: LoadIndex = field(default_factory=LoadIndex)
    ring: HashRing = field(default_factory=HashRing)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    sizes: TrackedDict[ReplicaId, int] = field(default_factory=TrackedDict)  # blocks of those in the index
    loads: TrackedDict[ReplicaId, tuple[float, ...]] = field(default_factory=TrackedDict)  # of those in the index
    largest: int = 0
    smallest: int = 0

    def note(self, replica_id: ReplicaId, load: tuple[float, ...]) -> bool:
        """Whether it has more of anything free than at the last time."""
        before = self.loads.get(replica_id)
        if before == load:
            return False
        self.loads[replica_id] = load
        return before is None or any(now < then for now, then in zip(load, before))

    def resize(self, replica_id: ReplicaId, blocks: int) -> None:
        """`blocks` 0: it is gone."""
        if self.sizes.get(replica_id, 0) != blocks:
            self.sizes[replica_id] = blocks
            if not blocks:
                del self.sizes[replica_id]
            self.largest = max(self.sizes.values(), default=0)
            self.smallest = min(self.sizes.values(), default=0)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A decode replica with room."""

    rank: tuple[int, float]
    replica: Replica
    fit: Fit
    hit_pages: int
    is_home: bool

    def why(self, prompt: int) -> str:
        facts = self.replica.announcement
        then, at_most = self.fit.at_end / facts.blocks_total, self.fit.peak / facts.blocks_total
        text = f"{facts.replica_id}: {then:.0%} of its KV blocks when this ends, {at_most:.0%} at most before"
        if self.is_home:
            text += ", and is the session's own"
        if self.hit_pages:
            text += f", and has {min(1.0, self.hit_pages * facts.block_tokens / prompt):.0%} of the prompt cached"
        return text


class ReplicaSelector(Tracked):
    """Keeps the indexes in step with the replicas and picks from them."""

    def __init__(
        self,
        spec: AdmissionSpec,
        forecast: Forecast,
        registry: Registry,
        staging_bytes_max: int,
    ) -> None:
        self._spec = spec
        self._staging = Staging(registry, staging_bytes_max)
        self._forecast = forecast
        self._registry = registry
        self._replicas = registry.replicas
        self._pools: TrackedDict[tuple[Role, str], _Pool] = TrackedDict()  # by role and generation
        # How often a replica of that pool had more free than before: while this stands still, there is no more room.
        self.decode_freed = self.prefill_freed = 0

    def configure(self, spec: AdmissionSpec, staging_bytes_max: int) -> None:
        self._spec = spec
        self._staging = Staging(self._registry, staging_bytes_max)

    # -- indexes

    def refresh(self, replica: Replica) -> None:
        """After anything about the replica changed."""
        pool = self._pools.get((replica.role, replica.announcement.generation))
        if pool is None:
            tokenizer = replica.announcement.fingerprint.tokenizer
            pool = self._pools[(replica.role, replica.announcement.generation)] = _Pool(tokenizer)
        pool.prefixes.put(replica.id, replica.announcement.blocks_total)
        if not replica.usable:
            pool.index.drop(replica.id)
            pool.ring.drop(replica.id)
            pool.resize(replica.id, 0)
            pool.loads.pop(replica.id, None)
        elif replica.role is Role.DECODE:
            pool.index.put(replica.id, _fullness(replica))
            pool.ring.add(replica.id)
            pool.resize(replica.id, replica.announcement.blocks_total)
            self.decode_freed += pool.note(replica.id, (replica.committed, replica.slots_taken, replica.variance))
        else:
            ahead = prefill_ahead(replica)
            pool.index.put(replica.id, ahead / PREFILL_FULL_TOKENS)
            self.prefill_freed += pool.note(replica.id, (ahead,))

    def forget(self, replica: Replica) -> None:
        """The replica is gone, and its cache with it."""
        key = (replica.role, replica.announcement.generation)
        if (pool := self._pools.get(key)) is not None:
            pool.index.drop(replica.id)
            pool.ring.drop(replica.id)
            pool.resize(replica.id, 0)
            pool.loads.pop(replica.id, None)
            pool.prefixes.drop(replica.id)
            if not pool.index:
                del self._pools[key]

    def indexed(self, replica: Replica) -> bool:
        pool = self._pools.get((replica.role, replica.announcement.generation))
        return pool is not None and replica.id in pool.index

    # -- choice

    def choose(
        self, request: AdmitRequest, now_ns: int, generation: str | None = None, hold: Hold | None = None
    ) -> Choice | Short:
        """Replicas for the request, or what there is not enough of now.

        `generation`: only there (a resumed stream). `hold`: the place of another request that must not be delayed.
        """
        demand = Demand.of(request, self._forecast)
        candidate = self._decode(demand, now_ns, generation, hold)
        if isinstance(candidate, Short):
            return candidate
        facts = candidate.replica.announcement
        uncached = max(0, demand.prompt - candidate.hit_pages * facts.block_tokens)
        way = self._prefill(demand, candidate.replica, uncached, hold is not None and hold.replica is None)
        if isinstance(way, Short):
            return way
        prefill, tokens, how = way
        blocks = candidate.fit.blocks
        if prefill is None:
            hit_pages, hit_used = self._note(request, candidate.replica, candidate.hit_pages, blocks)
        else:
            self._note(request, candidate.replica, 0, blocks)
            size = prefill.announcement.block_tokens
            hit_pages, hit_used = self._note(request, prefill, (demand.prompt - tokens) // size, -(-tokens // size))
        return Choice(
            decode=candidate.replica,
            prefill=prefill,
            reserved=blocks,
            growth=demand.growth(candidate.replica),
            slots=demand.slots(candidate.replica),
            variance=demand.variance(candidate.replica),
            ends_ns=now_ns + demand.lasts_ns,
            prefill_tokens=tokens,
            staging_bytes=0 if prefill is None else demand.staging_bytes(candidate.replica),
            reason=f"{candidate.why(demand.prompt)}; {how}",
            hit_pages=hit_pages,
            hit_used=hit_used,
        )

    def hold_for(self, request: AdmitRequest, short: Short, generation: str | None, now_ns: int) -> Hold:
        """The place that the request will get first, when its turn is next and there is no room for it yet."""
        if short in (Short.PREFILL, Short.STAGING):
            return Hold()
        demand = Demand.of(request, self._forecast)
        holds: list[Hold] = []
        for pool in self._decode_pools(request, generation):
            # In a large pool of equals the least loaded ones have room first, as far as that is worth a look.
            few = pool.index.least() if pool.smallest == pool.largest else pool.sizes
            hold = self._earliest(demand, pool, islice(few, HOLD_LOOKS), now_ns)
            if hold is None and len(pool.sizes) > HOLD_LOOKS:  # they may be out of its reach, or too small
                hold = self._earliest(demand, pool, pool.sizes, now_ns)
            holds += [hold] if hold is not None else []
        return min(holds, key=lambda hold: hold.start_ns, default=Hold(start_ns=UNKNOWN_NS))

    def _earliest(self, demand: Demand, pool: _Pool, names: Iterable[ReplicaId], now_ns: int) -> Hold | None:
        best: Hold | None = None
        for name in names:
            replica = self._replicas[name]
            limit = limit_of(replica, self._spec.occupancy_limit)
            if not self._registry.can_use(demand.request, name) or (
                demand.blocks(replica) > limit and pool.sizes[name] < pool.largest
            ):
                continue
            start_ns = earliest(demand, replica, limit, now_ns)
            if best is None or start_ns < best.start_ns:
                best = Hold(replica, start_ns, min(demand.blocks(replica), limit), demand.slots(replica))
        return best

    def _note(self, request: AdmitRequest, replica: Replica, hit_pages: int, num_pages: int) -> tuple[int, int]:
        """The replica will have this prompt cached, and allocates `num_pages` for it."""
        prefixes = self._pools[(replica.role, replica.announcement.generation)].prefixes
        hit_used = prefixes.used(request.prefix_hashes[hit_pages - 1], replica.id) if hit_pages else 0
        prefixes.allocated(replica.id, num_pages)
        prefixes.note(request.prefix_hashes, replica.id)
        return hit_pages, hit_used

    def prompt_computed(self, replica: Replica, hit_pages: int, hit_used: int, num_cached_tokens: int) -> None:
        """The engine found `num_cached_tokens` of a prompt cached that was expected to have `hit_pages` there."""
        pool = self._pools.get((replica.role, replica.announcement.generation))
        # An engine always computes the last token of a prompt, so it may use one page less than it has.
        if pool is not None and num_cached_tokens < (hit_pages - 1) * replica.announcement.block_tokens:
            pool.prefixes.evicted(replica.id, hit_used)

    def has_pool(self, request: AdmitRequest, generation: str | None) -> bool:
        """Whether any decode replica that is here now could take the request, full as it may be."""
        return any(pool.sizes for pool in self._decode_pools(request, generation))

    def _decode_pools(self, request: AdmitRequest, generation: str | None) -> Iterator[_Pool]:
        """Those of the request's tokenizer, and of its generation when it is bound to one."""
        for (role, of_generation), pool in self._pools.items():
            speaks = request.tokenizer in ("", pool.tokenizer)
            if role is Role.DECODE and speaks and (generation is None or of_generation == generation):
                yield pool

    def _decode(self, demand: Demand, now_ns: int, generation: str | None, hold: Hold | None) -> _Candidate | Short:
        best: _Candidate | Short = Short.REPLICA
        for pool in self._decode_pools(demand.request, generation):
            candidate = self._best(demand, pool, self._candidates(demand.request, pool), now_ns, hold)
            if isinstance(candidate, Short) and pool.smallest != pool.largest:
                # The least loaded ones may be too small for it: look at all.
                everyone = ((name, 0, False) for name in pool.sizes)
                candidate = self._best(demand, pool, everyone, now_ns, hold)
            if isinstance(best, Short):
                best = best if candidate is Short.REPLICA else candidate
            elif isinstance(candidate, _Candidate) and candidate.rank < best.rank:
                best = candidate
        return best

    def _best(
        self,
        demand: Demand,
        pool: _Pool,
        candidates: Iterable[tuple[ReplicaId, int, bool]],
        now_ns: int,
        hold: Hold | None,
    ) -> _Candidate | Short:
        best: _Candidate | Short = Short.REPLICA
        for name, hit_pages, is_home in candidates:
            if name not in pool.sizes or not self._registry.can_use(demand.request, name):
                continue
            replica = self._replicas[name]
            total, limit = replica.announcement.blocks_total, limit_of(replica, self._spec.occupancy_limit)
            if demand.blocks(replica) > limit and total < pool.largest:
                continue  # the largest there is takes it when it is empty
            place = fit(demand, replica, limit, hold, now_ns)
            if isinstance(place, Short):
                best = place if isinstance(best, Short) else best
                continue
            score = (place.at_end + place.peak) / (2 * total)
            if hit_pages:
                score -= PREFIX_WORTH * min(1.0, hit_pages * replica.announcement.block_tokens / demand.prompt)
            if is_home:
                score -= SESSION_SLACK
            rank = (round(score * 64), _fullness(replica))
            if isinstance(best, Short) or rank < best.rank:
                best = _Candidate(rank, replica, place, hit_pages, is_home)
        return best

    def _candidates(self, request: AdmitRequest, pool: _Pool) -> list[tuple[ReplicaId, int, bool]]:
        """(replica, pages of the prompt it probably has, whether it is the session's own)."""
        home = next(pool.ring.owners(request.session, 1), None) if request.session else None
        pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, ())
        candidates = [(name, pages, name == home) for name in holders]
        if home is not None and home not in holders:
            candidates.append((home, 0, True))
        taken = len(candidates)
        for name in pool.index.least():
            if name not in holders and name != home and self._registry.can_use(request, name):
                candidates.append((name, 0, False))
                if len(candidates) - taken >= CANDIDATES:
                    break
        return candidates

    def _prefill(
        self, demand: Demand, decode: Replica, uncached: int, is_held: bool
    ) -> tuple[Replica | None, int, str] | Short:
        """The prefill replica, the tokens it has to compute, and why; None: decode computes the prompt itself."""
        request, limit = demand.request, self._spec.local_prefill_max_tokens
        if limit is None:
            limit = self._forecast.local_prefill_tokens(len(decode.tickets))
        if not request.disaggregate:
            return None, 0, "decode computes the prompt: this form cannot be handed over"
        if uncached <= limit:
            what = "the prompt is short" if uncached == demand.prompt else "most of the prompt is cached there"
            return None, 0, f"decode computes the prompt: {what} ({uncached} tokens to compute, limit {limit})"
        facts = decode.announcement
        num_bytes = demand.staging_bytes(decode)
        if num_bytes > (most := self._staging.most(facts.node_id)):
            return None, 0, f"decode computes the prompt: {num_bytes} staging bytes, staging_bytes_max is {most}"
        pool = self._pools.get((Role.PREFILL, facts.generation))
        if pool is None or not len(pool.index):
            return None, 0, "decode computes the prompt: no prefill replica is ready"
        best = self._shortest_queue(demand, pool, num_bytes, facts.node_id)
        if best is None:
            return None, 0, f"decode computes the prompt: no other prefill replica can take {num_bytes} staging bytes"
        if isinstance(best, Short):
            return best
        _, ahead, tokens, replica, move = best
        ahead_ns = ahead * self._forecast.prompt_token_ns
        # What decode's own streams would lose by it, all together, against what this request would wait for.
        costs_ns = uncached * self._forecast.prompt_token_ns * (1 + len(decode.tickets))
        if ahead_ns > max(costs_ns, ALONE_AFTER_NS):
            why = f"that takes less than its turn on prefill ({ahead} prompt tokens wait on {replica.id})"
            return None, 0, f"decode computes the prompt: {why}"
        if move.took_ns > costs_ns:
            return None, 0, f"decode computes the prompt: {costs_ns / 1e6:,.1f} ms of its time, less than {move}"
        if ahead_ns > PREFILL_AHEAD_NS or is_held:
            return Short.PREFILL
        cached = f", {demand.prompt - tokens} of them cached" if tokens < demand.prompt else ""
        return (
            replica,
            tokens,
            f"{replica.id} has {ahead} prompt tokens before this one's {demand.prompt}{cached}; {move}",
        )

    def _shortest_queue(
        self, demand: Demand, pool: _Pool, num_bytes: int, target: str
    ) -> tuple[float, int, int, Replica, Move] | Short | None:
        """(nanoseconds, tokens before it, tokens to compute, replica, move) where pages are first ready on `target`."""
        request, is_staging_short = demand.request, False
        pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, ())
        best: tuple[float, int, int, Replica, Move] | None = None
        usable = (name for name in pool.index.least() if self._registry.can_use(request, name))
        for name in dict.fromkeys((*holders, *islice(usable, CANDIDATES))):
            if name not in pool.index or not self._registry.can_use(request, name):
                continue
            replica = self._replicas[name]
            node_id = replica.announcement.node_id
            if num_bytes > self._staging.most(node_id):
                continue
            if not self._staging.has(node_id, num_bytes):
                is_staging_short = True
                continue
            tokens = max(1, demand.prompt - (pages * replica.announcement.block_tokens if name in holders else 0))
            ahead = prefill_ahead(replica)
            move = self._staging.move(num_bytes, node_id, target)
            ready_ns = (ahead + tokens) * self._forecast.prompt_token_ns + move.took_ns
            if best is None or ready_ns < best[0]:
                best = ready_ns, ahead, tokens, replica, move
        return Short.STAGING if best is None and is_staging_short else best


def _fullness(replica: Replica) -> float:
    """From 0 to 1: of its blocks or of its sequence slots, whichever is scarcer."""
    return max(replica.committed / max(1, replica.announcement.blocks_total), replica.slots_taken / replica.slots)
