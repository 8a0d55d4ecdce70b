"""What is put right in vLLM's FastAPI application: its name, the form of its errors, and how it counts hang-ups."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.error_rewriter import error_response
from app.rpc.ports import ControllerGone

HUNG_UP = 499  # what nginx, HAProxy and Serve call a request whose client did not wait for the answer


def make_ours(app: FastAPI) -> None:
    """Before its first request."""
    app.title, app.version = "pageferry", importlib.metadata.version("pageferry")
    around: Any = app.middleware_stack  # what counts answers has built it: built again it would count nothing
    while not isinstance(around.app, ExceptionMiddleware):
        around = around.app
    around.app.add_exception_handler(HTTPException, _no_such_route)
    around.app.add_exception_handler(ControllerGone, _without_controller)
    around.app = HangUps(around.app)


async def _no_such_route(request: Request, error: Exception) -> JSONResponse:
    """vLLM's handler is for FastAPI's own exceptions; those of the router are Starlette's."""
    assert isinstance(error, HTTPException)
    kinds = {404: "NotFoundError", 405: "MethodNotAllowed"}
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = f"there is no route {request.url.path}; /docs has them all"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
    answer = error_response(error.status_code, message, kinds.get(error.status_code, "BadRequestError"))
    answer.headers.update(error.headers or {})
    return answer


async def _without_controller(request: Request, error: Exception) -> JSONResponse:
    """Of /status and the other routes that ask the controller alone."""
    answer = error_response(503, str(error), "Service Unavailable")
    answer.headers["Retry-After"] = "1"
    return answer


class HangUps:
    """An answer whose client has gone before its end gets status 499, for what counts answers around this.

    That may be a second start of the answer: `app.api.middleware` sends none on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gone = ended = False

        async def heard() -> Message:
            nonlocal gone
            message = await receive()
            gone |= message["type"] == "http.disconnect" and not ended
            return message

        async def said(message: Message) -> None:
            nonlocal ended
            if gone and message["type"] == "http.response.start":
                message = {**message, "status": HUNG_UP}
            ended |= not gone and message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, heard, said)
        except asyncio.CancelledError:  # a stream without a reader
            gone |= not ended
            raise
        finally:
            if gone:
                await send({"type": "http.response.start", "status": HUNG_UP, "headers": []})
