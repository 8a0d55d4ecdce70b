"""One address for several models: a request goes to the application of the model that it names.

Plain ASGI. `ask` makes one HTTP request of an application; its first item is `(status, headers)`, then come the body's
chunks, and closing it is the client's disconnect (see `app.frontend.Frontend.http`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app.api import json_body, routes
from app.api.bodies import Bodies, BodyRefused
from app.api.error_rewriter import error_response
from cluster.frontend_spec import FrontendSpec

logger = logging.getLogger("pageferry.frontend")

ANSWER_S = 5.0  # for /health and /v1/models of one application
HOP = ("host", "connection", "content-length", "transfer-encoding", "keep-alive")
Ask = Callable[[str, str, str, dict[str, str], bytes | None], AsyncGenerator[Any, None]]


class ByModel:
    """`models`: the name that clients use -> application."""

    def __init__(self, models: Mapping[str, str], ask: Ask) -> None:
        self._models = dict(models)
        self._ask = ask
        self._bodies = Bodies(FrontendSpec())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        headers = {name: value for name, value in Headers(scope=scope).items() if name not in HOP}
        answer: JSONResponse | None
        if path == "/health":
            answer = await self._health(headers)
        elif path == "/v1/models":
            answer = await self._list(headers)
        elif not routes.for_clients(path) and not path.startswith("/v1/models/"):
            there = ", ".join(f"/{application}" for application in sorted(set(self._models.values())))
            answer = error_response(404, f"{path} is a route of one application: ask below {there}", "NotFoundError")
        else:
            answer = await self._pass_on(path, scope, headers, receive, send)
        if answer is not None:
            await answer(scope, receive, send)

    async def _pass_on(
        self, path: str, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
    ) -> JSONResponse | None:
        """To the application of the model that the request names; how it is refused, if it is."""
        try:
            with self._bodies.one(Headers(scope=scope)) as reader:
                body = await reader.read(receive) if scope["method"] == "POST" else b""
                model, answer = self._model_of(path, body)
                if answer is None:
                    query = scope.get("query_string", b"").decode()
                    target = f"{path}?{query}" if query else path
                    await self._forward(model, scope["method"], target, headers, body, receive, send)
                return answer
        except BodyRefused as refused:
            return refused.response

    def _model_of(self, path: str, body: bytes) -> tuple[str, JSONResponse | None]:
        """The model that a request is for, or how it is refused."""
        if path.startswith("/v1/models/"):
            model: Any = path.removeprefix("/v1/models/")
        else:
            try:
                tree = json_body.parse(body) if body else None
            except json_body.BadBody as error:
                return "", error_response(400, str(error), "BadRequestError", error.field or None)
            model = tree.get("model") if isinstance(tree, dict) else None
        known = ", ".join(sorted(self._models))
        if not isinstance(model, str) or not model:
            return "", error_response(400, f"model is missing; there are: {known}", "BadRequestError", "model")
        if model not in self._models:
            text = f"The model `{model[: json_body.MAX_NAME_CHARS]}` does not exist; there are: {known}"
            return "", error_response(404, text, "NotFoundError", "model")
        return model, None

    async def _forward(
        self, model: str, method: str, target: str, headers: dict[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        answer = self._ask(self._models[model], method, target, headers, body or None)
        pump = asyncio.ensure_future(self._pump(model, answer, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((pump, leaving), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await pump
        finally:
            for task in (pump, leaving):
                task.cancel()
            await asyncio.gather(pump, leaving, return_exceptions=True)
            await answer.aclose()

    async def _pump(self, model: str, answer: AsyncGenerator[Any, None], send: Send) -> None:
        try:
            status, headers = await anext(answer)
        except Exception as error:
            logger.warning("model %s: %s: %s", model, type(error).__name__, error)
            refusal = error_response(503, f"the application of model {model} does not answer", "ServiceUnavailable")
            refusal.headers["retry-after"] = "5"
            status, headers = 503, dict(refusal.headers)
            await _start(send, status, headers)
            await send({"type": "http.response.body", "body": refusal.body})
            return
        await _start(send, status, headers)
        async for chunk in answer:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    # -- of all applications

    async def _whole(self, application: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        answer = self._ask(application, "GET", path, headers, None)
        try:
            async with asyncio.timeout(ANSWER_S):
                status, _ = await anext(answer)
                return status, b"".join([chunk async for chunk in answer])
        except Exception as error:
            return 503, f"{type(error).__name__}: {error}".splitlines()[0].encode()
        finally:
            await answer.aclose()

    async def _from_all(self, path: str, headers: dict[str, str]) -> dict[str, tuple[int, bytes]]:
        names = sorted(set(self._models.values()))
        answers = await asyncio.gather(*(self._whole(name, path, headers) for name in names))
        return dict(zip(names, answers))

    async def _list(self, headers: dict[str, str]) -> JSONResponse:
        """All models in one list. One whose application is away is in it by its name."""
        answers = await self._from_all("/v1/models", headers)
        refused = [(status, body) for status, body in answers.values() if 400 <= status < 500]
        if len(refused) == len(answers):
            return JSONResponse(_tree(refused[0][1]), refused[0][0])
        data = [card for status, body in answers.values() if status == 200 for card in _tree(body).get("data", ())]
        there = {card.get("id") for card in data}
        away = [
            name for name, application in self._models.items() if name not in there and answers[application][0] >= 500
        ]
        data += [{"id": name, "object": "model", "owned_by": "pageferry"} for name in away]
        return JSONResponse({"object": "list", "data": data})

    async def _health(self, headers: dict[str, str]) -> JSONResponse:
        """200 while any model can be served: a balancer must not take the others away with one."""
        answers = await self._from_all("/health", headers)
        found = {
            model: "ok" if answers[application][0] == 200 else answers[application][1].decode(errors="replace")[:300]
            for model, application in self._models.items()
        }
        return JSONResponse({"models": found}, 200 if "ok" in found.values() else 503)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items() if name.lower() != "transfer-encoding"]
    await send({"type": "http.response.start", "status": status, "headers": raw})


def _tree(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}
