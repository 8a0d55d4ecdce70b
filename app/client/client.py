"""The Python client: the `openai` client over HTTP or over a Ray Serve handle, with shorter calls and typed errors.

    from app.client import Client
    with Client("http://127.0.0.1:8000") as client:
        print(client.chat("Name three fruits.", max_tokens=40).text)
        for delta in client.stream_chat("Count to ten."):
            print(delta.text, end="")
        client.openai.embeddings.create(...)  # the whole API, typed

A stream is a context manager too: leaving its `with` block before the end, or `close`, cancels the request on the
service. Options of a call are fields of the OpenAI API, or of vLLM's, and are passed on as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2
import openai

from app.client.serve_handle import AsyncHandleTransport, HandleTransport
from app.request.events import PAGE_INTEGRITY_ERROR

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


def _service_error(status: int, error: Any, headers: httpx2.Headers) -> ServiceError:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    kind, wait = str(fields.get("type") or ""), headers.get("retry-after")
    made = PageIntegrityError if kind == PAGE_INTEGRITY_ERROR else ServiceError
    return made(status, str(fields.get("message") or "it failed"), float(wait) if wait else None, kind)


@contextmanager
def _errors() -> Iterator[None]:
    """`ServiceError` for what the service says; a connection that fails or times out stays openai's error."""
    try:
        yield
    except openai.APIStatusError as error:
        raise _service_error(error.status_code, error.body or error.message, error.response.headers) from error
    except openai.APIConnectionError:
        raise
    except openai.APIError as error:  # in a stream that had begun
        body = error.body if isinstance(error.body, dict) else {"message": error.message}
        raise _service_error(int(body.get("code") or 500), body, httpx2.Headers()) from error


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


def _usage(raw: dict[str, Any]) -> Usage | None:
    if not (usage := raw.get("usage")):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), details.get("cached_tokens"))


def _completion(answer: Any) -> Completion:
    raw = answer.model_dump(exclude_unset=True)
    choices = []
    for choice in raw["choices"]:
        message = choice.get("message") or {}
        choices.append(
            Choice(
                choice["index"],
                (message.get("content") if message else choice.get("text")) or "",
                choice.get("finish_reason"),
                choice.get("stop_reason"),
                choice.get("logprobs"),
                tuple(message.get("tool_calls") or ()),
            )
        )
    return Completion(raw["id"], raw["model"], tuple(choices), _usage(raw) or Usage(), raw)


def _deltas(chunk: Any) -> Iterator[Delta]:
    raw = chunk.model_dump(exclude_unset=True)
    usage = _usage(raw)
    for choice in raw.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
        yield Delta(choice["index"], text or "", choice.get("finish_reason"), usage, raw)
    if not raw.get("choices") and usage is not None:
        yield Delta(-1, "", None, usage, raw)


class DeltaStream:
    """Deltas as they come. The request is sent when the first is asked for, or a `with` block is entered."""

    def __init__(self, start: Callable[[], openai.Stream[Any]]) -> None:
        self._start = start
        self._stream: openai.Stream[Any] | None = None
        self._deltas: Iterator[Delta] = iter(())

    def __enter__(self) -> Self:
        if self._stream is None:
            with _errors():
                self._stream = stream = self._start()
            self._deltas = (delta for chunk in stream for delta in _deltas(chunk))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        self.__enter__()
        try:
            with _errors():
                return next(self._deltas)
        except BaseException:  # its end, or an error: nothing comes after either
            self.close()
            raise

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if self._stream is not None:
            self._stream.close()


class AsyncDeltaStream:
    """As `DeltaStream`, with `async for` and `async with`."""

    def __init__(self, start: Callable[[], Awaitable[openai.AsyncStream[Any]]]) -> None:
        self._start = start
        self._stream: openai.AsyncStream[Any] | None = None
        self._deltas: AsyncIterator[Delta]

    async def __aenter__(self) -> Self:
        if self._stream is None:
            with _errors():
                self._stream = stream = await self._start()
            self._deltas = (delta async for chunk in stream for delta in _deltas(chunk))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await self.__aenter__()
        try:
            with _errors():
                return await anext(self._deltas)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()


