"""What stands between the outside and vLLM's OpenAI server: routes, keys, bodies, tenants, sessions, Retry-After."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import json_body, routes
from app.api.error_rewriter import ErrorRewriter, error_response
from app.api.json_body import MAX_NAME_CHARS
from app.api.patience import patience_s
from app.client.asgi import IN_PROCESS
from app.request.context import CALLER, Caller
from app.request.eligibility import INTERNAL_ARGS

logger = logging.getLogger("pageferry.frontend")

# Where a body can carry arguments that reach the engine as they are.
CONTAINERS = ("vllm_xargs", "extra_args", "sampling_params", "extra_body")
HANG_UP_S = 5.0  # vLLM's handlers take milliseconds to stop
JSON_KINDS = ("application/json", "text/json")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use what. `tenants`: API key -> tenant; empty: every client is let in.

    Routes that are not for clients need `admin_key`. Without one they are open where only this machine can connect
    (`local`). A caller with a Serve handle is inside the cluster and may use them.
    """

    tenants: dict[str, str] = field(default_factory=dict)
    admin_key: str | None = None
    local: bool = True


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
    """Pure ASGI middleware, outermost. `blame(path, body)`: the field of a body that the server breaks on, if any."""

    def __init__(
        self, app: ASGIApp, access: Access, blame: Callable[[str, Any], str | None] = lambda path, tree: None
    ) -> None:
        self.app = app
        self._blame = blame
        self._access = access
        self._tenants = {_digest(key): tenant for key, tenant in access.tenants.items()}
        self._admin = _digest(access.admin_key) if access.admin_key is not None else None
        self._forbidden = (*INTERNAL_ARGS, "cache_salt") if access.tenants else INTERNAL_ARGS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = Caller(
            session=headers.get("x-session-affinity") or headers.get("x-session-id") or "",
            trace=headers.get("x-request-id") or uuid.uuid4().hex,
            named_by_serve="x-request-id" in headers and not _in_process(scope),
            patience_s=patience_s(headers),
        )
        if refusal := self._refuse_head(scope, headers, caller):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refusal(scope, receive, ErrorRewriter(send, caller))
            return
        token = CALLER.set(caller)
        try:
            if scope["type"] == "http":
                await self._serve(_with_trace(scope, headers, caller), receive, send, caller)
            else:
                await self.app(scope, receive, send)
        finally:
            CALLER.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        body = b""
        responder = ErrorRewriter(send, caller, lambda: self._mistake(scope["path"], body))
        try:
            if scope["method"] in ("POST", "PUT", "PATCH"):
                body = await json_body.read(receive)
                if refusal := self._refuse_body(body, Headers(scope=scope)):
                    await refusal(scope, receive, responder)
                    return
                receive = _replay(body, receive)
            await _run(self.app, scope, receive, responder)
            await responder.finish()
        except Exception:
            answered = await responder.broken_off()
            if caller.fault is None and not responder.explained:
                logger.exception("request %s: %s %s", caller.trace, scope["method"], scope["path"])
            if not answered:
                raise

    def _mistake(self, path: str, body: bytes) -> JSONResponse | None:
        try:
            field = self._blame(path, json_body.parse(body)) if body else None
        except json_body.BadBody:
            return None
        if field is None:
            return None
        return _bad_request(field or None, f"{field or 'the body'} has a value of a type that the server does not take")

    def _refuse_head(self, scope: Scope, headers: Headers, caller: Caller) -> JSONResponse | None:
        for name in ("x-request-id", "x-session-affinity", "x-session-id"):
            if len(headers.get(name, "")) > MAX_NAME_CHARS:
                caller.trace = "-"
                return _bad_request(name, f"{name} has more than {MAX_NAME_CHARS} characters")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(routes.STORED_RESPONSES):
            return error_response(404, "responses are not stored: send the conversation with each request", "NotFound")
        if not routes.for_clients(path):
            return None if self._is_admin(scope, headers) else self._not_for_clients()
        if self._tenants and scope.get("method") != "OPTIONS" and path not in routes.OPEN:
            tenant = self._tenant_of(headers)
            if tenant is None:
                return JSONResponse({"error": "Unauthorized"}, 401)
            caller.tenant = tenant
        return None

    def _tenant_of(self, headers: Headers) -> str | None:
        return next((self._tenants[key] for key in _keys(headers) if key in self._tenants), None)

    def _is_admin(self, scope: Scope, headers: Headers) -> bool:
        if _in_process(scope):
            return True
        if self._admin is None:
            return self._access.local
        return any(hmac.compare_digest(key, self._admin) for key in _keys(headers))

    def _not_for_clients(self) -> JSONResponse:
        if self._admin is None:
            return error_response(
                403, "this is no route for clients; administrators set frontend.admin_key and send it", "Forbidden"
            )
        return error_response(401, "this is no route for clients; it needs the admin key", "Unauthorized")

    def _refuse_body(self, body: bytes, headers: Headers) -> JSONResponse | None:
        if headers.get("content-type", "").partition(";")[0].strip().lower() not in JSON_KINDS:
            if len(body) > json_body.MAX_BODY_BYTES:
                return _bad_request(
                    None, f"the body has {len(body)} bytes; at most {json_body.MAX_BODY_BYTES} are taken"
                )
            return None  # vLLM refuses it, or it is a file
        try:
            tree = json_body.parse(body)
        except json_body.BadBody as error:
            return _bad_request(error.field or None, str(error))
        name = find_forbidden(tree, self._forbidden)
        if name is None:
            return None
        return _bad_request(name, f"{name} is set by the service and not accepted from outside; remove it")


def _in_process(scope: Scope) -> bool:
    return tuple(scope.get("client") or ()) == IN_PROCESS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _keys(headers: Headers) -> list[bytes]:
    """Digests of what the caller sends as a key: a bearer token, or Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token] if scheme.lower() == "bearer" else []
    found += [headers["x-api-key"]] if "x-api-key" in headers else []
    return [_digest(key) for key in found]


def _bad_request(field: str | None, message: str) -> JSONResponse:
    return error_response(400, message, "BadRequestError", field)


def _with_trace(scope: Scope, headers: Headers, caller: Caller) -> Scope:
    """vLLM makes a request's id of this header."""
    if "x-request-id" in headers:
        return scope
    return {**scope, "headers": [*scope["headers"], (b"x-request-id", caller.trace.encode())]}


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


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
