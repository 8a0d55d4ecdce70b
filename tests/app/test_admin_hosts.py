"""Administration that is open because only this machine can connect, asked under another machine's name."""

from __future__ import annotations

import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.api.keys import ADMIN_KEY, KeyRing
from app.api.middleware import Access, RequestFilter
from app.client import asgi
from cluster.frontend_spec import FrontendSpec


async def answer(request: Request) -> JSONResponse:
    return JSONResponse({})


APP = Starlette(routes=[Route("/status", answer), Route("/health", answer)])
FRONTEND = FrontendSpec(admin_hosts=("ops.internal",))


async def call(path: str, access: Access, **headers: str) -> tuple[int, bytes]:
    guard = RequestFilter(APP, access)
    reply, *chunks = [item async for item in asgi.call(guard, "GET", path, headers, None, ("127.0.0.1", 5))]
    return reply[0], b"".join(chunks)


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("ops.internal:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
async def test_a_page_whose_name_leads_here_does_not_read_it(host: str, code: int) -> None:
    """As a browser on this machine does for a page whose host name was made to resolve to 127.0.0.1."""
    access = Access(local=True, frontend=FRONTEND)
    status, raw = await call("/status", access, host=host)
    assert status == code
    if code == 403:
        error = json.loads(raw)["error"]
        assert "Host header" in error["message"] and "frontend.admin_hosts" in error["message"]
    assert (await call("/health", access, host=host))[0] == 200
    keyed = Access(KeyRing(None, {ADMIN_KEY: "sk-admin"}), local=True)
    assert (await call("/status", keyed, host=host, authorization="Bearer sk-admin"))[0] == 200
