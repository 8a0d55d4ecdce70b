"""The bodies that a frontend reads: bounded each, together, and in time, before anything is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive

from app.api.error_rewriter import error_response
from cluster.frontend_spec import FrontendSpec


class BodyRefused(Exception):
    """`response` says why. What of the body has not come yet is not read: the connection ends."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.response: JSONResponse = error_response(status, message, kind)
        self.response.headers["connection"] = "close"
        if status == 503:
            self.response.headers["retry-after"] = "1"


class Bodies:
    """`held`: bytes of all bodies that are being read or served."""

    def __init__(self, limits: FrontendSpec) -> None:
        self._limits = limits
        self.held = 0

    @contextmanager
    def one(self, headers: Headers) -> Iterator[Body]:
        """One request's body, given back at the end. Raises `BodyRefused` for one that says that it is too large."""
        body = Body(self, self._limits)
        declared = headers.get("content-length", "")
        if declared.isdecimal():
            body.check(int(declared[:18]))
        try:
            yield body
        finally:
            self.held -= body.num_bytes


class Body:
    def __init__(self, bodies: Bodies, limits: FrontendSpec) -> None:
        self._bodies = bodies
        self._limits = limits
        self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        most = self._limits.body_bytes_max
        if num_bytes > most:
            raise BodyRefused(413, f"the body has more than {most} bytes (frontend.body_bytes_max)", "BadRequestError")
        if self._bodies.held - self.num_bytes + num_bytes > self._limits.bodies_bytes_max:
            raise BodyRefused(503, "too many large bodies are being served; send it again", "Service Unavailable")

    async def read(self, receive: Receive) -> bytes:
        """The whole body. Raises `BodyRefused`."""
        found = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_wait_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break  # disconnected: the server sees it from `receive` again
                    chunk = message.get("body", b"")
                    self.check(len(found) + len(chunk))
                    found += chunk
                    self._bodies.held += len(chunk)
                    self.num_bytes += len(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            wait_s = self._limits.body_wait_s
            raise BodyRefused(408, f"the body did not come within {wait_s:g} s", "Request Timeout") from None
        return bytes(found)
