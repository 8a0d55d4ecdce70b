"""The scheduler half alone: which pages are sealed and opened in which step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.engine.integrity.tracker import NoTracker
from actors.engine.orders import OpenParams, SealParams, from_params, to_params
from actors.engine.scheduler_half import FerryConnectorScheduler
from actors.messages import HandOver, Lease, Seal

BLOCK = 32
LEASE = Lease(ticket_id=1, attempt=1, node_id="n", segment="s", offset=0, num_bytes=1)


def seal_order(num_tokens: int) -> SealParams:
    return SealParams(ticket_id=1, attempt=1, num_tokens=num_tokens, wire_layout={}, lease=LEASE)


def open_order(num_tokens: int) -> OpenParams:
    seal = Seal(ticket_id=1, attempt=1, layout_fingerprint="f", num_tokens=num_tokens, digests=((1,),))
    return OpenParams(hand_over=HandOver(ticket_id=1, attempt=1, seal=seal, lease=LEASE, deadline_s=1.0))


def step(new: dict[str, tuple[int, int]] | None = None, cached: dict[str, tuple[int, int]] | None = None) -> Any:
    """request -> (computed before, scheduled now)"""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={r: n for r, (_, n) in (new | cached).items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=c) for r, (c, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[c for c, _ in cached.values()]
        ),
    )


def half(blocks: dict[str, list[int]] | None = None) -> FerryConnectorScheduler:
    return FerryConnectorScheduler(BLOCK, lambda request: (blocks or {})[request], NoTracker())


def test_orders_survive_the_engine_request() -> None:
    for order in (seal_order(7), open_order(9)):
        assert from_params(to_params(order)) == order
    assert from_params(None) is None and from_params({"other": 1}) is None


def test_chunks_seal_whole_pages_and_the_last_chunk_the_rest() -> None:
    scheduler = half({"a": [7, 8, 9, 10]})
    scheduler.on_new_request("a", to_params(seal_order(100)))
    jobs = scheduler.build(step(new={"a": (0, 40)})).seals
    assert [(j.first_page, j.block_ids, j.last) for j in jobs] == [(0, [7], False)]
    jobs = scheduler.build(step(cached={"a": (40, 40)})).seals
    assert [(j.first_page, j.block_ids, j.last) for j in jobs] == [(1, [8], False)]
    jobs = scheduler.build(step(cached={"a": (80, 20)})).seals
    assert [(j.first_page, j.block_ids, j.last) for j in jobs] == [(2, [9, 10], True)]
    assert scheduler.idle() and scheduler.counters.pages_sealed == 4


def test_a_prefix_hit_is_sealed_too() -> None:
    scheduler = half({"a": [1, 2, 3]})
    scheduler.on_new_request("a", to_params(seal_order(70)))
    (job,) = scheduler.build(step(new={"a": (64, 6)})).seals
    assert (job.first_page, job.block_ids, job.last) == (0, [1, 2, 3], True)


def test_after_a_preemption_sealed_pages_stay_sealed() -> None:
    blocks = {"a": [1, 2, 3]}
    scheduler = half(blocks)
    scheduler.on_new_request("a", to_params(seal_order(96)))
    scheduler.build(step(new={"a": (0, 64)}))
    blocks["a"] = [20, 21, 22]  # preempted, allocated again, computed from the start
    assert scheduler.build(step(cached={"a": (0, 32)})).seals == []
    (job,) = scheduler.build(step(cached={"a": (32, 64)})).seals
    assert (job.first_page, job.block_ids, job.last) == (2, [22], True)


def test_an_abort_gives_up_the_rest_once() -> None:
    scheduler = half({"a": [1, 2]})
    scheduler.on_new_request("a", to_params(seal_order(64)))
    scheduler.build(step(new={"a": (0, 32)}))
    scheduler.on_finished("a")
    scheduler.on_finished("a")
    assert scheduler.build(step()).abandoned == [(1, 1)]
    assert scheduler.idle()


def test_open_covers_what_the_local_cache_lacks() -> None:
    scheduler = half()
    scheduler.on_new_request("a", to_params(open_order(100)))
    assert scheduler.num_external_tokens("a", 64) == 36
    scheduler.on_allocated("a", [5, 6, 7, 8, 9], 36)
    (job,) = scheduler.build(step()).opens
    assert (job.first_page, job.block_ids, job.num_tokens) == (2, [7, 8], 36)
    # Preempted later: nothing is waited for a second time.
    assert scheduler.num_external_tokens("a", 0) == 0
    scheduler.on_loaded({"a"}, set())
    assert scheduler.idle() and scheduler.counters.tokens_opened == 36


def test_a_prompt_that_is_cached_whole_is_released_unread() -> None:
    scheduler = half()
    scheduler.on_new_request("a", to_params(open_order(64)))
    assert scheduler.num_external_tokens("a", 64) == 0
    (job,) = scheduler.build(step()).opens
    assert job.block_ids == []


def test_an_abort_before_and_during_loading() -> None:
    scheduler = half()
    scheduler.on_new_request("a", to_params(open_order(64)))
    scheduler.on_finished("a")
    (job,) = scheduler.build(step()).opens
    assert job.block_ids == []
    scheduler.on_new_request("b", to_params(open_order(64)))
    scheduler.num_external_tokens("b", 0)
    scheduler.on_allocated("b", [1, 2], 64)
    scheduler.build(step())
    scheduler.on_finished("b")
    assert scheduler.build(step()).cancelled == ["b"]
    scheduler.on_loaded({"b"}, {"b"})
    assert scheduler.idle() and scheduler.counters.opens_failed == 1 and scheduler.counters.tokens_recomputed == 64
