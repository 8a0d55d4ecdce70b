"""The Python client: sync and async, over HTTP or over a Ray Serve handle, with streaming, cancellation, typed results.

    from app.client import Client
    with Client("http://127.0.0.1:8000") as client:
        print(client.chat("Name three fruits.", max_tokens=40).text)
        for delta in client.stream_chat("Count to ten."):
            print(delta.text, end="")

A stream is a context manager too: leaving its `with` block before the end, or `close`, cancels the request on the
service. Options of a call are fields of the OpenAI API and are passed on as they are.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from app.client.serve_handle import AsyncTransport, Reply, Transport, async_transport, transport
from app.request.state import PAGE_INTEGRITY_ERROR

Messages = str | list[dict[str, Any]]
Prompt = str | list[int] | list[str] | list[list[int]]


class ServiceError(Exception):
    """The service refused or failed a request. `retry_after_s` is set when it is worth trying again later."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None, kind: str = "") -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.kind = kind  # the error's `type` as the service sent it


class PageIntegrityError(ServiceError):
    """A page of the request's KV cache was not its own. What had been streamed until then is right; send it again."""


def _error(status: int, message: str, retry_after_s: float | None, kind: str) -> ServiceError:
    made = PageIntegrityError if kind == PAGE_INTEGRITY_ERROR else ServiceError
    return made(status, message, retry_after_s, kind)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: Any = None
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `raw` is the whole response as the service sent it."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    raw: dict[str, Any] = field(repr=False)

    @property
    def text(self) -> str:
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of a stream adds to one choice. The event with the usage has no choice: `index` is -1."""

    index: int
    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


# -- what both clients share: bodies and parsing


def _chat_body(model: str, messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"model": model, "messages": turns, **options}


def _prompt_body(model: str, prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, **options}


def _usage(raw: dict[str, Any] | None) -> Usage | None:
    if not raw:
        return None
    details = raw.get("prompt_tokens_details") or {}
    return Usage(raw.get("prompt_tokens", 0), raw.get("completion_tokens", 0), details.get("cached_tokens"))


def _completion(raw: dict[str, Any]) -> Completion:
    choices = []
    for choice in raw["choices"]:
        message = choice.get("message") or {}
        text = message.get("content") if message else choice.get("text")
        choices.append(
            Choice(
                choice["index"],
                text or "",
                choice.get("finish_reason"),
                choice.get("stop_reason"),
                choice.get("logprobs"),
                tuple(message.get("tool_calls") or ()),
            )
        )
    return Completion(raw["id"], raw["model"], tuple(choices), _usage(raw.get("usage")) or Usage(), raw)


def _deltas(event: bytes) -> Iterator[Delta]:
    raw = json.loads(event)
    if "error" in raw:
        error = raw["error"]
        message = error.get("message", "the stream failed")
        raise _error(int(error.get("code") or 500), message, None, str(error.get("type") or ""))
    usage = _usage(raw.get("usage"))
    for choice in raw.get("choices", ()):
        text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
        yield Delta(choice["index"], text or "", choice.get("finish_reason"), usage, raw)
    if not raw.get("choices") and usage is not None:
        yield Delta(-1, "", None, usage, raw)


class _Lines:
    """Cuts chunks of an event stream into the data of its events; None at its end mark."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                yield None if data == b"[DONE]" else data


def _raise_for(reply: Reply, body: bytes) -> None:
    if reply.status < 400:
        return
    kind = ""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
        kind = str(error.get("type") or "") if isinstance(error, dict) else ""
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:500]
    retry_after = reply.headers.get("retry-after")
    raise _error(reply.status, message, float(retry_after) if retry_after else None, kind)


