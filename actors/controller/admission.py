"""Which replicas a request gets, and who waits. Pure.

Decode is chosen by the KV occupancy predicted for the request's expected end and for the worst moment until then (what
ends just before it still shares the batch); prefill by the prompt tokens in flight. Sessions and known prefixes are
preferred where that costs little. Whatever is stale, draining or fenced is not in the indexes at all, so it counts as
full.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from actors.controller.affinity import HashRing, LoadIndex, PrefixIndex
from actors.controller.forecast import SECOND, Forecast, blocks_for, outlook
from actors.controller.registry import Live, Replica
from actors.nouns import AdmitRequest, ReplicaId, Role, TicketId
from cluster.spec import AdmissionSpec

CANDIDATES = 4  # least loaded replicas that are looked at closely
SESSION_SLACK = 0.25  # a session's own replica may be this much fuller (share of its blocks) than the best one
PREFIX_WORTH = 0.25  # a full prefix hit is worth this share of a replica's blocks
PREFILL_FULL_TOKENS = 1 << 20  # in-flight prompt tokens at which the prefill index stops telling loads apart


@dataclass(frozen=True, slots=True)
class Choice:
    decode: Replica
    prefill: Replica | None
    reserved: int  # blocks on decode
    growth: float  # blocks a second
    ends_ns: int
    prefill_tokens: int
    reason: str


@dataclass(slots=True)
class _Pool:
    index: LoadIndex = field(default_factory=LoadIndex)
    ring: HashRing = field(default_factory=HashRing)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)


class Chooser:
    """Keeps the indexes in step with the replicas and picks from them."""

    def __init__(
        self,
        spec: AdmissionSpec,
        forecast: Forecast,
        replicas: Mapping[ReplicaId, Replica],
        tickets: Mapping[TicketId, Live],
    ) -> None:
        self._spec = spec
        self._forecast = forecast
        self._replicas = replicas
        self._tickets = tickets
        self._pools: dict[tuple[Role, str], _Pool] = {}  # by role and generation

    def configure(self, spec: AdmissionSpec) -> None:
        self._spec = spec

    # -- indexes

    def refresh(self, replica: Replica) -> None:
        """After anything about the replica changed."""
        pool = self._pools.get((replica.role, replica.announcement.generation))
        if pool is None:
            pool = self._pools[(replica.role, replica.announcement.generation)] = _Pool()
        if not replica.usable:
            pool.index.drop(replica.id)
            pool.ring.drop(replica.id)
        elif replica.role is Role.DECODE:
            pool.index.put(replica.id, replica.committed / max(1, replica.announcement.blocks_total))
            pool.ring.add(replica.id)
        else:
            pool.index.put(replica.id, _queued(replica) / PREFILL_FULL_TOKENS)

    def forget(self, replica: Replica) -> None:
        """The replica is gone, and its cache with it."""
        if (pool := self._pools.get((replica.role, replica.announcement.generation))) is not None:
            pool.index.drop(replica.id)
            pool.ring.drop(replica.id)
            pool.prefixes.forget(replica.id)
            if not pool.index and not len(pool.ring):
                del self._pools[(replica.role, replica.announcement.generation)]

    def indexed(self, replica: Replica) -> bool:
        pool = self._pools.get((replica.role, replica.announcement.generation))
        return pool is not None and replica.id in pool.index

    # -- choice

    def choose(self, request: AdmitRequest, now_ns: int, generation: str | None = None) -> Choice | None:
        """Replicas for the request, or None when none has room. `generation`: only there (a resumed stream)."""
        picked = self._decode(request, now_ns, generation or request.generation or None)
        if picked is None:
            return None
        decode, reserved, growth, ends_ns, hit_pages, why = picked
        home = self._pools[(Role.DECODE, decode.announcement.generation)]
        prompt = request.num_prompt_tokens + request.num_output_tokens
        uncached = max(0, prompt - hit_pages * decode.announcement.block_tokens)
        prefill, tokens, how = self._prefill(request, decode.announcement.generation, prompt, uncached)
        home.prefixes.note(request.prefix_hashes, decode.id)
        return Choice(decode, prefill, reserved, growth, ends_ns, tokens, f"{why}; {how}")

    def _decode(
        self, request: AdmitRequest, now_ns: int, generation: str | None
    ) -> tuple[Replica, int, float, int, int, str] | None:
        output = self._forecast.output_tokens(request)
        fresh = max(1, output - request.num_output_tokens)
        prompt = request.num_prompt_tokens + request.num_output_tokens
        ends_ns = now_ns + int(self._forecast.prompt_token_ns * prompt + self._forecast.token_ns * fresh)
        best: tuple[tuple[float, float], Replica, int, float, int, str] | None = None
        for replica, hit_pages, is_home in self._candidates(request, generation):
            facts = replica.announcement
            room = int(facts.blocks_total * self._spec.occupancy_limit)
            need = min(blocks_for(request, output, facts.block_tokens), room)  # an empty replica takes any request
            growth = request.num_sequences * SECOND / (self._forecast.token_ns * facts.block_tokens)
            peak, at_end = outlook(replica, self._tickets, now_ns, ends_ns, need, growth)
            if min(peak, replica.committed + need) > room:
                continue
            share = (at_end + peak) / 2 / facts.blocks_total
            hit = hit_pages * facts.block_tokens / max(1, prompt)
            score = share - PREFIX_WORTH * min(1.0, hit) - (SESSION_SLACK if is_home else 0.0)
            rank = (round(score * 64), replica.committed / facts.blocks_total)
            if best is None or rank < best[0]:
                at_most, then = peak / facts.blocks_total, at_end / facts.blocks_total
                why = f"{facts.replica_id}: {then:.0%} of its KV blocks when this ends, {at_most:.0%} at most before"
                why += ", and is the session's own" if is_home else ""
                why += f", and has {hit:.0%} of the prompt cached" if hit_pages else ""
                best = rank, replica, need, growth, hit_pages, why
        if best is None:
            return None
        _, replica, need, growth, hit_pages, why = best
        return replica, need, growth, ends_ns, hit_pages, why

    def _candidates(self, request: AdmitRequest, generation: str | None) -> Iterator[tuple[Replica, int, bool]]:
        """(replica, pages of the prompt it probably has, whether it is the session's own)."""
        for (role, of_generation), pool in self._pools.items():
            if role is not Role.DECODE or (generation is not None and of_generation != generation):
                continue
            home = next((r for r in pool.ring.owners(request.session, 1)), None) if request.session else None
            pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, [])
            names = dict.fromkeys([*([home] if home else []), *holders])
            names |= dict.fromkeys(islice((r for r in pool.index.least() if r not in request.exclude), CANDIDATES))
            for name in names:
                if name in pool.index and name not in request.exclude:
                    yield self._replicas[name], pages if name in holders else 0, name == home

    def _prefill(
        self, request: AdmitRequest, generation: str, prompt: int, uncached: int
    ) -> tuple[Replica | None, int, str]:
        limit = self._spec.local_prefill_max_tokens
        if not request.disaggregate:
            return None, 0, "decode computes the prompt: this form cannot be handed over"
        if uncached <= limit:
            what = "the prompt is short" if uncached == prompt else "most of the prompt is cached there"
            return None, 0, f"decode computes the prompt: {what} ({uncached} tokens to compute, limit {limit})"
        pool = self._pools.get((Role.PREFILL, generation))
        if pool is None or not len(pool.index):
            return None, 0, "decode computes the prompt: no prefill replica is ready"
        pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, [])
        names = dict.fromkeys(holders) | dict.fromkeys(islice(pool.index.least(), CANDIDATES))
        best: tuple[int, Replica, int] | None = None
        for name in names:
            if name not in pool.index or name in request.exclude:
                continue
            replica = self._replicas[name]
            hit = pages * replica.announcement.block_tokens if name in holders else 0
            tokens = max(1, prompt - hit)
            if best is None or _queued(replica) + tokens < best[0]:
                best = _queued(replica) + tokens, replica, tokens
        if best is None:
            return None, 0, "decode computes the prompt: every prefill replica is excluded"
        ahead, replica, tokens = best
        pool.prefixes.note(request.prefix_hashes, replica.id)
        cached = f", {prompt - tokens} of them cached" if tokens < prompt else ""
        return replica, tokens, f"{replica.id} has {ahead - tokens} prompt tokens before this one's {prompt}{cached}"


