"""Tokens reach a client as evenly as its engine makes them."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from typing import Any

import pytest

from app.commands.serve import Service
from cluster.metrics import GAP_BOUNDS
from ops.bench import gaps, stats
from ops.bench.load import body_of

STREAMS, TOKENS = 4, 100
EXPORT_S = 45.0  # Ray exports every ten seconds
RATIO_MAX = 4.0  # with readers of vLLM's queues that spin for a second: 10 and more
EVENTS_A_READ_MAX = 1.5


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


def exported(service: Service) -> dict[tuple[str, str], float]:
    """Gaps by where they are seen and the bound that they are within, of all frontends."""
    assert service.folder is not None
    groups = json.loads((service.folder / "prom_metrics_service_discovery.json").read_text())
    found = dict.fromkeys(((at, le) for at in ("engine", "socket") for le in GAP_BOUNDS), 0.0)
    for target in (target for group in groups for target in group["targets"]):
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("ray_pageferry_token_gaps_total{"):
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                    if (key := (labels["at"], labels["le"])) in found:
                        found[key] += float(line.rsplit(" ", 1)[1])
    return found


def p99_bound(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], at: str) -> float:
    """The least bound that holds 99 of 100 gaps."""
    grown = {le: after[at, le] - before[at, le] for le in GAP_BOUNDS}
    return next(float(le) for le in GAP_BOUNDS if grown[le] >= 0.99 * grown["+Inf"])


def test_gaps_at_the_client_are_those_of_the_engine(service: Service) -> None:
    port, model = service.spec.frontend.port, service.spec.model.served_name

    async def streams(tokens: int) -> list[gaps.Stream]:
        names = [f"{time.time()} story {number}: once upon a time there was" for number in range(STREAMS)]
        return list(await asyncio.gather(*(gaps.stream(port, body_of(model, name, tokens)) for name in names)))

    asyncio.run(streams(8))
    time.sleep(12)  # what came before is exported
    before = exported(service)
    seen = asyncio.run(streams(TOKENS))
    # The first token may not be decode's; tokens that one event carries have no gap of their own at the socket.
    expected = {"engine": STREAMS * (TOKENS - 2), "socket": 0.9 * STREAMS * (TOKENS - 1)}
    until = time.monotonic() + EXPORT_S
    while any((after := exported(service))[at, "+Inf"] - before[at, "+Inf"] < least for at, least in expected.items()):
        assert time.monotonic() < until, f"{after} from {before}: {expected} gaps were to be exported"
        time.sleep(2)

    at_client = stats.quantile([b - a for s in seen for a, b in zip(s.tokens_s, s.tokens_s[1:])], 0.99)
    at_engine = p99_bound(before, after, "engine")
    reads = [events for s in seen for events in s.events_a_read]
    found = f"p99 {at_client:.3f} s at the client, within {at_engine} s at the engine, {max(reads)} events in one read"
    print(found)
    assert at_client <= RATIO_MAX * at_engine, found
    assert sum(reads) / len(reads) <= EVENTS_A_READ_MAX, found
