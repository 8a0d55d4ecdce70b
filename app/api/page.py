"""`GET /pageferry`: a page for people to look at, and the events that keep it up to date.

The page itself holds no data and is open; the events are for administrators, like `/status`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from app.api.error_rewriter import error_response

logger = logging.getLogger("pageferry.frontend")

PAGE = Path(__file__).with_name("page.html")
EVERY_S = 2.0
VIEWERS_MAX = 8  # a frontend's; each asks the controller for its status every EVERY_S
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
)
PATHS = ("/pageferry", "/pageferry/events")


def add_page(routes: FastAPI, status: Callable[[], Awaitable[dict[str, Any]]], every_s: float = EVERY_S) -> None:
    page = PAGE.read_text()
    viewers = 0

    @routes.get("/pageferry")
    async def get_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    @routes.get("/pageferry/events")
    async def get_events() -> Response:
        if viewers >= VIEWERS_MAX:
            return error_response(503, f"{VIEWERS_MAX} people look at this frontend already", "Service Unavailable")
        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def events() -> AsyncGenerator[str, None]:
        nonlocal viewers
        viewers += 1
        try:
            while True:
                yield await _event(status)
                await asyncio.sleep(every_s)
        finally:
            viewers -= 1


async def _event(status: Callable[[], Awaitable[dict[str, Any]]]) -> str:
    try:
        found = await asyncio.wait_for(status(), 5.0)
    except Exception as error:  # the page says that nothing was heard; what it was is for the log
        logger.warning("page: the controller does not answer: %s: %s", type(error).__name__, error)
        return "event: away\ndata: {}\n\n"
    return f"event: status\ndata: {json.dumps(found, separators=(',', ':'))}\n\n"