def _queued(replica: Replica) -> int:
    """Prompt tokens a prefill replica still has to compute, as far as we know."""
    return max(replica.inflight_tokens, replica.occupancy.waiting_prompt_tokens)


# -- who waits


@dataclass(slots=True)
class Waiting:
    call_id: int
    request: AdmitRequest
    since_ns: int
    until_ns: int
    cost: float  # what the request takes, for the fairness between tenants (tokens)
    ticket_id: TicketId = 0  # a live ticket that needs a new place; 0: a new request
    generation: str | None = None
    not_before_ns: int = 0
    also: list[int] = field(default_factory=list)  # further calls that wait for the same answer


class WaitingRoom:
    """Bounded queue, fair between tenants by tokens: the tenant that has had least goes first.

    Inside a tenant: higher priority first, then first come. A request that was already running and lost its replica
    goes before all of these and does not count against the bound. The head of a tenant that does not fit lets others
    pass, until it has waited for `AGED` of its time; from then on nobody passes it.
    """

    AGED = 0.25

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._again: deque[Waiting] = deque()
        self._tenants: dict[str, list[tuple[int, int, Waiting]]] = {}  # heaps of (-priority, number, waiting)
        self._served: dict[str, float] = {}  # virtual time of each tenant that waits
        self._clock = 0.0  # virtual time: of the tenant served last
        self._number = 0
        self._waiting: dict[int, Waiting] = {}  # by call; what is not in here any more is skipped in the heaps

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    @property
    def full(self) -> bool:
        return len(self._waiting) - len(self._again) >= self.size_max

    def put(self, waiting: Waiting) -> None:
        self._waiting[waiting.call_id] = waiting
        if waiting.ticket_id:
            self._again.append(waiting)
            return
        tenant = waiting.request.tenant
        if tenant not in self._tenants:
            self._tenants[tenant] = []
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._clock)
        self._number += 1
        heapq.heappush(self._tenants[tenant], (-waiting.request.priority, self._number, waiting))

    def drop(self, call_id: int) -> Waiting | None:
        waiting = self._waiting.pop(call_id, None)
        if waiting is not None and waiting.ticket_id:
            self._again.remove(waiting)
        return waiting

    def leave(self, call_id: int) -> Waiting | None:
        """One caller waits no more; the entry that went with it, when nobody else waits for the same."""
        for waiting in self._waiting.values():
            if call_id in waiting.also:
                waiting.also.remove(call_id)
                return None
        found = self._waiting.get(call_id)
        if found is None or not found.also:
            return self.drop(call_id)
        del self._waiting[call_id]
        found.call_id = found.also.pop()
        self._waiting[found.call_id] = found
        return None

    def heads(self, now_ns: int) -> list[Waiting]:
        """Who may be tried now, in order; an aged head ends the list."""
        found: list[Waiting] = []
        for waiting in self._again:
            if now_ns < waiting.not_before_ns:
                continue
            found.append(waiting)
            if self._aged(waiting, now_ns):
                return found
        for tenant in sorted(self._tenants, key=lambda name: (self._served[name], name)):
            heap = self._tenants[tenant]
            while heap and heap[0][2].call_id not in self._waiting:
                heapq.heappop(heap)
            if not heap:
                del self._tenants[tenant]
                if self._served[tenant] <= self._clock:
                    del self._served[tenant]  # it would start from the clock anyway
                continue
            found.append(heap[0][2])
            if self._aged(heap[0][2], now_ns):
                break
        return found

    def serve(self, waiting: Waiting) -> None:
        """It got its place: leaves, and its tenant has had that much more."""
        self.drop(waiting.call_id)
        if not waiting.ticket_id:
            tenant = waiting.request.tenant
            self._clock = max(self._clock, self._served.get(tenant, 0.0))
            self._served[tenant] = self._served.get(tenant, self._clock) + waiting.cost

    def _aged(self, waiting: Waiting, now_ns: int) -> bool:
        return now_ns - waiting.since_ns >= self.AGED * (waiting.until_ns - waiting.since_ns)

    def expired(self, now_ns: int) -> list[Waiting]:
        return [waiting for waiting in self._waiting.values() if now_ns >= waiting.until_ns]
