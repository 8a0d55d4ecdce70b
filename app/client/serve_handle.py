"""How the Python client reaches the service: HTTP, or a Serve handle of the ingress. One request, one reply, chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and lower-case headers, before the body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)


class Transport(Protocol):
    def open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AbstractContextManager[tuple[Reply, Iterator[bytes]]]:
        """Leaving the block before the body's end cancels the request."""
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    def open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AbstractAsyncContextManager[tuple[Reply, AsyncIterator[bytes]]]: ...

    async def close(self) -> None: ...


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers | {"authorization": f"Bearer {api_key}"} if api_key else headers


def _content(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


class _Http:
    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._client = httpx.Client(base_url=url, headers=_headers(api_key), timeout=timeout_s)

    @contextmanager
    def open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[tuple[Reply, Iterator[bytes]]]:
        with self._client.stream(method, path, content=_content(body)) as response:
            yield Reply(response.status_code, dict(response.headers)), response.iter_bytes()

    def close(self) -> None:
        self._client.close()


class _AsyncHttp:
    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._client = httpx.AsyncClient(base_url=url, headers=_headers(api_key), timeout=timeout_s)

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[tuple[Reply, AsyncIterator[bytes]]]:
        async with self._client.stream(method, path, content=_content(body)) as response:
            yield Reply(response.status_code, dict(response.headers)), response.aiter_bytes()

    async def close(self) -> None:
        await self._client.aclose()


class _Handle:
    """Calls `Frontend.http`, whose first item is status and headers and whose other items are the body."""

    def __init__(self, handle: Any, api_key: str | None) -> None:
        self._handle = handle.options(method_name="http", stream=True)
        self._headers = _headers(api_key)

    @contextmanager
    def open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[tuple[Reply, Iterator[bytes]]]:
        response = self._handle.remote(method, path, self._headers, _content(body))
        try:
            status, headers = next(response)
            yield Reply(status, headers), response
        finally:
            response.cancel()  # no effect on one that has ended

    def close(self) -> None:
        pass


class _AsyncHandle(_Handle):
    @asynccontextmanager
    async def open(  # type: ignore[override]
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[tuple[Reply, AsyncIterator[bytes]]]:
        response = self._handle.remote(method, path, self._headers, _content(body))
        try:
            status, headers = await anext(response)
            yield Reply(status, headers), response
        finally:
            response.cancel()

    async def close(self) -> None:  # type: ignore[override]
        pass


def transport(target: Any, api_key: str | None, timeout_s: float) -> Transport:
    return _Http(target, api_key, timeout_s) if isinstance(target, str) else _Handle(target, api_key)


def async_transport(target: Any, api_key: str | None, timeout_s: float) -> AsyncTransport:
    return _AsyncHttp(target, api_key, timeout_s) if isinstance(target, str) else _AsyncHandle(target, api_key)
