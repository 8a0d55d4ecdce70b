"""One request's metrics and its line of log."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from actors.messages import Outcome, Role, Ticket
from app.metrics import OTHER, TENANTS_MAX, Discard, FrontendMetrics
from app.request.context import Caller
from app.request.events import End, RequestError
from app.request.record import RequestRecord

TICKET = Ticket(ticket_id=7, attempt=1, request_id="r", frontend_id="f", epoch=1, prefill="p#1", decode="d#1")


def line(caplog: pytest.LogCaptureFixture) -> tuple[logging.LogRecord, dict[str, Any]]:
    (record,) = [r for r in caplog.records if r.name == "pageferry.request" and r.getMessage().startswith("{")]
    return record, json.loads(record.getMessage())


def test_a_request_leaves_one_line_with_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pageferry.request")
    record = RequestRecord(FrontendMetrics(Discard, "a", ["acme"]), "cmpl-1", Caller(tenant="acme"), 100)
    record.placed(TICKET)
    record.phase("admit", 0.01)
    record.phase("prefill", 0.2)
    record.first_token(0.25)
    record.phase("prefill", 0.1)  # again, on another replica
    record.ended(End(Outcome.DONE), 40, 0.02)
    logged, fields = line(caplog)
    assert logged.levelno == logging.INFO
    assert logged.request_id == "cmpl-1" and logged.pageferry == fields, "a JSON log has them as fields"  # type: ignore[attr-defined]
    assert fields["phases"] == {"admit": 0.01, "prefill": 0.3, "first_token": 0.25}
    assert fields["replicas"] == ["p#1", "d#1"] and fields["tenant"] == "acme"
    assert (fields["outcome"], fields["prompt_tokens"], fields["output_tokens"]) == ("done", 100, 40)


def test_a_fault_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pageferry.request")  # what ran before may have switched it off
    record = RequestRecord(FrontendMetrics(Discard), "cmpl-2", Caller(), 5)
    record.lost(Role.DECODE, "d#1", "has died")
    record.ended(End(Outcome.FAILED, RequestError(503, "no room" + "x" * 1000)), 0, None)
    logged, fields = line(caplog)
    assert logged.levelno == logging.WARNING and fields["status"] == 503 and len(fields["error"]) == 200
    assert "tenant" not in fields
    assert "request cmpl-2 has lost its decode replica d#1: has died" in caplog.text


@pytest.mark.parametrize(
    ("kind", "counted"), [("", "pageferry_busy_total"), ("tokens", "pageferry_tenant_limited_total")]
)
def test_a_refusal_is_no_failure(kind: str, counted: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pageferry.request")
    backend = Tags()
    record = RequestRecord(FrontendMetrics(backend, "a"), "r", Caller(), 5)
    record.ended(End(Outcome.FAILED, RequestError(429, "no", 1.0, kind)), 0, None)
    assert backend.counted[("pageferry_requests_total", "refused")] == 1
    assert backend.counted[("pageferry_requests_total", "failed")] == 0
    assert sum(value for key, value in backend.counted.items() if key[0] == counted) == 1
    logged, fields = line(caplog)
    assert logged.levelno == logging.INFO and fields["outcome"] == "refused"


class Tags:
    """A metrics backend: what was counted, by name and labels."""

    counted: dict[tuple[str, ...], float]

    def __init__(self) -> None:
        self.counted = {}

    def _make(self, name: str, **_: Any) -> Any:
        counted = self.counted

        class Made:
            def set_default_tags(self, tags: dict[str, str]) -> None:
                assert tags == {"application": "a"}

            def inc(self, value: float, tags: dict[str, str]) -> None:
                counted[(name, *tags.values())] = counted.get((name, *tags.values()), 0.0) + value

            set = observe = _record = inc

        return Made()

    Counter = Gauge = Histogram = _make


def test_labels_of_tenants_are_bounded_and_there_from_the_start() -> None:
    backend = Tags()
    metrics = FrontendMetrics(backend, "a", [f"t{n}" for n in range(TENANTS_MAX + 5)])
    assert backend.counted[("pageferry_tenant_output_tokens_total", "t0")] == 0
    for tenant in ("t0", f"t{TENANTS_MAX}", f"t{TENANTS_MAX + 1}", ""):
        RequestRecord(metrics, "r", Caller(tenant=tenant), 10).ended(End(Outcome.DONE), 3, None)
    tenants = {key[1] for key in backend.counted if key[0].startswith("pageferry_tenant_")}
    assert len(tenants) == TENANTS_MAX + 1 and OTHER in tenants
    assert backend.counted[("pageferry_tenant_requests_total", "t0", "done")] == 1
    assert backend.counted[("pageferry_tenant_output_tokens_total", OTHER)] == 6
    assert backend.counted[("pageferry_tenant_prompt_tokens_total", OTHER)] == 20
    assert backend.counted[("pageferry_requests_total", "done")] == 4
