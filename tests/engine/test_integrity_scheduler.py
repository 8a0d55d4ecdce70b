"""vLLM's real scheduler with ours on top, our connector and check, and a model runner that only keeps block tables.

Thousands of steps a minute, synchronous and asynchronous (one step always in flight, as on a GPU):
1. Honest traffic (prefix sharing, chunked prefill, preemption, aborts, hand-overs that land or fail) ends no request
   and leaves a clean ledger; every step is proven.
2. A request whose table is spoiled ends with ERROR and `page_integrity`, with no token of that step or a later one;
   everybody else gets every token.
3. A request that was given a page in the step that should have written it, but was masked, ends with it.
4. A lost proof is counted, and raises no alarm.
5. With `integrity.mode: off` it is vLLM's own scheduler, and no step carries anything of integrity.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.config import engine_kwargs
from actors.engine.fault_injection import Faults
from actors.engine.integrity.ledger import COUNTER_BITS, tag_epoch
from actors.engine.integrity.scheduler import FerryAsyncScheduler, FerryScheduler
from actors.engine.integrity.tag_check import TagCheck
from actors.engine.integrity.tracker import CheckTracker, NoTracker
from actors.engine.orders import OpenParams, to_params
from actors.engine.runner_view import StepView
from actors.messages import HandOver, Lease, Role, Seal
from cluster.spec import ClusterSpec

MODEL = ".models/smollm2-135m-instruct"
BLOCK = 32
NUM_PAGES = 26
MAX_LEN = 320


def vllm_config(mode: str, asynchronous: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    pool = {"block_tokens": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 96, "kv_dtype": "fp8_e4m3"}
    engine = {"enforce_eager": True, "num_gpu_blocks_override": NUM_PAGES}
    spec = ClusterSpec.parse(
        {
            "model": {"path": MODEL, "max_model_len": MAX_LEN},
            "pools": {"decode": {**pool, "engine_args": engine}},
            "integrity": {"mode": mode},
        }
    )
    config = AsyncEngineArgs(**engine_kwargs(spec, Role.DECODE, "r", "/nowhere")).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = NUM_PAGES
    return config


def scheduler_of(config: Any) -> Scheduler:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    made: Scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_PAGES, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    return made


class Engine:
    """A scheduler and a runner without a model. `flight` steps are scheduled before the first is processed."""

    def __init__(self, config: Any, rng: random.Random) -> None:
        self.rng = rng
        self.scheduler = scheduler_of(config)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.flight = 2 if config.scheduler_config.async_scheduling else 1
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.check = TagCheck(NUM_PAGES, BLOCK, 8, MAX_LEN // BLOCK + 1)
        self.tables: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}  # tokens the runner has, prompt and sampled
        self.landing: dict[str, tuple[int, bool]] = {}  # request -> steps to go, good?
        self.sampled: dict[str, int] = {}
        self.emitted: dict[str, int] = {}
        self.ended: dict[str, tuple[str, Any]] = {}
        self.spoil: dict[str, int] = {}  # request -> tokens sampled before its table was spoiled
        self.want_spoiled = 0.0
        self.preemptions = 0
        self.lose_proof = False
        self.names = 0

    @property
    def tracker(self) -> CheckTracker:
        tracker = self.scheduler.connector.scheduler.tracker
        assert isinstance(tracker, CheckTracker)
        return tracker

    def add(self, prompt: list[int], max_tokens: int, hand_over: bool = False) -> str:
        self.names += 1
        name = f"r{self.names}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if hand_over:
            seal = Seal(ticket_id=1, attempt=1, layout_fingerprint="f", num_tokens=len(prompt), digests=((1,),))
            lease = Lease(ticket_id=1, attempt=1, node_id="n", segment="s", offset=0, num_bytes=1)
            over = HandOver(ticket_id=1, attempt=1, seal=seal, lease=lease, deadline_s=1.0)
            params.extra_args = {"kv_transfer_params": to_params(OpenParams(hand_over=over))}
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))
        self.emitted[name] = self.sampled[name] = 0
        return name

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.queue.append((scheduled, self._execute(scheduled)))
        while len(self.queue) >= self.flight:
            self._process()

    def drain(self) -> None:
        for _ in range(400):
            if not self.scheduler.requests and not self.queue:
                break
            self.step()
        while self.queue:
            self._process()
        self.step()

    def _process(self) -> None:
        scheduled, output = self.queue.popleft()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                self.emitted[each.request_id] += len(each.new_token_ids)
                if each.finish_reason is not None:
                    assert each.request_id not in self.ended
                    self.ended[each.request_id] = (str(each.finish_reason), each.stop_reason)

    # -- the runner

    def _execute(self, scheduled: Any) -> ModelRunnerOutput:
        metadata = scheduled.kv_connector_metadata
        for name in scheduled.finished_req_ids:
            self.tables.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.known[new.req_id] = len(new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self.preemptions += 1
                self.tables[name] = list(blocks[0])
            elif blocks is not None:
                self.tables[name] += blocks[0]
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        rows = list(scheduled.num_scheduled_tokens)
        self.rng.shuffle(rows)
        lengths = [computed[name] + scheduled.num_scheduled_tokens[name] for name in rows]
        self._spoil(rows, lengths)
        proof = None
        if scheduled.kv_connector_metadata.integrity is not None:
            assert scheduled.has_sync_kv_loads
            self.check.step(metadata.integrity, self._forward(rows, lengths, scheduled) if rows else None)
            proof = pickle.loads(pickle.dumps(self.check.proof()))
        if self.lose_proof:
            proof = None
        tokens = []
        for name, length in zip(rows, lengths):
            if length >= self.known[name]:
                self.known[name] += 1
                self.sampled[name] += 1
                tokens.append([self.sampled[name]])
            else:
                tokens.append([])
        finished, failed = self._land(metadata)
        return ModelRunnerOutput(
            req_ids=rows,
            req_id_to_index={name: row for row, name in enumerate(rows)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(
                finished_recving=finished, failed_recving=failed, kv_connector_worker_meta=proof
            ),
        )

    def _forward(self, rows: list[str], lengths: list[int], scheduled: Any) -> StepView:
        table = torch.zeros((len(rows), MAX_LEN // BLOCK + 1), dtype=torch.int32)
        for row, name in enumerate(rows):
            table[row, : len(self.tables[name])] = torch.tensor(self.tables[name], dtype=torch.int32)
        queries = torch.tensor([0, *(scheduled.num_scheduled_tokens[name] for name in rows)], dtype=torch.int32)
        starts, slots = queries.cumsum(0).to(torch.int32), torch.arange(int(queries.sum()))
        return StepView(rows, table, torch.tensor(lengths, dtype=torch.int32), starts, slots)

    def _spoil(self, rows: list[str], lengths: list[int]) -> None:
        if not rows or self.rng.random() >= self.want_spoiled:
            return
        row = self.rng.randrange(len(rows))
        name = rows[row]
        position = self.rng.randrange(-(-lengths[row] // BLOCK))
        other = self.rng.choice([page for page in range(NUM_PAGES) if page != self.tables[name][position]])
        self.tables[name][position] = other
        self.spoil.setdefault(name, self.sampled[name])

    def _land(self, metadata: Any) -> tuple[set[str], set[str]]:
        for job in metadata.opens:
            if job.block_ids:
                assert self.check.still_current(job.block_ids, job.tags)
                self.landing[job.request_id] = (self.rng.randint(0, 4), self.rng.random() < 0.7)
        done = {name for name, (left, _) in self.landing.items() if left == 0}
        failed = {name for name in done if not self.landing.pop(name)[1]}
        self.landing = {name: (left - 1, good) for name, (left, good) in self.landing.items() if name not in done}
        return done, failed


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def config(request: Any) -> Any:
    return vllm_config("check", request.param)


def traffic(engine: Engine, steps: int, aborts: bool = True) -> None:
    rng = engine.rng
    heads = [[i] * 96 for i in range(3)]
    for _ in range(steps):
        if rng.random() < 0.25 and len(engine.scheduler.requests) < 14:
            head = rng.choice(heads)[: rng.choice([0, 32, 64, 96])]
            prompt = head + [rng.randrange(1000) for _ in range(rng.randint(1, 90))]
            engine.add(prompt, rng.randint(1, 80), hand_over=rng.random() < 0.3)
        if aborts and engine.scheduler.requests and rng.random() < 0.05:
            name = rng.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            engine.ended.setdefault(name, ("abort", None))
        engine.step()


@pytest.mark.parametrize("seed", range(3))
def test_honest_traffic_is_clean(config: Any, seed: int) -> None:
    engine = Engine(config, random.Random(seed))
    kind = FerryAsyncScheduler if engine.flight == 2 else FerryScheduler
    assert type(engine.scheduler) is kind
    traffic(engine, 900)
    engine.drain()
    assert engine.preemptions > 5
    assert len(engine.ended) > 30 and {reason for reason, _ in engine.ended.values()} == {"length", "abort"}
    audit = engine.tracker.audit(idle=True)
    assert audit["laws_broken"] == [] and audit["breaches"] == [] and audit["verdicts"] == []
    counters = engine.tracker.report()["counters"]
    assert counters["integrity_checks"] == counters["integrity_steps"] > 600
    assert counters["integrity_steps_unproven"] == counters["integrity_requests_ended"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_spoiled_end_and_nothing_of_that_step_leaves(config: Any, seed: int) -> None:
    engine = Engine(config, random.Random(100 + seed))
    engine.want_spoiled = 0.03
    traffic(engine, 500, aborts=False)
    engine.want_spoiled = 0.0
    engine.drain()
    failed = {name for name, (reason, _) in engine.ended.items() if reason == "error"}
    assert len(engine.spoil) > 3
    # Who shares pages that a masked row should have written ends with it; the rest of the failed were spoiled.
    named = {verdict["request_id"] for verdict in engine.tracker.audit(idle=True)["verdicts"]}
    assert set(engine.spoil) <= failed
    assert failed - set(engine.spoil) <= named and len(failed) < 2 * len(engine.spoil)
    for name in failed:
        assert engine.ended[name][1] == "page_integrity"
    for name, before in engine.spoil.items():
        assert engine.emitted[name] == before
    for name, (reason, _) in engine.ended.items():
        if reason == "length":
            assert engine.emitted[name] <= engine.sampled[name] and name not in engine.spoil
    assert engine.tracker.audit(idle=True)["laws_broken"] == []
    engine.tracker.lift_quarantine()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_PAGES - 1


def test_a_sharer_of_unwritten_pages_ends_with_the_masked_row(config: Any) -> None:
    engine = Engine(config, random.Random(5))
    head = [9] * (2 * BLOCK)
    first = engine.add([*head, 1], 8)
    second = engine.add([*head, 2], 8)
    bystander = engine.add([3] * 20, 8)
    spoiled = [False]

    def spoil(rows: list[str], lengths: list[int]) -> None:
        # In the very step that computes the head: the second request was given its pages by the prefix cache.
        if first in rows and not spoiled[0]:
            spoiled[0] = True
            engine.tables[first][0] = NUM_PAGES - 1

    engine._spoil = spoil  # type: ignore[method-assign]
    engine.drain()
    assert engine.ended[first] == engine.ended[second] == ("error", "page_integrity")
    assert engine.emitted[first] == engine.emitted[second] == 0
    assert engine.ended[bystander] == ("length", None) and engine.emitted[bystander] == 8
    third = engine.add([*head, 4], 4)  # the prefix cache must not offer what was never written
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(engine.scheduler.requests[third])[1] == 0
    engine.drain()
    assert engine.ended[third] == ("length", None)


def test_a_lost_proof_is_counted(config: Any) -> None:
    engine = Engine(config, random.Random(6))
    engine.add([1] * 40, 5)
    engine.lose_proof = True
    engine.drain()
    counters = engine.tracker.report()["counters"]
    assert counters["integrity_steps_unproven"] == counters["integrity_steps"] > 0
    assert counters["integrity_checks"] == 0 and counters["integrity_unproven_s"] > 0
    assert {reason for reason, _ in engine.ended.values()} == {"length"}
    engine.lose_proof = False
    engine.add([1] * 40, 5)
    engine.drain()
    assert engine.tracker.report()["counters"]["integrity_unproven_s"] == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_off_is_vllms_own_scheduler(asynchronous: bool) -> None:
    engine = Engine(vllm_config("off", asynchronous), random.Random(7))
    assert type(engine.scheduler) is (AsyncScheduler if asynchronous else Scheduler)
    assert type(engine.scheduler.connector.scheduler.tracker) is NoTracker
    assert engine.scheduler.kv_cache_manager.block_pool.metrics_collector is None
    engine.add([1] * 70, 5)
    scheduled = engine.scheduler.schedule()
    assert scheduled.kv_connector_metadata.integrity is None and not scheduled.has_sync_kv_loads
    [delta] = engine.scheduler.connector.scheduler.tracker.take_page_deltas(100).deltas
    [name] = engine.scheduler.requests
    table = engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
    assert delta.request_id == name and list(delta.added) == table, "the page book has owners without tags"


def test_a_repeated_reset_of_the_prefix_cache_works_although_pages_are_quarantined(config: Any) -> None:
    engine = Engine(config, random.Random(8))
    engine.want_spoiled = 1.0
    engine.add([1] * 70, 30)
    for _ in range(6):
        engine.step()
    engine.want_spoiled = 0.0
    engine.drain()
    assert engine.tracker.ledger.num_quarantined > 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.tracker.ledger.num_quarantined == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_spoiled_pool_ends_some_and_kills_no_engine(config: Any, seed: int) -> None:
    """Pages freed early, taken, or one reference short, at any time of a busy schedule with a step in flight."""
    engine = Engine(config, random.Random(200 + seed))
    kinds = ("page_freed_and_taken", "page_freed_early", "shared_page_freed_early")
    faults = Faults(kinds, seed)
    manager, guard = engine.scheduler.kv_cache_manager, engine.tracker.guard
    fired = 0
    for trial in range(60):
        traffic(engine, 8, aborts=False)
        if engine.scheduler.running:
            victim = engine.rng.choice(engine.scheduler.running).request_id
            fired += faults.on_pool(engine.rng.choice(kinds), trial, victim, manager, guard)["fired"]
    engine.drain()
    assert fired > 10
    assert {reason for reason, _ in engine.ended.values()} <= {"length", "error"}
    for name, (reason, stop) in engine.ended.items():
        assert (reason == "error") == (stop == "page_integrity")
        assert engine.emitted[name] <= engine.sampled[name]
    assert len([1 for reason, _ in engine.ended.values() if reason == "error"]) <= fired
    audit = engine.tracker.audit(idle=True)
    assert audit["laws_broken"] == [] and sum(engine.tracker.ledger.num_breaches.values()) > 0
    engine.tracker.lift_quarantine()
    assert manager.block_pool.get_num_free_blocks() == NUM_PAGES - 1


def test_tags_begin_with_the_life_that_the_replica_announces() -> None:
    config = vllm_config("check", False)
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["incarnation"] = 5
    connector: Any = scheduler_of(config).connector
    first = connector.scheduler.tracker.ledger.allocated(1)
    assert first >> COUNTER_BITS == tag_epoch("r", 5) != tag_epoch("r", 6)
