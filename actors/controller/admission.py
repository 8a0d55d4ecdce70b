"""Which replicas a request gets, and who waits. Pure.

Decode is chosen by the KV occupancy predicted for the request's expected end and for the worst moment until then (what
ends just before it still shares the batch); prefill by the prompt tokens in flight. Sessions and known prefixes are
preferred where that costs little. Whatever is stale, draining or fenced is not in the indexes at all, so it counts as
full.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from actors.controller.affinity import HashRing, LoadIndex, PrefixIndex
from actors.controller.forecast import SECOND, Forecast, blocks_for, outlook, per_sequence
from actors.controller.journal import Tracked, TrackedDict, TrackedList
from actors.controller.registry import Replica
from actors.nouns import AdmitRequest, ReplicaId, Role, TicketId
from cluster.spec import AdmissionSpec

CANDIDATES = 3  # least loaded replicas that are looked at closely
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
    largest: int = 0
    smallest: int = 0

    def resize(self, replica_id: ReplicaId, blocks: int) -> None:
        """`blocks` 0: it is gone."""
        if self.sizes.get(replica_id, 0) != blocks:
            self.sizes[replica_id] = blocks
            if not blocks:
                del self.sizes[replica_id]
            self.largest = max(self.sizes.values(), default=0)
            self.smallest = min(self.sizes.values(), default=0)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a request asks of decode, the same for every candidate."""

    request: AdmitRequest
    prompt: int  # tokens to have in the cache before the next one can be computed
    output: int  # tokens at the expected end
    ends_ns: int
    token_ns: float

    def blocks(self, block_tokens: int) -> int:
        return blocks_for(self.request, self.output, block_tokens)

    def growth(self, block_tokens: int) -> float:
        """Blocks a second."""
        return self.request.num_sequences * SECOND / (self.token_ns * block_tokens)


@dataclass(frozen=True, slots=True)
class _Seat:
    """A decode replica with room."""

    rank: tuple[int, float]
    replica: Replica
    blocks: int
    at_end: int
    peak: int
    hit_pages: int
    is_home: bool

    def why(self, prompt: int) -> str:
        facts = self.replica.announcement
        then, at_most = self.at_end / facts.blocks_total, self.peak / facts.blocks_total
        text = f"{facts.replica_id}: {then:.0%} of its KV blocks when this ends, {at_most:.0%} at most before"
        if self.is_home:
            text += ", and is the session's own"
        if self.hit_pages:
            text += f", and has {min(1.0, self.hit_pages * facts.block_tokens / prompt):.0%} of the prompt cached"
        return text


