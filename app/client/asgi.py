"""One request through an ASGI application without a socket: for callers that come over a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message

IN_PROCESS = ("handle", 0)  # the peer of a request that came over a Serve handle


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    peer: tuple[str, int] = IN_PROCESS,
) -> AsyncGenerator[Any, None]:
    """Yields `(status, headers)` and then the body's chunks. Closing the generator is the client's disconnect."""
    messages: asyncio.Queue[Message | BaseException | None] = asyncio.Queue(maxsize=64)
    gone = asyncio.Event()
    pending = [{"type": "http.request", "body": body or b"", "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(method, path, headers, peer), receive, messages.put)
        except BaseException as error:
            await messages.put(error)
            raise
        await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            if message["type"] == "http.response.start":
                yield message["status"], {key.decode(): value.decode() for key, value in message.get("headers", ())}
            elif message["type"] == "http.response.body":
                if chunk := message.get("body", b""):
                    yield bytes(chunk)
                if not message.get("more_body", False):
                    break
    finally:
        gone.set()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope(method: str, path: str, headers: Mapping[str, str], peer: tuple[str, int]) -> dict[str, Any]:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(key.lower().encode(), value.encode()) for key, value in headers.items()],
        "client": peer,
        "server": ("handle", 0),
        "state": {},
    }
