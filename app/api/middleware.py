"""What stands between the outside and vLLM's OpenAI server: routes, keys, bodies, tenants, sessions, Retry-After."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.messages import Rates
from actors.spans import Tracer
from app.api import grammar_bounds, json_body, routes
from app.api.bodies import Bodies, BodyRefused
from app.api.error_rewriter import ErrorRewriter, error_response
from app.api.json_body import MAX_NAME_CHARS
from app.api.keys import KeyRing, Owner, TooManyChecks
from app.api.patience import patience_s
from app.client.asgi import IN_PROCESS
from app.request.context import CALLER, Caller
from app.request.eligibility import INTERNAL_ARGS
from app.request.events import RequestError
from app.serve_http import LOOPBACK
from cluster.frontend_spec import FrontendSpec

logger = logging.getLogger("pageferry.frontend")

# Where a body can carry arguments that reach the engine as they are.
CONTAINERS = ("vllm_xargs", "extra_args", "sampling_params", "extra_body")
HANG_UP_S = 5.0  # vLLM's handlers take milliseconds to stop
JSON_KINDS = ("application/json", "text/json")
OFF = Tracer()
HEADERS_MAX_BYTES = 64 << 10  # of all headers together
WAITS_KEPT = 1024  # tenants that have to wait; more than these are asked for at the controller again


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use what. Without keys for clients, every client is let in.

    Routes that are not for clients need an admin's key. Where there is none they are open if only this machine can
    connect (`local`). A caller with a Serve handle is inside the cluster and may use them.
    """

    ring: KeyRing = field(default_factory=lambda: KeyRing(None, {}))
    local: bool = True
    frontend: FrontendSpec = field(default_factory=FrontendSpec)


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
    """Pure ASGI middleware, outermost. `blame(path, body)`: the field of a body that the server breaks on, if any.

    `limited(tenant, limit)` is called for a request that is refused here because its tenant has used a limit up.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        blame: Callable[[str, Any], str | None] = lambda path, tree: None,
        limited: Callable[[str, str], None] = lambda tenant, limit: None,
        tracer: Tracer = OFF,
    ) -> None:
        self.app = app
        self._blame = blame
        self._limited = limited
        self._tracer = tracer
        self._access = access
        self._ring = access.ring
        self._bodies = Bodies(access.frontend)
        self._forbidden = (*INTERNAL_ARGS, "cache_salt") if access.ring.for_clients else INTERNAL_ARGS
        self._waits: dict[str, tuple[float, RequestError, Rates | None]] = {}  # by tenant, until when

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
        if refusal := await self._refuse_head(scope, headers, caller):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refusal(scope, receive, ErrorRewriter(send, caller))
            return
        if (path := _path(scope)) in routes.TRACED and scope["type"] == "http":
            state = headers.get("tracestate", "")
            caller.span = self._tracer.request(f"{scope['method']} {path}", headers.get("traceparent", ""), state)
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
        headers = Headers(scope=scope)
        try:
            with self._bodies.one(headers) as reader:
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    body = await reader.read(receive)
                    if refusal := self._refuse_body(body, headers):
                        await refusal(scope, receive, responder)
                        return
                    receive = _replay(body, receive)
                await _run(self.app, scope, receive, responder)
                await responder.finish()
        except BodyRefused as refused:
            await refused.response(scope, receive, responder)
        except Exception:
            answered = await responder.broken_off()
            if caller.fault is None and not responder.explained:
                logger.exception("request %s: %s %s", caller.trace, scope["method"], scope["path"])
            if not answered:
                raise
        finally:
            caller.span.end(responder.status, request=caller.trace)
            self._remember_wait(caller)

    def _remember_wait(self, caller: Caller) -> None:
        """No request of this tenant passes before the controller has said it will: none needs to ask until then."""
        fault = caller.fault
        if fault is not None and fault.kind == "requests" and fault.retry_after_s > 0:
            if len(self._waits) >= WAITS_KEPT:
                self._waits.clear()
            self._waits[caller.tenant] = (asyncio.get_running_loop().time() + fault.retry_after_s, fault, caller.rates)

    def _refuse_wait(self, caller: Caller) -> JSONResponse | None:
        if (found := self._waits.get(caller.tenant)) is None:
            return None
        until, fault, caller.rates = found
        if (rest := until - asyncio.get_running_loop().time()) <= 0:
            del self._waits[caller.tenant]
            caller.rates = None
            return None
        self._limited(caller.tenant, fault.kind)
        caller.fault = RequestError(fault.status, fault.message, rest, fault.kind)
        return error_response(fault.status, fault.message, fault.kind)

    def _mistake(self, path: str, body: bytes) -> JSONResponse | None:
        try:
            field = self._blame(path, json_body.parse(body)) if body else None
        except json_body.BadBody:
            return None
        if field is None:
            return None
        return _bad_request(field or None, f"{field or 'the body'} has a value of a type that the server does not take")

    async def _refuse_head(self, scope: Scope, headers: Headers, caller: Caller) -> JSONResponse | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADERS_MAX_BYTES:
            caller.trace = "-"
            return error_response(431, f"the headers have more than {HEADERS_MAX_BYTES} bytes", "BadRequestError")
        for name in ("x-request-id", "x-session-affinity", "x-session-id"):
            if len(headers.get(name, "")) > MAX_NAME_CHARS:
                caller.trace = "-"
                return _bad_request(name, f"{name} has more than {MAX_NAME_CHARS} characters")
        path = _path(scope)
        if path.startswith(routes.STORED_RESPONSES):
            return error_response(404, "responses are not stored: send the conversation with each request", "NotFound")
        try:
            return await self._refuse_caller(scope, path, headers, caller)
        except TooManyChecks:
            response = error_response(429, "too many unknown API keys are being checked; try again", "requests")
            response.headers["retry-after"] = "1"
            return response

    async def _refuse_caller(self, scope: Scope, path: str, headers: Headers, caller: Caller) -> JSONResponse | None:
        if not routes.for_clients(path):
            return await self._refuse_admin(scope, headers)
        if path in routes.OPEN or scope.get("method") == "OPTIONS":
            return None
        if self._ring.for_clients:
            owner = await self._owner(headers)
            if owner is None or not owner.tenant:
                return _unauthorized(bool(_keys(headers)))
            caller.tenant = owner.tenant
        return self._refuse_wait(caller)

    async def _owner(self, headers: Headers) -> Owner | None:
        for key in _keys(headers):
            if (owner := await self._ring.owner(key)) is not None:
                return owner
        return None

    async def _refuse_admin(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        if _in_process(scope):
            return None
        owner = await self._owner(headers)
        if owner is not None and owner.admin:
            return None
        if self._ring.for_admins:
            response = error_response(401, "this is no route for clients; it needs the admin key", "Unauthorized")
            response.headers["www-authenticate"] = "Bearer"
            return response
        if self._access.local:
            return self._refuse_other_name(headers)
        return error_response(
            403,
            "this is no route for clients; administrators set PAGEFERRY_ADMIN_KEY or `pageferry keys add --admin`",
            "Forbidden",
        )

    def _refuse_other_name(self, headers: Headers) -> JSONResponse | None:
        """A page in this machine's browser whose host name leads to 127.0.0.1 must not read what is open here."""
        name, frontend = host_name(headers.get("host", "")), self._access.frontend
        if not name or name in LOOPBACK or name in (frontend.host.lower(), *map(str.lower, frontend.admin_hosts)):
            return None
        message = (
            f"the Host header is {name!r}, none of {', '.join(LOOPBACK)} and frontend.admin_hosts, which takes others"
        )
        return error_response(403, message, "Forbidden", "host")

    def _refuse_body(self, body: bytes, headers: Headers) -> JSONResponse | None:
        if headers.get("content-type", "").partition(";")[0].strip().lower() not in JSON_KINDS:
            return None  # vLLM refuses it, or it is a file
        try:
            tree = json_body.parse(body)
            grammar_bounds.check(tree, self._access.frontend)
        except json_body.BadBody as error:
            return _bad_request(error.field or None, str(error))
        name = find_forbidden(tree, self._forbidden)
        if name is None:
            return None
        return _bad_request(name, f"{name} is set by the service and not accepted from outside; remove it")


def host_name(header: str) -> str:
    """The name or address of a Host header, without port and brackets, in small letters."""
    text = header.strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _in_process(scope: Scope) -> bool:
    return tuple(scope.get("client") or ()) == IN_PROCESS


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _keys(headers: Headers) -> list[str]:
    """What the caller sends as a key: a bearer token, or Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    return found + ([headers["x-api-key"]] if "x-api-key" in headers else [])


def _unauthorized(sent: bool) -> JSONResponse:
    """As OpenAI's API says it; no part of what was sent is in it."""
    message = "incorrect API key" if sent else "no API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    return JSONResponse({"error": error}, 401, {"www-authenticate": "Bearer"})


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
    `http.disconnect`; cancelled from outside they would go on to the end, with no reader.
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
        self._started = False
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
        if message["type"] == "http.response.start":
            if self._started:
                return  # only counted, see `vllm_app.HangUps`
            self._started = True
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
