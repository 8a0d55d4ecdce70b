"""Internal fields, tenants, sessions and Retry-After, through real ASGI calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from app.api.middleware import RequestFilter
from app.client import asgi
from app.request import context
from app.request.state import RequestError


async def echo(request: Request) -> JSONResponse:
    caller = context.current()
    return JSONResponse({"body": await request.json(), "tenant": caller.tenant, "session": caller.session})


async def busy(request: Request) -> JSONResponse:
    context.current().fault = RequestError(429, "no room", 1.2)
    return JSONResponse({"error": {"message": "no room", "code": 429}}, 429)


async def late_busy(request: Request) -> StreamingResponse:
    """As vLLM does it: the stream is answered with 200 before the engine has been asked."""

    async def events() -> Any:
        await asyncio.sleep(0)
        context.current().fault = RequestError(429, "no room", 1.2)
        yield 'data: {"error": {"message": "no room"}}\n\n'
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def stream(request: Request) -> StreamingResponse:
    async def events() -> Any:
        yield "data: 1\n\n"
        context.current().fault = RequestError(503, "decode died", 0.0)
        yield 'data: {"error": {"message": "decode died"}}\n\n'

    return StreamingResponse(events(), media_type="text/event-stream")


async def health(request: Request) -> JSONResponse:
    return JSONResponse({})


APP = Starlette(
    routes=[
        Route("/v1/echo", echo, methods=["POST"]),
        Route("/v1/busy", busy, methods=["POST"]),
        Route("/v1/late", late_busy, methods=["POST"]),
        Route("/v1/stream", stream, methods=["POST"]),
        Route("/health", health),
    ]
)


async def call(
    path: str, body: Any = None, *, tenants: dict[str, str] | None = None, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    reply, *chunks = [item async for item in asgi.call(RequestFilter(APP, tenants or {}), method, path, names, raw)]
    return reply[0], reply[1], b"".join(chunks)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"ec_transfer_params": {}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        (
            {"sampling_params": {"extra_args": {"kv_transfer_params": 1}}},
            "sampling_params.extra_args.kv_transfer_params",
        ),
        ([{"kv_transfer_params": 1}], "kv_transfer_params"),
        (b'{"kv_tr\\u0061nsfer_params": {"a": 1}}', "kv_transfer_params"),
    ],
)
async def test_internal_fields_are_400_and_named(body: Any, field: str) -> None:
    status, _, raw = await call("/v1/echo", body)
    error = json.loads(raw)["error"]
    assert (status, error["param"], error["code"]) == (400, field, 400)
    assert field in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "what are kv_transfer_params?"}]},
        {"tools": [{"function": {"parameters": {"properties": {"kv_transfer_params": {"type": "string"}}}}}]},
        {"kv_transfer_params": None},
        {"cache_salt": "mine"},
    ],
)
async def test_the_same_words_elsewhere_are_nobodys_business(body: Any) -> None:
    status, _, raw = await call("/v1/echo", body)
    assert status == 200 and json.loads(raw)["body"] == body


async def test_tenants_are_told_by_their_key() -> None:
    tenants = {"sk-one": "red", "sk-two": "blue"}
    status, _, raw = await call("/v1/echo", {}, tenants=tenants, authorization="Bearer sk-two")
    assert status == 200 and json.loads(raw)["tenant"] == "blue"
    for headers in ({}, {"authorization": "Bearer sk-three"}, {"authorization": "Basic sk-one"}):
        assert (await call("/v1/echo", {}, tenants=tenants, **headers))[0] == 401
    assert (await call("/health", tenants=tenants, method="GET"))[0] == 200
    status, _, raw = await call("/v1/echo", {"cache_salt": "x"}, tenants=tenants, authorization="Bearer sk-one")
    assert status == 400 and json.loads(raw)["error"]["param"] == "cache_salt"


def test_salts_separate_tenants() -> None:
    assert context.cache_salt("red") == context.cache_salt("red") != context.cache_salt("blue")


async def test_a_session_is_named_by_a_header() -> None:
    _, _, raw = await call("/v1/echo", {}, x_session_affinity="s-1")
    assert json.loads(raw)["session"] == "s-1"
    _, _, raw = await call("/v1/echo", {}, x_session_id="s-2")
    assert json.loads(raw)["session"] == "s-2"


@pytest.mark.parametrize("path", ["/v1/busy", "/v1/late"])
async def test_no_room_is_429_with_retry_after_also_for_streams(path: str) -> None:
    status, headers, raw = await call(path)
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(raw)["error"]["message"] == "no room"


async def test_a_stream_that_fails_later_stays_a_stream() -> None:
    status, headers, raw = await call("/v1/stream")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert raw.startswith(b"data: 1\n\n") and b"decode died" in raw


async def test_a_caller_is_of_one_request() -> None:
    await call("/v1/echo", {}, x_session_id="s-2")
    assert context.CALLER.get() is None
