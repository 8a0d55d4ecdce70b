"""Spans of a request: sampling, W3C contexts, phases that add up, and that off is nothing at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import pytest
from otlp_receiver import Receiver, receiving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from actors.messages import Lease, Opened, OpenedAt, Outcome, Seal, Sealed, Ticket, Verdict
from actors.spans import NO_SPAN, Tracer
from actors.tracing import tracer
from actors.transfer.spans import TransferSpans
from app.api.middleware import Access, RequestFilter
from app.client import asgi
from app.metrics import Discard, FrontendMetrics
from app.request import context
from app.request.events import End
from app.request.record import RequestRecord
from cluster.frontend_spec import TracingSpec

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_off_imports_nothing_and_does_nothing() -> None:
    """In a process of its own: other libraries import OpenTelemetry for themselves."""
    code = (
        "import sys; from actors.spans import NO_SPAN; from actors.tracing import tracer;"
        "from cluster.frontend_spec import TracingSpec;"
        "from actors.transfer.spans import TransferSpans; TransferSpans(TracingSpec(), 'n').leased((1, 1), '');"
        "made = tracer(TracingSpec(), 'frontend', 'f');"
        f"assert made.request('POST /', {PARENT!r}, '') is NO_SPAN and NO_SPAN.context == '';"
        "made.span('x', '', 1.0); NO_SPAN.child('x', 1.0); NO_SPAN.end(200);"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')]; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def handler(request: Request) -> JSONResponse:
    caller = context.current()
    record = RequestRecord(FrontendMetrics(Discard), "cmpl-1", caller, 7)
    for name in ("admit", "prefill", "hand_over", "submit"):
        began = time.monotonic()
        await asyncio.sleep(0.02)
        record.phase(name, time.monotonic() - began)
    await asyncio.sleep(0.05)
    record.ended(End(Outcome.DONE), 3, None)
    return JSONResponse({"trace": caller.span.context})


async def ask(made: Tracer, **headers: str) -> str:
    app = RequestFilter(Starlette(routes=[Route("/v1/completions", handler, methods=["POST"])]), Access(), tracer=made)
    sent = {"content-type": "application/json"} | headers
    chunks = [item async for item in asgi.call(app, "POST", "/v1/completions", sent, b"{}")]
    found: dict[str, Any] = json.loads(b"".join(chunks[1:]))
    return str(found["trace"])


def flush(made: Tracer) -> None:
    made.provider.force_flush()  # type: ignore[attr-defined]


@pytest.fixture
def receiver() -> Any:
    with receiving() as found:
        yield found


async def test_the_phases_of_a_request_are_spans_that_add_up(receiver: Receiver) -> None:
    made = tracer(TracingSpec(endpoint=receiver.url, sample_ratio=0.0), "frontend", "f-1")
    context_text = await ask(made, traceparent=PARENT, tracestate="vendor=1")
    trace = PARENT.split("-")[1]
    assert context_text.split("-")[1] == trace, "the client's trace goes on"
    await asyncio.to_thread(flush, made)
    root, *parts = receiver.of(trace)
    assert (root.name, root.parent, root.service) == (
        "POST /v1/completions",
        PARENT.split("-")[2],
        "pageferry-frontend",
    )
    assert root.attributes["http.response.status_code"] == 200 and context_text.split("-")[2] == root.id
    names = [f"frontend.{name}" for name in ("prepare", "admit", "prefill", "hand_over", "submit", "stream")]
    assert [part.name for part in parts] == names and {part.parent for part in parts} == {root.id}
    for before, after in itertools.pairwise(parts):
        assert abs(after.began - before.ended) < 0.01, "no gap and no overlap"
    assert abs(sum(part.seconds for part in parts) - root.seconds) < 0.1 * root.seconds


@pytest.mark.parametrize(
    ("ratio", "sent", "sampled"),
    [
        (1.0, "", True),
        (0.0, "", False),
        (1.0, PARENT[:-1] + "0", False),
        (0.0, "nonsense", False),
        (1.0, "00-0-0-01", True),
    ],
)
async def test_sampling_follows_the_client_and_else_the_ratio(
    ratio: float, sent: str, sampled: bool, receiver: Receiver
) -> None:
    made = tracer(TracingSpec(endpoint=receiver.url, sample_ratio=ratio), "frontend", "f-1")
    text = await ask(made, **({"traceparent": sent} if sent else {}))
    await asyncio.to_thread(flush, made)
    assert bool(text) == sampled == bool(receiver.spans)


async def test_a_collector_that_is_away_costs_the_request_nothing() -> None:
    made = tracer(TracingSpec(endpoint="http://127.0.0.1:9/v1/traces", sample_ratio=1.0), "frontend", "f-1")
    began = time.monotonic()
    assert await ask(made)
    assert time.monotonic() - began < 2


def test_staging_tells_of_sealing_and_opening_once(receiver: Receiver) -> None:
    spans = TransferSpans(TracingSpec(), "n")
    spans.configure(TracingSpec(endpoint=receiver.url))
    spans.leased((1, 1), PARENT)
    spans.reads((1, 1), PARENT)
    spans.leased((2, 1), "")
    key = {"ticket_id": 1, "attempt": 1}
    seal = Seal(**key, layout_fingerprint="x", num_tokens=32, digests=((1,),))  # type: ignore[arg-type]
    sealed = Sealed(seal=seal, lease=Lease(**key, node_id="n", segment="s", offset=0, num_bytes=8192))  # type: ignore[arg-type]
    opened = Opened(
        **key,
        replica_id="d",
        num_pages=1,
        num_bytes=8192,
        num_tokens=32,
        verdicts={Verdict.OK: 1},
        seconds=0.1,  # type: ignore[arg-type]
    )
    for _ in range(2):  # a report that failed comes again
        spans.happened((sealed, OpenedAt(opened=opened)))
    flush(spans._tracer)
    assert [(span.name, span.attributes["bytes"]) for span in receiver.spans] == [
        ("transfer.staged", 8192),
        ("transfer.opened", 8192),
    ]


def test_a_ticket_carries_the_context_and_nothing_when_it_is_not_sampled() -> None:
    assert NO_SPAN.context == Ticket(ticket_id=1, attempt=1, request_id="r", frontend_id="f", epoch=1, decode="d").trace
