"""What stands between the outside and vLLM's OpenAI server: internal fields, tenants, sessions, Retry-After."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import api_errors
from app.request.context import CALLER, Caller
from app.request.eligibility import INTERNAL_ARGS
from app.request.state import RequestError

# Where a body can carry arguments that reach the engine as they are.
CONTAINERS = ("vllm_xargs", "extra_args", "sampling_params", "extra_body")
HANG_UP_S = 5.0  # vLLM's handlers take milliseconds to stop
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")


def error_response(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def find_forbidden(body: Any, names: tuple[str, ...], path: str = "") -> str | None:
    """The dotted path of a field that only the service may set, looked for where it would reach the engine."""
    if isinstance(body, list):
        return next((found for item in body if (found := find_forbidden(item, names, path))), None)
    if not isinstance(body, dict):
        return None
    for name in names:
        if body.get(name) is not None:
            return f"{path}{name}"
    inner = (find_forbidden(body.get(key), names, f"{path}{key}.") for key in CONTAINERS)
    return next((found for found in inner if found), None)


class RequestFilter:
    """Pure ASGI middleware, outermost. `tenants` maps API keys to tenants; empty: no authentication."""

    def __init__(self, app: ASGIApp, tenants: dict[str, str]) -> None:
        self.app = app
        self._tenants = {hashlib.sha256(key.encode()).digest(): tenant for key, tenant in tenants.items()}
        self._forbidden = (*INTERNAL_ARGS, "cache_salt") if tenants else INTERNAL_ARGS
        self._needles = [name.encode() for name in self._forbidden]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = Caller(session=headers.get("x-session-affinity") or headers.get("x-session-id") or "")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._tenants and scope.get("method") != "OPTIONS" and path not in OPEN_PATHS:
            tenant = self._tenant_of(headers)
            if tenant is None:
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
            caller.tenant = tenant
        token = CALLER.set(caller)
        try:
            if scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH"):
                body = await _read(receive)
                if refusal := self._refuse(body):
                    await refusal(scope, receive, send)
                    return
                receive = _replay(body, receive)
            if scope["type"] == "http":
                responder = ErrorRewriter(send, caller)
                try:
                    await _run(self.app, scope, receive, responder)
                except Exception:
                    if not await responder.broken_off():
                        raise
            else:
                await self.app(scope, receive, send)
        finally:
            CALLER.reset(token)

    def _tenant_of(self, headers: Headers) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._tenants.get(hashlib.sha256(key.encode()).digest())

    def _refuse(self, body: bytes) -> JSONResponse | None:
        # A name can be written with escapes; without either there is nothing to find and nothing is parsed twice.
        if b"\\u" not in body and not any(needle in body for needle in self._needles):
            return None
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            return None  # vLLM answers malformed bodies
        field = find_forbidden(tree, self._forbidden)
        if field is None:
            return None
        message = f"{field} is set by the service and not accepted from outside; remove it"
        return error_response(400, message, "BadRequestError", field)


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs the application so that being cancelled is, for it, a client that hangs up.

    Serve cancels the task of a request whose client is gone. vLLM's handlers run in tasks of their own and stop at
    `http.disconnect`; cancelled from outside they would go on to the end, with nobody to read it.
    """
    connection = _Connection(receive, send)
    task = asyncio.ensure_future(app(scope, connection.receive, connection.send))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        connection.gone.set()
        await asyncio.wait((task,), timeout=HANG_UP_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


class _Connection:
    def __init__(self, receive: Receive, send: Send) -> None:
        self.gone = asyncio.Event()
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        incoming, leaving = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait((incoming, leaving), return_when=asyncio.FIRST_COMPLETED)
            return incoming.result() if incoming.done() else {"type": "http.disconnect"}
        finally:
            incoming.cancel()
            leaving.cancel()

    async def send(self, message: Message) -> None:
        if not self.gone.is_set():
            await self._send(message)


async def _read(receive: Receive) -> bytes:
    chunks = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break  # disconnected: the server sees it from `receive` again
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class ErrorRewriter:
    """Says a fault in full: its type, Retry-After, and the end of a stream.

    An event stream whose first event is our refusal becomes a plain HTTP error.
    """

    def __init__(self, send: Send, caller: Caller) -> None:
        self._send = send
        self._caller = caller
        self._held: Message | None = None  # the start of a response whose first event, or whose error, is not seen yet
        self._error_body: list[bytes] | None = None
        self._streaming = False
        self._replaced = False
        self._first = self._last = b""  # events of the stream

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif self._error_body is not None:
            await self._on_error_body(self._error_body, message)
        elif self._streaming:
            await self._on_chunk(message)
        else:
            await self._send(message)

    async def _on_start(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._held, self._streaming = message, True
            return
        if message["status"] >= 400 and (fault := self._caller.fault) is not None:
            if fault.retry_after_s > 0:
                headers["retry-after"] = retry_after(fault)
            if fault.kind:
                self._held, self._error_body = message, []
                return
        await self._send(message)

    async def _on_error_body(self, chunks: list[bytes], message: Message) -> None:
        chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        fault, start = self._caller.fault, self._held
        assert fault is not None and start is not None
        body = api_errors.with_kind(b"".join(chunks), fault)
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _on_chunk(self, message: Message) -> None:
        fault, chunk = self._caller.fault, message.get("body", b"")
        if self._held is not None:
            start, self._held = self._held, None
            if fault is not None:
                self._replaced = True
                await self._send_fault(fault)
                return
            await self._send(start)
            self._first = chunk
        elif fault is not None and api_errors.is_error_event(chunk):
            message = {**message, "body": api_errors.error_event(chunk, fault, self._last)}
        self._last = chunk or self._last
        self._streaming = message.get("more_body", False)
        await self._send(message)

    async def broken_off(self) -> bool:
        """vLLM's server has raised. True: it was our fault that ended a stream, and the client has been told of it."""
        fault = self._caller.fault
        if fault is None or not self._streaming or self._replaced:
            return False
        if self._held is not None:
            await self._send_fault(fault)
        else:
            body = api_errors.closing_events(fault, self._first, self._last)
            await self._send({"type": "http.response.body", "body": body})
        self._replaced = True
        return True

    async def _send_fault(self, fault: RequestError) -> None:
        response = error_response(fault.status, fault.message, api_errors.kind_of(fault))
        if fault.retry_after_s > 0:
            response.headers["retry-after"] = retry_after(fault)
        await self._send({"type": "http.response.start", "status": fault.status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body})


def retry_after(fault: RequestError) -> str:
    return str(max(1, math.ceil(fault.retry_after_s)))
