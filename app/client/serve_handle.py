"""httpx2 transports over a Serve handle of the ingress: one request is one call of `Frontend.http`.

Its first item is `(status, headers)`, its others are the body. Closing the response cancels the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2


def _call(handle: Any, request: httpx2.Request, body: bytes) -> Any:
    path = request.url.raw_path.decode()
    return handle.remote(request.method, path, dict(request.headers), body or None)


class _Body(httpx2.SyncByteStream):
    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        yield from self._response

    def close(self) -> None:
        self._response.cancel()  # no effect on one that has ended


class _AsyncBody(httpx2.AsyncByteStream):
    def __init__(self, response: Any) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response:
            yield chunk

    async def aclose(self) -> None:
        self._response.cancel()


class HandleTransport(httpx2.BaseTransport):
    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="http", stream=True)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = _call(self._handle, request, request.read())
        status, headers = next(response)
        return httpx2.Response(status, headers=headers, stream=_Body(response))


class AsyncHandleTransport(httpx2.AsyncBaseTransport):
    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="http", stream=True)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = _call(self._handle, request, await request.aread())
        status, headers = await anext(response)
        return httpx2.Response(status, headers=headers, stream=_AsyncBody(response))
