"""The attacks of `ops.chaos.border` against the request filter on a real HTTP server, and the summary of them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.api.middleware import Access, RequestFilter
from cluster.frontend_spec import FrontendSpec
from ops.chaos import border
from ops.chaos.fuzz import Case


async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await request.json())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    access = Access(frontend=FrontendSpec(body_wait_s=8.0))
    app = RequestFilter(Starlette(routes=[Route("/v1/completions", echo, methods=["POST"])]), access)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield int(listening.getsockname()[1])
        server.force_exit = server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [(border.declared_body, "413"), (border.undeclared_body, "413"), (border.slow_body, "408")],
)
async def test_what_each_attack_is_answered(kind: border.Attack, answer: str, port: int) -> None:
    assert await asyncio.wait_for(kind("127.0.0.1", port), 60) == answer


async def test_a_fuzzed_request_goes_whole_over_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for body, answer in ((b'{"a": "' + b"x" * 200_000 + b'"}', "200"), (b"[" * 90_000, "400")):
        monkeypatch.setattr(border, "_refused", [Case("/v1/completions", body)])
        assert await asyncio.wait_for(border.fuzzed("127.0.0.1", port), 30) == answer


def test_the_summary_compares_within_rounds() -> None:
    factors = dict.fromkeys(border.ARMS, 1.0) | {"slow": 1.5}
    rows: list[dict[str, Any]] = []
    for turn, scale in enumerate((1.0, 3.0)):
        for arm, factor in factors.items():
            row = {"arm": arm, "round": turn, "seconds": [scale * factor] * 10, "codes": [200] * 10}
            rows.append(row | {"memory_mib": 100.0 + turn, "connections": {"idle: closed": 3}})
    found = border.summary(rows)
    assert found["slow"]["p99_ratio"] == [1.5, 1.5, 1.5] and found["idle"]["p50_ratio"][0] == 1.0
    assert found["slow"]["asked"] == found["slow"]["answered_200"] == 20 and found["idle"]["memory_mib_max"] == 101.0
    assert found["idle"]["connections"] == {"idle: closed": 6}
    json.dumps(found)
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1.0, "features": ["avx2"], "load_at_start": [1.0]}
    facts = {"date": "d", "commit": "c0ffee", "machine": machine, "packages": {}, "command": "python -m x"}
    text = border.page(facts | {"summary": found}, "border.json")
    assert "| slow | 20 | 20 | 3000 ms | 4500 ms | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) | 101 MiB |" in text
    assert "a p99 0 % greater than one of them is found in 80 %" in text
    assert "- idle: idle: closed 6" in text and "`border.json`" in text
    next(row for row in rows if (row["arm"], row["round"]) == ("calm again", 1))["seconds"] = [3.3] * 10
    noisy = border.summary(rows)
    assert noisy["calm again"]["p99_ratio"][0] == 1.049 and 0.2 < noisy["calm again"]["p99_detectable"] < 3
    assert noisy["slow"]["p99_ratio"][0] == 1.465, "to the mean of both calm arms"