class Chooser(Tracked):
    """Keeps the indexes in step with the replicas and picks from them."""

    def __init__(
        self,
        spec: AdmissionSpec,
        forecast: Forecast,
        replicas: Mapping[ReplicaId, Replica],
        staging_bytes_max: int,
    ) -> None:
        self._spec = spec
        self._staging_bytes_max = staging_bytes_max
        self._forecast = forecast
        self._replicas = replicas
        self._pools: TrackedDict[tuple[Role, str], _Pool] = TrackedDict()  # by role and generation

    def configure(self, spec: AdmissionSpec, staging_bytes_max: int) -> None:
        self._spec = spec
        self._staging_bytes_max = staging_bytes_max

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
        elif replica.role is Role.DECODE:
            pool.index.put(replica.id, replica.committed / max(1, replica.announcement.blocks_total))
            pool.ring.add(replica.id)
            pool.resize(replica.id, replica.announcement.blocks_total)
        else:
            pool.index.put(replica.id, _queued(replica) / PREFILL_FULL_TOKENS)

    def forget(self, replica: Replica) -> None:
        """The replica is gone, and its cache with it."""
        key = (replica.role, replica.announcement.generation)
        if (pool := self._pools.get(key)) is not None:
            pool.index.drop(replica.id)
            pool.ring.drop(replica.id)
            pool.resize(replica.id, 0)
            pool.prefixes.drop(replica.id)
            if not pool.index:
                del self._pools[key]

    def indexed(self, replica: Replica) -> bool:
        pool = self._pools.get((replica.role, replica.announcement.generation))
        return pool is not None and replica.id in pool.index

    # -- choice

    def choose(self, request: AdmitRequest, now_ns: int, generation: str | None = None) -> Choice | None:
        """Replicas for the request, or None when none has room. `generation`: only there (a resumed stream)."""
        forecast = self._forecast
        output = forecast.output_tokens(request)
        emitted = per_sequence(request, request.num_output_tokens)
        prompt = request.num_prompt_tokens + emitted
        lasts_ns = forecast.prompt_token_ns * prompt + forecast.token_ns * max(1, output - emitted)
        need = _Need(request, prompt, output, now_ns + int(lasts_ns), forecast.token_ns)
        seat = self._decode(need, now_ns, generation)
        if seat is None:
            return None
        facts = seat.replica.announcement
        uncached = max(0, prompt - seat.hit_pages * facts.block_tokens)
        prefill, tokens, how = self._prefill(request, seat.replica, prompt, uncached)
        if prefill is None:
            hit_pages, hit_used = self._note(request, seat.replica, seat.hit_pages, seat.blocks)
        else:
            self._note(request, seat.replica, 0, seat.blocks)
            size = prefill.announcement.block_tokens
            hit_pages, hit_used = self._note(request, prefill, (prompt - tokens) // size, -(-tokens // size))
        return Choice(
            decode=seat.replica,
            prefill=prefill,
            reserved=seat.blocks,
            growth=need.growth(facts.block_tokens),
            ends_ns=need.ends_ns,
            prefill_tokens=tokens,
            reason=f"{seat.why(prompt)}; {how}",
            hit_pages=hit_pages,
            hit_used=hit_used,
        )

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

    def _decode(self, need: _Need, now_ns: int, generation: str | None) -> _Seat | None:
        best: _Seat | None = None
        for pool in self._decode_pools(need.request, generation):
            seat = self._best(need, pool, self._candidates(need.request, pool), now_ns)
            if seat is None and pool.smallest != pool.largest:
                # The least loaded ones may be too small for it: look at all.
                everyone = ((name, 0, False) for name in pool.sizes)
                seat = self._best(need, pool, everyone, now_ns)
            if seat is not None and (best is None or seat.rank < best.rank):
                best = seat
        return best

    def _best(
        self, need: _Need, pool: _Pool, candidates: Iterable[tuple[ReplicaId, int, bool]], now_ns: int
    ) -> _Seat | None:
        best: _Seat | None = None
        exclude = need.request.exclude
        for name, hit_pages, is_home in candidates:
            if name not in pool.sizes or name in exclude:
                continue
            replica = self._replicas[name]
            facts = replica.announcement
            total = facts.blocks_total
            room = int(total * self._spec.occupancy_limit)
            blocks = need.blocks(facts.block_tokens)
            if blocks > room:
                if total < pool.largest:
                    continue
                blocks = room  # the largest there is takes it when it is empty
            committed = replica.committed
            peak, at_end = outlook(replica, now_ns, need.ends_ns, blocks, need.growth(facts.block_tokens))
            if peak > room and committed + blocks > room:
                continue
            score = (at_end + peak) / (2 * total)
            if hit_pages:
                score -= PREFIX_WORTH * min(1.0, hit_pages * facts.block_tokens / need.prompt)
            if is_home:
                score -= SESSION_SLACK
            rank = (round(score * 64), committed / total)
            if best is None or rank < best.rank:
                best = _Seat(rank, replica, blocks, at_end, peak, hit_pages, is_home)
        return best

    def _candidates(self, request: AdmitRequest, pool: _Pool) -> list[tuple[ReplicaId, int, bool]]:
        """(replica, pages of the prompt it probably has, whether it is the session's own)."""
        home = next(pool.ring.owners(request.session, 1), None) if request.session else None
        pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, ())
        found = [(name, pages, name == home) for name in holders]
        if home is not None and home not in holders:
            found.append((home, 0, True))
        taken = len(found)
        for name in pool.index.least():
            if name not in holders and name != home and name not in request.exclude:
                found.append((name, 0, False))
                if len(found) - taken >= CANDIDATES:
                    break
        return found

    def _prefill(
        self, request: AdmitRequest, decode: Replica, prompt: int, uncached: int
    ) -> tuple[Replica | None, int, str]:
        limit = self._spec.local_prefill_max_tokens
        if not request.disaggregate:
            return None, 0, "decode computes the prompt: this form cannot be handed over"
        if uncached <= limit:
            what = "the prompt is short" if uncached == prompt else "most of the prompt is cached there"
            return None, 0, f"decode computes the prompt: {what} ({uncached} tokens to compute, limit {limit})"
        facts = decode.announcement
        ranks = int(facts.fingerprint.geometry.get("tensor_parallel", 1))
        num_bytes = ranks * -(-prompt // facts.block_tokens) * decode.page_bytes
        if num_bytes > self._staging_bytes_max:
            most = self._staging_bytes_max
            return None, 0, f"decode computes the prompt: {num_bytes} staging bytes, staging_bytes_max is {most}"
        pool = self._pools.get((Role.PREFILL, facts.generation))
        if pool is None or not len(pool.index):
            return None, 0, "decode computes the prompt: no prefill replica is ready"
        pages, holders = pool.prefixes.longest(request.prefix_hashes) if request.prefix_hashes else (0, ())
        best: tuple[int, Replica, int] | None = None
        for name in (*holders, *islice(pool.index.least(), CANDIDATES)):
            if name not in pool.index or name in request.exclude:
                continue
            replica = self._replicas[name]
            tokens = prompt
            if pages and name in holders:
                tokens = max(1, prompt - pages * replica.announcement.block_tokens)
            ahead = _queued(replica)
            if best is None or ahead + tokens < best[0]:
                best = ahead + tokens, replica, tokens
        if best is None:
            return None, 0, "decode computes the prompt: every prefill replica is excluded"
        ahead, replica, tokens = best
        cached = f", {prompt - tokens} of them cached" if tokens < prompt else ""
        return replica, tokens, f"{replica.id} has {ahead - tokens} prompt tokens before this one's {prompt}{cached}"


def _queued(replica: Replica) -> int:
    """Prompt tokens a prefill replica still has to compute, as far as we know."""
    return max(replica.inflight_tokens, replica.occupancy.waiting_prompt_tokens)


# -- who waits


@dataclass(slots=True, eq=False)
class Waiting(Tracked):
    call_id: int
    request: AdmitRequest
    since_ns: int
    until_ns: int
    cost: float  # what the request takes, for the fairness between tenants (tokens)
    ticket_id: TicketId = 0  # a live ticket that needs a new place; 0: a new request
    generation: str | None = None
    not_before_ns: int = 0
    also: TrackedList[int] = field(default_factory=TrackedList)  # further calls that wait for the same answer

    @property
    def queue(self) -> tuple[str, str]:
        """Tenant and tokenizer: who stands in one queue."""
        return self.request.tenant, self.request.tokenizer


class WaitingRoom(Tracked):
    """Bounded queue, fair between tenants by tokens: the tenant that has had least goes first.

    Inside a tenant: higher priority first, then first come. A request that was already running and lost its replica
    goes before all of these and does not count against the bound. The head of a tenant that does not fit lets others
    pass, until it has waited for `AGED` of its time; from then on nobody passes it, unless no replica that is here
    could ever take it. Requests in the tokens of different models wait in queues of their own.
    """

    AGED = 0.25

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._again: TrackedList[Waiting] = TrackedList()
        # By tenant and tokenizer: (-priority, number, waiting), sorted.
        self._tenants: TrackedDict[tuple[str, str], TrackedList[tuple[int, int, Waiting]]] = TrackedDict()
        self._served: TrackedDict[tuple[str, str], float] = TrackedDict()  # virtual time of each tenant that waits
        self._clock = 0.0  # virtual time: of the tenant served last
        self._number = 0
        self._waiting: TrackedDict[int, Waiting] = TrackedDict()  # by call; what is not in here is skipped in the lists

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
        tenant = waiting.queue
        if tenant not in self._tenants:
            self._tenants[tenant] = TrackedList()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._clock)
        self._number += 1
        insort(self._tenants[tenant], (-waiting.request.priority, self._number, waiting))

    def drop(self, call_id: int) -> Waiting | None:
        waiting: Waiting | None = self._waiting.pop(call_id, None)
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

    def heads(self, now_ns: int, has_pool: Callable[[AdmitRequest, str | None], bool]) -> list[Waiting]:
        """Who may be tried now, in order; an aged head for which there is a pool ends the list."""
        found: list[Waiting] = []
        for waiting in self._again:
            if now_ns < waiting.not_before_ns:
                continue
            found.append(waiting)
            if self._aged(waiting, now_ns) and has_pool(waiting.request, waiting.generation):
                return found
        for tenant in sorted(self._tenants, key=lambda name: (self._served[name], name)):
            queue = self._tenants[tenant]
            while queue and queue[0][2].call_id not in self._waiting:
                queue.pop(0)
            if not queue:
                del self._tenants[tenant]
                if self._served[tenant] <= self._clock:
                    del self._served[tenant]  # it would start from the clock anyway
                continue
            head = queue[0][2]
            found.append(head)
            if self._aged(head, now_ns) and has_pool(head.request, head.generation):
                break
        return found

    def serve(self, waiting: Waiting) -> None:
        """It got its place: leaves, and its tenant has had that much more."""
        self.drop(waiting.call_id)
        if not waiting.ticket_id:
            tenant = waiting.queue
            self._clock = max(self._clock, self._served.get(tenant, 0.0))
            self._served[tenant] = self._served.get(tenant, self._clock) + waiting.cost

    def _aged(self, waiting: Waiting, now_ns: int) -> bool:
        return now_ns - waiting.since_ns >= self.AGED * (waiting.until_ns - waiting.since_ns)

    def expired(self, now_ns: int) -> list[Waiting]:
        return [waiting for waiting in self._waiting.values() if now_ns >= waiting.until_ns]
