"""Internal fields, tenants, sessions and Retry-After, through real ASGI calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from actors.messages import Rate, Rates
from app.api.error_rewriter import duration
from app.api.keys import ADMIN_KEY, API_KEYS, KeyRing
from app.api.middleware import Access, RequestFilter
from app.api.patience import patience_s
from app.client import asgi
from app.request import context
from app.request.events import RequestError
from cluster.frontend_spec import FrontendSpec


async def echo(request: Request) -> JSONResponse:
    caller = context.current()
    known = {"tenant": caller.tenant, "session": caller.session, "patience_s": caller.patience_s}
    return JSONResponse({"body": await request.json(), **known})


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


SECRET = 'File "/opt/service/app/run.py", line 1, pid=77, ip=10.0.0.7'


async def broken(request: Request) -> JSONResponse:
    raise RuntimeError(SECRET)


async def answered_500(request: Request) -> JSONResponse:
    return JSONResponse({"error": {"message": SECRET, "code": 500}}, 500)


async def broken_stream(request: Request) -> StreamingResponse:
    how = request.query_params["how"]

    async def events() -> Any:
        if how != "at once":
            yield 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": null}]}\n\n'
        if how == "event":
            yield f"data: {json.dumps({'error': {'message': SECRET, 'code': 500}})}\n\n"
            return
        raise RuntimeError(SECRET)

    return StreamingResponse(events(), media_type="text/event-stream")


async def status(request: Request) -> JSONResponse:
    return JSONResponse({"pools": {}})


APP = Starlette(
    routes=[
        Route("/v1/completions", echo, methods=["POST"]),
        Route("/v1/chat/completions", busy, methods=["POST"]),
        Route("/v1/messages", late_busy, methods=["POST"]),
        Route("/v1/systemone", stream, methods=["POST"]),
        Route("/health", health),
        Route("/status", status),
        Route("/reset_prefix_cache", status, methods=["POST"]),
        Route("/classify", broken, methods=["POST"]),
        Route("/score", answered_500, methods=["POST"]),
        Route("/rerank", broken_stream, methods=["POST"]),
    ]
)


def ring(tenants: dict[str, str] | None = None, admin: str = "") -> KeyRing:
    """Keys by tenants, as the environment names them."""
    pairs = ",".join(f"{tenant}={key}" for key, tenant in (tenants or {}).items())
    return KeyRing(None, {API_KEYS: pairs, ADMIN_KEY: admin})


async def call(
    path: str,
    body: Any = None,
    *,
    tenants: dict[str, str] | None = None,
    access: Access | None = None,
    guard: RequestFilter | None = None,
    method: str = "POST",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    names = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    guard = guard or RequestFilter(APP, access or Access(ring(tenants)))
    reply, *chunks = [item async for item in asgi.call(guard, method, path, names, raw, peer=("10.0.0.9", 5000))]
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
    status, _, raw = await call("/v1/completions", body)
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
    status, _, raw = await call("/v1/completions", body)
    assert status == 200 and json.loads(raw)["body"] == body


async def test_tenants_are_known_by_their_key() -> None:
    tenants = {"sk-one": "red", "sk-two": "blue"}
    status, _, raw = await call("/v1/completions", {}, tenants=tenants, authorization="Bearer sk-two")
    assert status == 200 and json.loads(raw)["tenant"] == "blue"
    wrong: list[dict[str, Any]] = [{}, {"authorization": "Bearer sk-three"}, {"authorization": "Basic sk-one"}]
    for headers in wrong:
        code, answer_headers, raw = await call("/v1/completions", {}, tenants=tenants, **headers)
        error = json.loads(raw)["error"]
        assert (code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert answer_headers["www-authenticate"] == "Bearer" and b"sk-" not in raw
    assert (await call("/health", tenants=tenants, method="GET"))[0] == 200
    status, _, raw = await call("/v1/completions", {"cache_salt": "x"}, tenants=tenants, authorization="Bearer sk-one")
    assert status == 400 and json.loads(raw)["error"]["param"] == "cache_salt"


def test_salts_separate_tenants() -> None:
    assert context.cache_salt("red") == context.cache_salt("red") != context.cache_salt("blue")


@pytest.mark.parametrize(
    ("headers", "patience_s"),
    [
        ({}, 0.0),
        ({"x_stainless_read_timeout": "600"}, 600.0),  # OpenAI's client in Python
        ({"x_stainless_timeout": "30", "request_timeout": "12.5"}, 12.5),
        *(({"x_stainless_read_timeout": text}, 0.0) for text in ("", "soon", "60s", "0", "-1", "nan", "inf")),
    ],
)
async def test_a_client_says_how_long_it_waits(headers: dict[str, str], patience_s: float) -> None:
    _, _, raw = await call("/v1/completions", {}, **headers)
    assert json.loads(raw)["patience_s"] == patience_s


async def test_openais_client_says_its_time_out() -> None:
    import httpx

    seen: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(dict(request.headers))
        return httpx.Response(429, json={})

    made = openai.OpenAI(
        api_key="none", timeout=7.5, max_retries=0, http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    with pytest.raises(openai.RateLimitError):
        made.completions.create(model="m", prompt="x")
    assert patience_s(seen[0]) == 7.5


async def test_a_session_is_named_by_a_header() -> None:
    _, _, raw = await call("/v1/completions", {}, x_session_affinity="s-1")
    assert json.loads(raw)["session"] == "s-1"
    _, _, raw = await call("/v1/completions", {}, x_session_id="s-2")
    assert json.loads(raw)["session"] == "s-2"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_no_room_is_429_with_retry_after_also_for_streams(path: str) -> None:
    status, headers, raw = await call(path)
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(raw)["error"]["message"] == "no room"


async def test_a_stream_that_fails_later_stays_a_stream() -> None:
    status, headers, raw = await call("/v1/systemone")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert raw.startswith(b"data: 1\n\n") and b"decode died" in raw


async def test_anthropics_header_names_the_tenant_too() -> None:
    tenants = {"sk-one": "red"}
    status, _, raw = await call("/v1/completions", {}, tenants=tenants, x_api_key="sk-one")
    assert status == 200 and json.loads(raw)["tenant"] == "red"
    assert (await call("/v1/completions", {}, tenants=tenants, x_api_key="sk-two"))[0] == 401


@pytest.mark.parametrize(("path", "method"), [("/status", "GET"), ("/reset_prefix_cache", "POST"), ("/new", "GET")])
async def test_what_is_not_for_clients_needs_the_admin_key(path: str, method: str) -> None:
    """All but a list: a route that a new vLLM brings is closed until it is in the list."""
    keyed = Access(ring({"sk-one": "red"}, "sk-admin"), local=True)
    there = 404 if path == "/new" else 200
    wrong: list[dict[str, Any]] = [{}, {"authorization": "Bearer sk-one"}, {"x_api_key": "admin"}]
    for headers in wrong:
        code, _, raw = await call(path, access=keyed, method=method, **headers)
        assert code == 401 and "admin key" in json.loads(raw)["error"]["message"]
    assert (await call(path, access=keyed, method=method, authorization="Bearer sk-admin"))[0] == there
    code, _, raw = await call(path, access=Access(local=False), method=method)
    assert code == 403 and "PAGEFERRY_ADMIN_KEY" in json.loads(raw)["error"]["message"]
    assert (await call(path, access=Access(local=True), method=method))[0] == there


async def test_a_caller_with_a_serve_handle_is_inside() -> None:
    guard = RequestFilter(APP, Access(ring(admin="sk-admin"), local=False))
    reply, *_ = [item async for item in asgi.call(guard, "GET", "/status", {}, None)]
    assert reply[0] == 200


async def test_stored_responses_are_nobodys() -> None:
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        code, _, raw = await call(path, method="GET")
        assert code == 404 and "not stored" in json.loads(raw)["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/classify", "/score", "/rerank?how=at+once", "/rerank?how=later", "/rerank?how=event"]
)
async def test_an_unexpected_error_says_nothing_but_the_requests_id(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, headers, raw = await call(path, x_request_id="mine-1")
    text = raw.decode()
    assert "x-request-id" not in headers, "Serve's HTTP server writes it"
    assert "mine-1" in text and "internal error" in text
    assert code == (200 if "later" in path or "event" in path else 500)
    assert not any(word in text for word in ("/opt", "pid", "10.0.0.7", "Traceback", "RuntimeError", "File"))
    (line,) = [r.getMessage() + (r.exc_text or "") for r in caplog.records if r.name == "pageferry.frontend"]
    assert "mine-1" in line and "10.0.0.7" in line, "the log has it all"


async def test_bodies_that_no_engine_could_take_are_400_and_the_field_is_named() -> None:
    code, headers, raw = await call("/v1/completions", rb'{"stop": ["\udfff"]}')
    error = json.loads(raw)["error"]
    assert (code, error["param"], error["type"]) == (400, "stop.0", "BadRequestError")
    assert headers["x-request-id"]
    assert (await call("/v1/completions", {}, x_request_id="x" * 300))[0] == 400


async def test_an_answer_over_a_handle_names_its_request() -> None:
    guard = RequestFilter(APP, Access())
    for sent in ({}, {"x-request-id": "mine"}):
        reply, *_ = [item async for item in asgi.call(guard, "GET", "/health", sent, None)]
        assert reply[1]["x-request-id"] == sent.get("x-request-id", reply[1]["x-request-id"]) != ""


async def test_a_caller_is_of_one_request() -> None:
    await call("/v1/completions", {}, x_session_id="s-2")
    assert context.CALLER.get() is None


async def used_up(request: Request) -> JSONResponse:
    """As a frontend whose controller has refused the request."""
    caller = context.current()
    caller.fault = RequestError(429, "rate limit reached", 0.15, "requests")
    caller.rates = Rates(requests=Rate(6, 0, 59.5), tokens=Rate(1000, 400, 90.0))
    return JSONResponse({"error": {"message": "rate limit reached", "type": "x", "code": 429}}, 429)


async def test_a_tenant_that_must_wait_is_refused_without_asking_the_controller_again() -> None:
    asked, limited = 0, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        await Starlette(routes=[Route("/v1/completions", used_up, methods=["POST"])])(scope, receive, send)

    access = Access(ring({"sk-one": "red", "sk-two": "blue"}))
    guard = RequestFilter(app, access, limited=lambda *what: limited.append(what))
    for _ in range(3):
        code, headers, raw = await call("/v1/completions", guard=guard, authorization="Bearer sk-one")
        assert (code, json.loads(raw)["error"]["type"], headers["retry-after"]) == (429, "requests", "1")
        assert [headers[f"x-ratelimit-{name}"] for name in ("limit-requests", "remaining-requests")] == ["6", "0"]
        assert headers["x-ratelimit-reset-requests"] == "59.5s" and headers["x-ratelimit-reset-tokens"] == "1m30s"
        assert headers["x-ratelimit-remaining-tokens"] == "400"
    assert (asked, limited) == (1, [("red", "requests")] * 2)
    await call("/v1/completions", guard=guard, authorization="Bearer sk-two")
    assert asked == 2, "the other tenant has limits of its own"
    await asyncio.sleep(0.16)
    await call("/v1/completions", guard=guard, authorization="Bearer sk-one")
    assert asked == 3


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0ms"), (0.35, "350ms"), (12.5, "12.5s"), (360.0, "6m0s")])
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def send_body(guard: RequestFilter, chunks: list[bytes], pause_s: float = 0.0, **headers: str) -> tuple[int, Any]:
    """A POST whose body comes in pieces; status and error."""
    said: list[Any] = []
    rest = list(chunks)

    async def receive() -> Any:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest)}

    async def send(message: Any) -> None:
        said.append(message)

    sent = [
        (b"content-type", b"application/json"),
        *((n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()),
    ]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": sent, "query_string": b""}
    await guard({**scope, "http_version": "1.1", "client": ("10.0.0.9", 1)}, receive, send)
    body = b"".join(m.get("body", b"") for m in said[1:])
    return said[0]["status"], json.loads(body) | {"read": len(chunks) - len(rest)}


async def test_bodies_are_bounded_each_together_and_in_time() -> None:
    limits = FrontendSpec(body_bytes_max=2000, bodies_bytes_max=3000)
    guard = RequestFilter(APP, Access(frontend=limits))
    code, answer = await send_body(guard, [b"{}"], content_length="2001")
    assert (code, answer["read"]) == (413, 0) and "frontend.body_bytes_max" in answer["error"]["message"]
    code, answer = await send_body(guard, [b" " * 1500] * 3)
    assert (code, answer["read"]) == (413, 2), "without a length it is read as far as is allowed"
    impatient = RequestFilter(APP, Access(frontend=FrontendSpec(body_wait_s=0.2)))
    code, answer = await send_body(impatient, [b" "] * 50, pause_s=0.05)
    assert code == 408 and answer["read"] < 10
    body = b'{"a": "' + b"x" * 1900 + b'"}'
    slow = [send_body(guard, [body[:1800], body[1800:]], pause_s=0.05) for _ in range(3)]
    codes = sorted(code for code, _ in await asyncio.gather(*slow))
    assert codes == [200, 503, 503] and guard._bodies.held == 0
    assert (await send_body(guard, [body]))[0] == 200


async def test_headers_are_bounded() -> None:
    assert (await send_body(RequestFilter(APP, Access()), [b"{}"], x_long="x" * (65 << 10)))[0] == 431