def _turns(messages: Messages) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _url(target: Any) -> str:
    return target.rstrip("/") if isinstance(target, str) else "http://service"


def _json(reply: httpx2.Response) -> dict[str, Any]:
    if reply.status_code >= 400:
        try:
            error = reply.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = reply.text[:500]
        raise _service_error(reply.status_code, error, reply.headers)
    answer: dict[str, Any] = reply.json()
    return answer


class Client:
    """`target`: the service's URL, or a Serve handle of its ingress (`serve.get_app_handle("pageferry")`)."""

    def __init__(self, target: Any, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0):
        transport = None if isinstance(target, str) else HandleTransport(target)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx2.Client(base_url=_url(target), transport=transport, headers=headers, timeout=timeout_s)
        self.openai = openai.OpenAI(
            base_url=f"{_url(target)}/v1", api_key=api_key or "none", http_client=self.http, max_retries=0
        )
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    @property
    def model(self) -> str:
        """Given, or asked for once."""
        if self._model is None:
            with _errors():
                self._model = self.openai.models.list().data[0].id
        return self._model

    def chat(self, messages: Messages, **options: Any) -> Completion:
        with _errors():
            create = self.openai.chat.completions.create
            return _completion(create(model=self.model, messages=_turns(messages), extra_body=options))

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        with _errors():
            return _completion(self.openai.completions.create(model=self.model, prompt=prompt, extra_body=options))

    def stream_chat(self, messages: Messages, **options: Any) -> DeltaStream:
        create: Any = self.openai.chat.completions.create
        return DeltaStream(lambda: create(model=self.model, messages=_turns(messages), stream=True, extra_body=options))

    def stream_complete(self, prompt: Prompt, **options: Any) -> DeltaStream:
        create: Any = self.openai.completions.create
        return DeltaStream(lambda: create(model=self.model, prompt=prompt, stream=True, extra_body=options))

    def status(self) -> dict[str, Any]:
        return self.request("GET", "/status")

    def healthy(self) -> bool:
        return self.http.get("/health").status_code == 200

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Any route of the service; raises `ServiceError` for a status of 400 and above."""
        return _json(self.http.request(method, path, json=body))


class AsyncClient:
    """The same calls with `await`; streams with `async for` or `async with`."""

    def __init__(self, target: Any, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0):
        transport = None if isinstance(target, str) else AsyncHandleTransport(target)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx2.AsyncClient(base_url=_url(target), transport=transport, headers=headers, timeout=timeout_s)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{_url(target)}/v1", api_key=api_key or "none", http_client=self.http, max_retries=0
        )
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.http.aclose()

    async def model(self) -> str:
        if self._model is None:
            with _errors():
                self._model = (await self.openai.models.list()).data[0].id
        return self._model

    async def chat(self, messages: Messages, **options: Any) -> Completion:
        with _errors():
            create = self.openai.chat.completions.create
            return _completion(await create(model=await self.model(), messages=_turns(messages), extra_body=options))

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        with _errors():
            create = self.openai.completions.create
            return _completion(await create(model=await self.model(), prompt=prompt, extra_body=options))

    def stream_chat(self, messages: Messages, **options: Any) -> AsyncDeltaStream:
        async def start() -> Any:
            create: Any = self.openai.chat.completions.create
            return await create(model=await self.model(), messages=_turns(messages), stream=True, extra_body=options)

        return AsyncDeltaStream(start)

    def stream_complete(self, prompt: Prompt, **options: Any) -> AsyncDeltaStream:
        async def start() -> Any:
            create: Any = self.openai.completions.create
            return await create(model=await self.model(), prompt=prompt, stream=True, extra_body=options)

        return AsyncDeltaStream(start)

    async def status(self) -> dict[str, Any]:
        return await self.request("GET", "/status")

    async def healthy(self) -> bool:
        return (await self.http.get("/health")).status_code == 200

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return _json(await self.http.request(method, path, json=body))