class DeltaStream:
    """Deltas as they come: iterate over it, or over what `with` gives. The request is sent when either begins."""

    def __init__(self, deltas: AbstractContextManager[Iterator[Delta]]) -> None:
        self._context = deltas
        self._stack = ExitStack()
        self._deltas: Iterator[Delta] | None = None

    def __enter__(self) -> Self:
        if self._deltas is None:
            self._deltas = self._stack.enter_context(self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        deltas = self.__enter__()._deltas
        assert deltas is not None
        try:
            return next(deltas)
        except BaseException:  # its end, or an error: nothing comes after either
            self.close()
            raise

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._stack.close()


class AsyncDeltaStream:
    """As `DeltaStream`, with `async for` and `async with`."""

    def __init__(self, deltas: AbstractAsyncContextManager[AsyncIterator[Delta]]) -> None:
        self._context = deltas
        self._stack = AsyncExitStack()
        self._deltas: AsyncIterator[Delta] | None = None

    async def __aenter__(self) -> Self:
        if self._deltas is None:
            self._deltas = await self._stack.enter_async_context(self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        deltas = (await self.__aenter__())._deltas
        assert deltas is not None
        try:
            return await anext(deltas)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._stack.aclose()


class _Named:
    """The model's name: given, or asked for once."""

    def __init__(self, model: str | None) -> None:
        self._model = model

    @staticmethod
    def _first_model(body: dict[str, Any]) -> str:
        return str(body["data"][0]["id"])


# -- sync


class Client(_Named):
    """`target`: the service's URL, or a Serve handle of its ingress (`serve.get_app_handle("pageferry")`)."""

    def __init__(self, target: Any, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0):
        super().__init__(model)
        self._transport: Transport = transport(target, api_key, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def model(self) -> str:
        if self._model is None:
            self._model = self._first_model(self.request("GET", "/v1/models"))
        return self._model

    def chat(self, messages: Messages, **options: Any) -> Completion:
        return _completion(self.request("POST", "/v1/chat/completions", _chat_body(self.model, messages, options)))

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        return _completion(self.request("POST", "/v1/completions", _prompt_body(self.model, prompt, options)))

    def stream_chat(self, messages: Messages, **options: Any) -> DeltaStream:
        return DeltaStream(self._stream("/v1/chat/completions", _chat_body(self.model, messages, options)))

    def stream_complete(self, prompt: Prompt, **options: Any) -> DeltaStream:
        return DeltaStream(self._stream("/v1/completions", _prompt_body(self.model, prompt, options)))

    def status(self) -> dict[str, Any]:
        return self.request("GET", "/status")

    def healthy(self) -> bool:
        with self._transport.open("GET", "/health", None) as (reply, _):
            return reply.status == 200

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Any route of the service; raises `ServiceError` for a status of 400 and above."""
        with self._transport.open(method, path, body) as (reply, chunks):
            content = b"".join(chunks)
        _raise_for(reply, content)
        found: dict[str, Any] = json.loads(content)
        return found

    @contextmanager
    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[Delta]]:
        with self._transport.open("POST", path, {**body, "stream": True}) as (reply, chunks):
            if reply.status >= 400:
                _raise_for(reply, b"".join(chunks))
            yield self._read(chunks)

    @staticmethod
    def _read(chunks: Iterator[bytes]) -> Iterator[Delta]:
        lines = _Lines()
        for chunk in chunks:
            for event in lines.feed(chunk):
                if event is None:
                    return
                yield from _deltas(event)


# -- async


class AsyncClient(_Named):
    """The same calls with `await`; streams with `async for` or `async with`."""

    def __init__(self, target: Any, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0):
        super().__init__(model)
        self._transport: AsyncTransport = async_transport(target, api_key, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    async def model(self) -> str:
        if self._model is None:
            self._model = self._first_model(await self.request("GET", "/v1/models"))
        return self._model

    async def chat(self, messages: Messages, **options: Any) -> Completion:
        body = _chat_body(await self.model(), messages, options)
        return _completion(await self.request("POST", "/v1/chat/completions", body))

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        body = _prompt_body(await self.model(), prompt, options)
        return _completion(await self.request("POST", "/v1/completions", body))

    def stream_chat(self, messages: Messages, **options: Any) -> AsyncDeltaStream:
        return AsyncDeltaStream(self._stream("/v1/chat/completions", lambda m: _chat_body(m, messages, options)))

    def stream_complete(self, prompt: Prompt, **options: Any) -> AsyncDeltaStream:
        return AsyncDeltaStream(self._stream("/v1/completions", lambda m: _prompt_body(m, prompt, options)))

    async def status(self) -> dict[str, Any]:
        return await self.request("GET", "/status")

    async def healthy(self) -> bool:
        async with self._transport.open("GET", "/health", None) as (reply, _):
            return reply.status == 200

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._transport.open(method, path, body) as (reply, chunks):
            content = b"".join([chunk async for chunk in chunks])
        _raise_for(reply, content)
        found: dict[str, Any] = json.loads(content)
        return found

    @asynccontextmanager
    async def _stream(self, path: str, body: Callable[[str], dict[str, Any]]) -> AsyncIterator[AsyncIterator[Delta]]:
        streamed = {**body(await self.model()), "stream": True}
        async with self._transport.open("POST", path, streamed) as (reply, chunks):
            if reply.status >= 400:
                _raise_for(reply, b"".join([chunk async for chunk in chunks]))
            yield self._read(chunks)

    @staticmethod
    async def _read(chunks: AsyncIterator[bytes]) -> AsyncIterator[Delta]:
        lines = _Lines()
        async for chunk in chunks:
            for event in lines.feed(chunk):
                if event is None:
                    return
                for delta in _deltas(event):
                    yield delta
