"""What a replica's host makes of its engine's answer for the controller, without an engine.

1. Page deltas and verdicts travel once; what the controller may have missed is sent again from the beginning.
2. A verdict becomes a controller event that names the ticket, whichever of verdict and last output comes first.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

from actors.engine.decode import DecodeServer
from actors.engine.engine_counters import EngineCounters, TokenRate
from actors.engine.in_flight import InFlight
from actors.engine.pending_report import MISMATCHES_REMEMBERED, PendingReport
from actors.messages import PAGE_INTEGRITY, HeartbeatReply, Join, PageDelta, ReplicaHeartbeat, Ticket
from actors.spans import Tracer
from ops.engine_pair import LocalHandle

COUNTS = ("blocks_total", "blocks_free", "blocks_held", "blocks_quarantined", "running", "waiting")
VERDICT = {"request_id": "r", "position": 1, "page_found": 9, "page_expected": 4, "text": "page 9", "step": 3}


class Controller:
    def __init__(self) -> None:
        self.beats: list[ReplicaHeartbeat] = []
        self.joined = 0
        self.known = True
        self.away = False

    async def call(self, message: Any) -> HeartbeatReply | None:
        if isinstance(message, Join):
            self.joined += 1
            return None
        if self.away:
            raise ConnectionError("away")
        self.beats.append(message)
        return HeartbeatReply(epoch=1, known=self.known)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def host(controller: Controller) -> DecodeServer:
    made = object.__new__(DecodeServer)  # `__init__` starts an engine
    made.replica_id, made.incarnation = "d", 1
    made._live, made._report, made._streams = {}, PendingReport(), {}
    made._token_rate, made._engine = TokenRate(), EngineCounters()
    made._tracer, made._woken = Tracer(), asyncio.Event()
    made.controller = LocalHandle(controller)
    made._get_controller = lambda: LocalHandle(controller)
    made.announcement = lambda: None  # type: ignore[method-assign, assignment, return-value]
    return made


def answer(
    host: DecodeServer, *pages: tuple[str, bool, list[int], list[int]], whole: bool = False, **more: Any
) -> None:
    """The engine answers, over the wire that vLLM uses for utilities."""
    stats = dict.fromkeys(COUNTS, 0) | {"counters": {}, "pages": pages, "pages_whole": whole, "verdicts": []} | more
    host._stats = msgspec.msgpack.decode(msgspec.msgpack.encode(stats))
    host._report.add_answer(host._stats, host._live)


async def test_page_deltas_travel_once(host: DecodeServer, controller: Controller) -> None:
    answer(host, ("gone", True, [], []), ("r", False, [4, 2], [104, 102]), whole=True)
    await host._beat()
    await host._beat()  # a long step: the engine has not answered again
    first, second = controller.beats
    gone, taken = first.pages
    assert gone == PageDelta(request_id="gone", released=True) and list(taken.added.items()) == [(4, 104), (2, 102)]
    assert first.pages_whole and second.pages == () and not second.pages_whole


async def test_a_whole_report_of_nothing_is_sent_too(host: DecodeServer, controller: Controller) -> None:
    answer(host, whole=True)
    await host._beat()
    assert controller.beats[0].pages_whole and controller.beats[0].pages == ()


async def test_a_controller_that_may_have_missed_something_is_sent_everything(
    host: DecodeServer, controller: Controller
) -> None:
    controller.known = False
    answer(host, ("r", False, [4], [104]))
    await host._beat()
    assert host._report.wants_all_pages and controller.joined == 1, "it is a new one"
    host._report.wants_all_pages, controller.known, controller.away = False, True, True
    await host._beat()
    assert host._report.wants_all_pages, "it may have died with what it had heard"


async def test_with_integrity_off_there_is_nothing_to_send(host: DecodeServer, controller: Controller) -> None:
    host._stats = dict.fromkeys(COUNTS, 0) | {"counters": {}}
    host._report.add_answer(host._stats, host._live)
    await host._beat()
    assert controller.beats[0].pages == () and controller.beats[0].events == ()


@pytest.mark.parametrize("verdict_first", [True, False])
async def test_a_verdict_is_an_event_with_its_ticket(
    host: DecodeServer, controller: Controller, verdict_first: bool
) -> None:
    ticket = Ticket(ticket_id=7, attempt=1, request_id="r", frontend_id="f", epoch=1, decode="d")
    host._live["r"] = InFlight(ticket, "f")
    output = SimpleNamespace(request_id="r", new_token_ids=[], finish_reason="error", stop_reason=PAGE_INTEGRITY)
    outputs = SimpleNamespace(outputs=[output], scheduler_stats=None)
    if not verdict_first:
        host._on_outputs(outputs)
    answer(host, verdicts=[VERDICT])
    if verdict_first:
        host._on_outputs(outputs)
    controller.away = True
    await host._beat()  # it does not arrive
    controller.away = False
    await host._beat()
    [event] = [event for event in controller.beats[0].events if event.kind == "tag_mismatch"]
    assert (event.ticket_id, event.request_id, event.position, event.detail) == (7, "r", 1, "page 9")
    await host._beat()
    assert controller.beats[1].events == ()


def test_what_is_remembered_of_ended_requests_is_bounded(host: DecodeServer) -> None:
    live = SimpleNamespace(ticket=SimpleNamespace(ticket_id=1))
    for number in range(MISMATCHES_REMEMBERED + 5):
        host._report.note_mismatch(SimpleNamespace(request_id=str(number), stop_reason=PAGE_INTEGRITY), live)  # type: ignore[arg-type]
    host._report.note_mismatch(SimpleNamespace(request_id="stopped", stop_reason=None), live)  # type: ignore[arg-type]
    assert len(host._report._mismatched) == MISMATCHES_REMEMBERED and "stopped" not in host._report._mismatched


async def test_what_vllm_says_of_its_steps_is_summed_up(host: DecodeServer, controller: Controller) -> None:
    answer(host)
    cached = EngineCoreOutput(request_id="r", new_token_ids=[5], prefill_stats=PrefillStats())
    assert cached.prefill_stats is not None
    cached.prefill_stats.set(num_prompt_tokens=100, num_local_cached_tokens=64, num_external_cached_tokens=0)
    preempted = EngineCoreOutput(
        request_id="s",
        new_token_ids=[6, 7],
        events=[
            EngineCoreEvent.new_event(kind) for kind in (EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED)
        ],
    )
    stats = SchedulerStats()
    stats.prefix_cache_stats.record(100, 64, preempted=False)
    for outputs in (EngineCoreOutputs(outputs=[cached], scheduler_stats=stats), EngineCoreOutputs(outputs=[preempted])):
        host._engine.add(outputs)
    await host._beat()
    counters = controller.beats[-1].counters
    assert counters == {
        "steps": 1,
        "preemptions": 1,
        "prefix_queries": 100,
        "prefix_hits": 64,
        "prompt_tokens": 36,
        "tokens_generated": 3,
    }
