"""Limits by tenant: buckets a minute and KV tokens at one time, through the controller's machine."""

from __future__ import annotations

from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of
from hypothesis import given
from hypothesis import strategies as st

from actors.controller.rates import Buckets, size_of
from actors.messages import AdmitRequest, Outcome, Overloaded, Rate
from cluster.frontend_spec import TenantSpec


def driver(**limits: Any) -> ControllerDriver:
    made = ControllerDriver(spec_of(frontend={"tenants": {"acme": limits}}))
    made.decode("d", blocks_total=10_000)
    return made


def test_requests_a_minute_are_counted_over_all_frontends_and_come_back_steadily() -> None:
    rig = driver(requests_per_minute=6)
    for number in range(6):
        ticket = rig.admit(f"r{number}", frontend=f"f{number % 3}", tenant="acme")
        assert ticket.rates is not None and ticket.rates.requests == Rate(6, 5 - number, 10.0 * (number + 1))
    refused = rig.busy("r6", frontend="f1", tenant="acme")
    assert (refused.limit, refused.retry_after_s) == ("requests", 10.0) and "6 requests a minute" in refused.reason
    assert rig.admit("other", tenant="zeta").rates is None, "no limit, no headers"
    rig.now += 10 * SECOND
    rig.admit("r7", tenant="acme")
    assert rig.busy("r8", tenant="acme").limit == "requests"


def test_a_request_that_is_asked_for_twice_costs_once() -> None:
    rig = driver(requests_per_minute=1)
    first = rig.admit("r", tenant="acme")
    assert rig.admit("r", tenant="acme").ticket_id == first.ticket_id
    assert rig.busy("s", tenant="acme").limit == "requests"


def test_tokens_that_were_not_generated_are_given_back_at_the_end() -> None:
    rig = driver(tokens_per_minute=1000)
    ticket = rig.admit("a", prompt=100, most=900, tenant="acme")
    assert ticket.rates is not None and ticket.rates.tokens == Rate(1000, 0, 60.0)
    assert rig.busy("b", prompt=100, most=100, tenant="acme").retry_after_s == 12.0
    rig.end(ticket, tokens=50)
    after = rig.admit("c", prompt=100, most=100, tenant="acme")
    assert after.rates is not None and after.rates.tokens is not None and after.rates.tokens.remaining == 650
    rig.end(rig.admit("larger than the limit", prompt=400, most=10, tenant="acme"), Outcome.CANCELLED, tokens=0)


def test_a_request_above_a_minutes_tokens_takes_a_whole_minute() -> None:
    rig = driver(tokens_per_minute=500)
    rig.admit("a", prompt=400, most=400, tenant="acme")
    assert rig.busy("b", prompt=400, most=400, tenant="acme").retry_after_s == 60.0


def test_kv_tokens_are_those_of_requests_that_wait_or_run() -> None:
    rig = driver(kv_tokens=1000)
    first = rig.admit("a", prompt=300, most=300, tenant="acme")
    rig.admit("of another", prompt=3000, most=300, tenant="zeta")
    refused = rig.busy("b", prompt=300, most=101, tenant="acme")
    assert (refused.limit, refused.retry_after_s) == ("kv_tokens", 1.0) and "600 are taken" in refused.reason
    assert rig.busy("never", prompt=1, most=1000, tenant="acme").retry_after_s == 0
    rig.admit("c", prompt=300, most=100, tenant="acme")
    rig.end(first)
    rig.admit("d", prompt=300, most=300, tenant="acme")


def test_a_waiting_request_counts_and_gives_back_when_it_leaves() -> None:
    rig = ControllerDriver(spec_of(frontend={"each_tenant": {"kv_tokens": 1000, "tokens_per_minute": 1000}}))
    call = rig.ask("waits", prompt=500, most=100, tenant="acme")  # no replica is there
    assert rig.answer(call) is None
    assert rig.busy("b", prompt=300, most=101, tenant="acme").limit == "kv_tokens"
    rig.withdraw(call)
    assert rig.answer(rig.ask("b", prompt=900, most=100, tenant="acme")) is None, "both limits are free again"


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 400), st.integers(0, 400)), max_size=60),
    st.integers(1, 50),
    st.integers(1, 2000),
)
def test_no_window_passes_more_than_a_bucket_and_its_refill(
    steps: list[tuple[int, int, int]], requests: int, tokens: int
) -> None:
    limits, buckets, now = TenantSpec(requests_per_minute=requests, tokens_per_minute=tokens), Buckets(), 0
    passed: list[tuple[int, int]] = []
    for wait_ms, prompt, most in steps:
        now += wait_ms * 1_000_000
        request = AdmitRequest(request_id="r", frontend_id="f", num_prompt_tokens=prompt, max_tokens=most)
        answer = buckets.take(request, limits, (), now)
        if answer is None:
            passed.append((now, min(size_of(request), tokens)))
            continue
        assert isinstance(answer, Overloaded) and answer.retry_after_s > 0
        later = Buckets()
        later._levels.update(dict(buckets._levels))
        soon = now + int(answer.retry_after_s * SECOND) + 1_000
        again = later.take(request, limits, (), soon)
        assert again is None or again.limit != answer.limit, "it passes when the answer says, but for the other limit"
    for first, (since, _) in enumerate(passed):
        for until, _ in passed[first:]:
            inside = [cost for when, cost in passed if since <= when <= until]
            minutes = (until - since) / (60 * SECOND)
            assert len(inside) <= requests * (1 + minutes) + 1e-6
            assert sum(inside) <= tokens * (1 + minutes) + 1e-6


@pytest.mark.parametrize("wrong", [{"requests_per_minute": 0}, {"tokens": 5}])
def test_limits_are_checked_at_start(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"frontend\.tenants\.acme"):
        spec_of(frontend={"tenants": {"acme": wrong}})
