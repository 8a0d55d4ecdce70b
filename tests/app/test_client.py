"""The Python client over HTTP against a real socket server, and over a handle-like object."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.client import AsyncClient, Client, Delta, PageIntegrityError, ServiceError, Usage, asgi

CANCELLED = threading.Event()
CLOSING: list[Any] = []
MIXED_UP = {"message": "a page was not its own", "type": "page_integrity_error", "param": None, "code": 500}


def _chunk(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'c', 'model': 'm', 'choices': [choice]})}\n\n"


async def chat(request: Request) -> Response:
    body = await request.json()
    if body.get("user") == "busy":
        error = {"error": {"message": "no room", "type": "Too Many Requests", "param": None, "code": 429}}
        return JSONResponse(error, 429, {"retry-after": "3"})
    if body.get("user") == "mixed up" and not body.get("stream"):
        return JSONResponse({"error": MIXED_UP}, 500)
    if not body.get("stream"):
        message = {"role": "assistant", "content": f"{len(body['messages'])} turns", "tool_calls": []}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None, "logprobs": None}
        return JSONResponse({"id": "c", "model": body["model"], "choices": [choice], "usage": usage})

    async def events() -> AsyncIterator[str]:
        try:
            yield _chunk("one ")
            if body.get("user") == "endless":
                while True:
                    await asyncio.sleep(0.01)
                    yield _chunk("more ")
            if body.get("user") == "mixed up":
                yield f"data: {json.dumps({'error': MIXED_UP})}\n\n"
            if body.get("user") == "failing":
                yield f"data: {json.dumps({'error': {'message': 'decode died', 'code': 503}})}\n\n"
            yield _chunk("two", "length")
            usage = {"prompt_tokens": 5, "completion_tokens": 2}
            yield f"data: {json.dumps({'id': 'c', 'model': 'm', 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            CANCELLED.set()
            raise

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": "smol"}]})


async def key(request: Request) -> Response:
    return JSONResponse({"authorization": request.headers.get("authorization")})


async def health(request: Request) -> Response:
    return Response(status_code=503)


APP = Starlette(
    routes=[
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/status", key),
        Route("/health", health),
    ]
)


class Handle:
    """What the client needs of a Serve handle, with the ingress's `http` method run in this process."""

    def options(self, *, method_name: str, stream: bool) -> Handle:
        assert (method_name, stream) == ("http", True)
        return self

    def remote(self, *args: Any) -> Any:
        generator = asgi.call(APP, *args)

        class Response:
            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> Any:
                return await anext(generator)

            def cancel(self) -> None:
                CLOSING.append(asyncio.ensure_future(generator.aclose()))

        return Response()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(APP, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        pass
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_typed_answer(url: str) -> None:
    with Client(url) as client:
        answer = client.chat("Hello", max_tokens=3)
        assert (answer.text, answer.model) == ("1 turns", "smol")
        assert answer.usage == Usage(5, 2, 4)
        assert answer.choices[0].finish_reason == "stop"
        assert [model.id for model in client.openai.models.list()] == ["smol"], "and the whole API, typed"


def test_a_stream_of_deltas(url: str) -> None:
    with Client(url, model="m") as client, client.stream_chat("Hello") as stream:
        deltas = list(stream)
    assert [delta.text for delta in deltas] == ["one ", "two", ""]
    assert deltas[1].finish_reason == "length"
    assert (deltas[2].index, deltas[2].usage) == (-1, Usage(5, 2, None))


def test_a_stream_needs_no_with_block(url: str) -> None:
    with Client(url, model="m") as client:
        assert [delta.text for delta in client.stream_chat("Hello")] == ["one ", "two", ""]
        CANCELLED.clear()
        stream = client.stream_chat("Hello", user="endless")
        assert next(stream).text == "one "
        stream.close()
        assert CANCELLED.wait(5)


async def test_an_async_stream_needs_no_with_block(url: str) -> None:
    async with AsyncClient(url) as client:
        assert [delta.text async for delta in client.stream_chat("Hello")] == ["one ", "two", ""]


def test_leaving_a_stream_cancels_it(url: str) -> None:
    CANCELLED.clear()
    with Client(url, model="m") as client, client.stream_chat("Hello", user="endless") as stream:
        assert next(stream).text == "one "
    assert CANCELLED.wait(5)


def test_refusals_say_why_and_when_to_come_back(url: str) -> None:
    with Client(url, model="m") as client:
        for call in (client.chat, lambda *a, **k: client.stream_chat(*a, **k).__enter__()):
            with pytest.raises(ServiceError, match="no room") as caught:
                call("Hello", user="busy")
            assert (caught.value.status, caught.value.retry_after_s) == (429, 3.0)


def test_a_stream_that_fails_raises(url: str) -> None:
    with Client(url, model="m") as client, client.stream_chat("Hello", user="failing") as stream:
        assert next(stream).text == "one "
        with pytest.raises(ServiceError, match="decode died") as caught:
            next(stream)
    assert caught.value.status == 503


def test_key_and_health(url: str) -> None:
    with Client(url, api_key="sk") as client:
        assert client.status() == {"authorization": "Bearer sk"}
        assert not client.healthy()


@pytest.mark.parametrize("over", ["http", "handle"])
async def test_the_async_client(url: str, over: str) -> None:
    CANCELLED.clear()
    async with AsyncClient(url if over == "http" else Handle()) as client:
        assert (await client.chat([{"role": "user", "content": "Hi"}] * 3)).text == "3 turns"
        async with client.stream_chat("Hello") as stream:
            deltas: list[Delta] = [delta async for delta in stream]
        assert [delta.text for delta in deltas] == ["one ", "two", ""]
        async with client.stream_chat("Hello", user="endless") as stream:
            assert (await anext(stream)).text == "one "
        async with asyncio.timeout(5):
            while not CANCELLED.is_set():
                await asyncio.sleep(0.01)
        with pytest.raises(ServiceError):
            await client.chat("Hello", user="busy")


def test_a_page_mismatch_has_a_type_of_its_own(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(PageIntegrityError, match="not its own") as caught:
            client.chat("Hello", user="mixed up")
        assert (caught.value.status, caught.value.kind) == (500, "page_integrity_error")
        seen = []
        with client.stream_chat("Hello", user="mixed up") as stream, pytest.raises(PageIntegrityError) as late:
            seen += [delta.text for delta in stream]
        assert seen == [] and late.value.status == 500, "the comprehension is given up with the error"
        with client.stream_chat("Hello", user="mixed up") as stream:
            assert next(stream).text == "one "


async def test_the_async_client_raises_it_too(url: str) -> None:
    async with AsyncClient(url) as client:
        with pytest.raises(PageIntegrityError):
            await client.chat("Hello", user="mixed up")
