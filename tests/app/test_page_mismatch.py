"""A page was not the request's own, by policy `retry`: run again elsewhere, once, from its tokens so far.

1. No token twice, none missing; what was computed for others before is not read again.
2. At most once under one ticket, however many of its sequences are hit.
3. A replica that ended a request is not counted as lost.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import FakeCluster, request, tokens_of, until
from vllm.v1.engine import EngineCoreRequest, FinishReason

from actors.messages import Outcome, Overloaded, Role
from app.metrics import FrontendMetrics
from app.request.core_client import FerryCoreClient
from app.request.events import PAGE_INTEGRITY_ERROR, RequestError

STOP = FinishReason.STOP
RETRIES = "pageferry_page_integrity_retries_total"
ERRORS = "pageferry_page_integrity_errors_total"


class Watch:
    """What a client with policy `retry` observes, and the faults it reports."""

    def __init__(self, far: FakeCluster) -> None:
        self.seen: dict[str, float] = {}
        self.faults: list[RequestError] = []
        metrics = FrontendMetrics(self)
        self.client = FerryCoreClient(
            "f", far, far, far, block_tokens=4, retries_mismatch=True, num_engines=2, metrics=metrics
        )
        self.client.on_fault = lambda request_id, fault: self.faults.append(fault)

    def __getattr__(self, kind: str) -> Any:
        """The metrics backend: how often each metric was recorded with something."""
        assert kind in ("Counter", "Gauge", "Histogram")
        return self._make

    def _make(self, name: str, **_: Any) -> Any:
        seen = self.seen

        class Made:
            def set_default_tags(self, tags: dict[str, str]) -> None:
                pass

            def inc(self, value: float, tags: dict[str, str]) -> None:
                seen[name] = seen.get(name, 0) + (value > 0)

            set = observe = _record = inc

        return Made()

    async def add(self, *requests: EngineCoreRequest) -> None:
        name = requests[0].request_id.partition("_")[2]
        if name:
            self.client.begin_group(name, len(requests))
        for each in requests:
            await self.client.add_request_async(each)
        self.client.end_group(name)

    async def settled(self) -> None:
        await until(lambda: not self.client.runs and not self.client.groups)
        self.client.shutdown()


@pytest.fixture
def far() -> FakeCluster:
    made = FakeCluster()
    made.use_prefill = False
    made.lost_answers = [made.ticket(1, 2, prefill="p1", decode="d2")]
    return made


async def test_it_goes_on_elsewhere_from_its_tokens_and_apart(far: FakeCluster) -> None:
    watch, d1, d2 = Watch(far), far.decodes["d1"], far.decodes["d2"]
    await watch.add(request())
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50, cached=0)
    d1.emit("r", 51)
    assert await tokens_of(watch.client, "r", 2) == [50, 51]
    d1.page_mismatch("r")
    await until(lambda: "r~2" in d2.submitted)
    again = d2.submitted["r~2"]
    assert again.prompt_token_ids == [*range(10), 50, 51]
    assert again.cache_salt and d1.submitted["r"].cache_salt is None, "no page of before is read again"
    assert far.prefill_calls == [("p1", 2)] and far.mismatches == 1
    assert far.losses[0][:2] == (Role.DECODE, "d1") and far.losses[0][3] == 2
    d2.emit("r~2", 52, cached=0, finish=STOP)
    assert await tokens_of(watch.client, "r", 1) == [52]
    await watch.settled()
    assert far.ends == [(1, Outcome.DONE, 3)] and watch.faults == []
    assert watch.seen[RETRIES] == 1 and watch.seen["pageferry_resumed_total"] == 1
    assert watch.seen["pageferry_replicas_lost_total"] == watch.seen[ERRORS] == 0
    assert d1.aborted == [], "the engine had ended it by itself"


async def test_a_second_time_it_ends(far: FakeCluster) -> None:
    watch, d1, d2 = Watch(far), far.decodes["d1"], far.decodes["d2"]
    await watch.add(request())
    await until(lambda: "r" in d1.submitted)
    d1.page_mismatch("r")
    await until(lambda: "r~2" in d2.submitted)
    d2.emit("r~2", 50, cached=0)
    d2.page_mismatch("r~2")
    await watch.settled()
    [fault] = watch.faults
    assert (fault.status, fault.kind) == (500, PAGE_INTEGRITY_ERROR) and "same reason before" in fault.message
    assert far.ends == [(1, Outcome.FAILED, 1)]
    assert watch.seen[RETRIES] == 1 and watch.seen[ERRORS] == 1


async def test_tenants_stay_apart_when_they_run_again(far: FakeCluster) -> None:
    salts = set()
    for tenant in ("red", "blue"):
        side = FakeCluster()
        side.use_prefill, side.lost_answers = False, [side.ticket(1, 2, decode="d2")]
        watch = Watch(side)
        made = request()
        made.cache_salt = tenant
        await watch.add(made)
        await until(lambda side=side: "r" in side.decodes["d1"].submitted)
        side.decodes["d1"].page_mismatch("r")
        await until(lambda side=side: "r~2" in side.decodes["d2"].submitted)
        salts.add(side.decodes["d2"].submitted["r~2"].cache_salt)
        side.decodes["d2"].emit("r~2", 1, cached=0, finish=STOP)
        await watch.settled()
    assert len(salts) == 2 and not salts & {"red", "blue", None}


async def test_without_room_it_ends_with_the_reason(far: FakeCluster) -> None:
    far.lost_answers = [Overloaded(reason="decode is full", retry_after_s=2.0)]
    watch, d1 = Watch(far), far.decodes["d1"]
    await watch.add(request())
    await until(lambda: "r" in d1.submitted)
    d1.page_mismatch("r")
    await watch.settled()
    [fault] = watch.faults
    assert (fault.status, fault.kind) == (500, PAGE_INTEGRITY_ERROR) and "decode is full" in fault.message
    assert watch.seen[RETRIES] == 0


async def two(watch: Watch, far: FakeCluster, **params: Any) -> tuple[str, str]:
    """Two sequences of one prompt that decode side by side; the second follows once the first has a token."""
    await watch.add(request("0_g", **params), request("1_g", **params))
    d1 = far.decodes["d1"]
    await until(lambda: "0_g" in d1.submitted)
    d1.emit("0_g", 50, cached=0)
    await until(lambda: "1_g" in d1.submitted)
    return "0_g", "1_g"


async def test_siblings_that_are_hit_together_count_once(far: FakeCluster) -> None:
    watch, d1, d2 = Watch(far), far.decodes["d1"], far.decodes["d2"]
    for name in await two(watch, far):
        d1.page_mismatch(name)
    await until(lambda: bool(d2.submitted))
    [first] = d2.submitted  # whichever heard of it first carries the prompt
    second = {"0_g~2": "1_g~2", "1_g~2": "0_g~2"}[first]
    d2.emit(first, 51, cached=0, finish=STOP)
    await until(lambda: second in d2.submitted)
    assert d2.submitted["0_g~2"].cache_salt == d2.submitted["1_g~2"].cache_salt, "they share the prompt's pages again"
    d2.emit(second, 60, cached=0, finish=STOP)
    await watch.settled()
    assert watch.seen[RETRIES] == 1 and far.mismatches == 1 and len(far.losses) == 1
    assert watch.faults == [] and far.ends == [(1, Outcome.DONE, 3)]


async def test_a_sibling_that_cannot_move_keeps_both_where_they_are(far: FakeCluster) -> None:
    """Random sampling with a penalty and tokens out: moving one would break the other, so only the one ends."""
    watch, d1 = Watch(far), far.decodes["d1"]
    await two(watch, far, temperature=1.0, presence_penalty=0.5)
    d1.page_mismatch("1_g")  # has no token yet, and could start again by itself
    await until(lambda: watch.faults)
    assert watch.faults[0].kind == PAGE_INTEGRITY_ERROR and "cannot be continued exactly" in watch.faults[0].message
    assert "0_g" in watch.client.runs and far.losses == []
    d1.emit("0_g", 51, finish=STOP)
    await watch.settled()
    assert far.ends == [(1, Outcome.FAILED, 2)]
