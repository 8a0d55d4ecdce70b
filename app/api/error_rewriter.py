"""The end of an answer that has failed, in the API's own form: type, Retry-After, and nothing of what is inside."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import Message, Send

from app.api import api_errors
from app.request.context import Caller
from app.request.events import RequestError, internal_error

logger = logging.getLogger("pageferry.frontend")

Explain = Callable[[], JSONResponse | None]  # of an unexpected error: the client's mistake that caused it


def error_response(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class ErrorRewriter:
    """Says a fault in full: its type, Retry-After, and the end of a stream.

    An event stream whose first event is our refusal becomes a plain HTTP error. A 500 that is not a fault of ours is an
    exception inside: the client gets the request's id, the log gets the rest.
    """

    def __init__(self, send: Send, caller: Caller, explain: Explain = lambda: None) -> None:
        self._send = send
        self._caller = caller
        self._explain = explain
        self._held: Message | None = None  # the start of a response whose first event, or whose error, is not seen yet
        self._error_body: list[bytes] | None = None
        self._unexpected = False
        self.explained = False  # an exception of the server's was the client's mistake, and has been answered so
        self._started = False
        self.status = 0  # of the answer, as it was begun
        self._streaming = False
        self._replaced = False
        self._first = self._last = b""  # events of the stream

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._on_start(message)
        elif self._error_body is not None:
            await self._on_error_body(self._error_body, message)
        elif self._streaming:
            await self._on_chunk(message)
        else:
            await self._send(message)

    async def _on_start(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        self._name_request(headers)
        add_rate_headers(headers, self._caller)
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._held, self._streaming = message, True
            return
        fault = self._caller.fault
        if fault is None and message["status"] == 500:
            self._unexpected = True
        if message["status"] >= 400 and fault is not None and fault.retry_after_s > 0:
            headers["retry-after"] = retry_after(fault)
        if self._unexpected or (message["status"] >= 400 and fault is not None and fault.kind):
            self._held, self._error_body = message, []
            return
        self._started = True
        await self._send(message)

    async def _on_error_body(self, chunks: list[bytes], message: Message) -> None:
        chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        if self._unexpected:
            return  # `finish` answers: the exception may be about to come
        start, fault = self._held, self._caller.fault
        assert start is not None and fault is not None
        body = api_errors.with_kind(b"".join(chunks), fault)
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        self._started = True
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _on_chunk(self, message: Message) -> None:
        fault, chunk = self._caller.fault, message.get("body", b"")
        if self._held is not None:
            start, self._held = self._held, None
            if fault is not None:
                await self._send_fault(fault)
                return
            self._started = True
            add_rate_headers(MutableHeaders(scope=start), self._caller)  # it has been admitted by now
            await self._send(start)
            self._first = chunk
        if api_errors.is_error_event(chunk):
            if fault is None and api_errors.event_status(chunk) >= 500:
                self._log(chunk)
                fault = internal_error(self._caller.trace)
            if fault is not None:
                message = {**message, "body": api_errors.error_event(chunk, fault, self._last)}
        self._last = chunk or self._last
        self._streaming = message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        """The server has returned."""
        if self._unexpected:
            if (refusal := self._explain()) is not None:
                await self._send_whole(refusal)
                return
            self._log(b"".join(self._error_body or ()))
            await self._send_fault(internal_error(self._caller.trace))

    async def broken_off(self) -> bool:
        """The server has raised. True: the client has its error, in the form that its answer has begun in."""
        if self._replaced:
            return True
        fault = self._caller.fault or internal_error(self._caller.trace)
        if not self._started:
            if self._caller.fault is None and (refusal := self._explain()) is not None:
                self.explained = True
                await self._send_whole(refusal)
            else:
                await self._send_fault(fault)
        elif self._streaming:
            body = api_errors.closing_events(fault, self._first, self._last)
            await self._send({"type": "http.response.body", "body": body})
            self._replaced = True
        return self._replaced

    async def _send_fault(self, fault: RequestError) -> None:
        response = error_response(fault.status, fault.message, api_errors.kind_of(fault))
        if fault.retry_after_s > 0:
            response.headers["retry-after"] = retry_after(fault)
        await self._send_whole(response)

    async def _send_whole(self, response: JSONResponse) -> None:
        self._replaced = self._started = True
        self._name_request(response.headers)
        add_rate_headers(response.headers, self._caller)
        self.status = status = response.status_code
        await self._send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body})

    def _name_request(self, headers: MutableHeaders) -> None:
        if not self._caller.named_by_serve:
            headers.setdefault("x-request-id", self._caller.trace)

    def _log(self, body: bytes) -> None:
        logger.error("request %s: answered 500: %s", self._caller.trace, body[:2000].decode(errors="replace"))


def retry_after(fault: RequestError) -> str:
    return str(max(1, math.ceil(fault.retry_after_s)))


def add_rate_headers(headers: MutableHeaders, caller: Caller) -> None:
    """As OpenAI's API says what is left of a limit and when it will be whole again."""
    if caller.rates is None:
        return
    for name, rate in (("requests", caller.rates.requests), ("tokens", caller.rates.tokens)):
        if rate is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(rate.reset_s)


def duration(seconds: float) -> str:
    """`350ms`, `12.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:g}s"
