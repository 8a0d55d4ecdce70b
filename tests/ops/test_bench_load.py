"""The load generator and the gate against a real HTTP server that streams what each test says.

1. TTFT is the first event with text; TPOT counts tokens, not events; usage is read.
2. Events cut anywhere by the network are put together again.
3. A wave keeps its concurrency and answers every prompt once.
4. Every way in which an answer can be wrong is a breach, and a good one is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ops.bench import gate, load
from ops.bench.load import Answer


def event(text: str = "", reason: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    body: dict[str, Any] = {"choices": [{"text": text, "finish_reason": reason}] if text or reason else []}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = [event(" one"), event(" two three", "length"), event(usage=(5, 3)), DONE]

Handler = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await handler(request, response)
        return response

    async with serving(completions) as url:
        yield url


@asynccontextmanager
async def serving(completions: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sends(chunks: list[bytes], pause_s: float = 0.0) -> Handler:
    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(pause_s)

    return handler


async def answer_to(chunks: list[bytes], pause_s: float = 0.0) -> Answer:
    async with server(sends(chunks, pause_s)) as url, load.open_session() as session:
        return await load.ask(session, url, load.body_of("m", "p", 3))


async def test_times_and_usage() -> None:
    answer = await answer_to([event(), *GOOD], 0.05)  # the first event has no text: no token yet
    assert answer.error == "" and answer.text == " one two three" and answer.num_events == 2
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (5, 3)
    assert 0.05 <= answer.ttft_s <= answer.seconds
    # Three tokens in two events: the gap between the events is shared by two tokens.
    assert answer.tpot_s == pytest.approx((answer.seconds - answer.ttft_s) / 2)
    assert gate.answer_breaches("here", [answer], 5, 3) == []


async def test_gaps_are_between_reads() -> None:
    def tokens(*ids: int) -> bytes:
        return b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": ids}]}).encode() + b"\n\n"

    answer = await answer_to([tokens(1), tokens(2, 3), tokens(4) + tokens(5), *GOOD[2:]], 0.05)
    first, second, third, fourth = answer.gaps_s
    assert first >= 0.03 and third >= 0.03 and second == fourth == 0
    assert (answer.num_events, answer.num_reads) == (4, 3)


async def test_events_cut_anywhere() -> None:
    whole = b"".join(GOOD)
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    answer = await answer_to(pieces, 0.001)
    assert (answer.text, answer.finish_reason, answer.done_seen) == (" one two three", "length", True)


async def test_a_wave_keeps_its_concurrency() -> None:
    running = most = 0
    seen: list[str] = []

    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append((await request.json())["prompt"])
        await asyncio.sleep(0.02)
        running -= 1
        await sends(GOOD)(request, response)

    texts = [f"prompt {i}" for i in range(11)]
    async with server(handler) as url, load.open_session() as session:
        wave = await load.wave(session, url, "m", texts, 3, 4)
    assert most == 4 and sorted(seen) == sorted(texts)
    assert [answer.index for answer in wave.answers] == list(range(11))
    assert wave.tokens_per_s == pytest.approx(33 / wave.seconds)


@pytest.mark.parametrize(
    "chunks, said",
    [
        ([event(" a", "length"), event(usage=(4, 3)), DONE], "usage says 4 prompt tokens, 5 were sent"),
        ([event(" a", "length"), event(usage=(5, 2)), DONE], "usage says 2 output tokens, 3 were asked for"),
        ([event(" a", "stop"), event(usage=(5, 3)), DONE], "ended as 'stop'"),
        ([event(" a", "length"), event(usage=(5, 3))], "[DONE] missing"),
        ([event(" a"), b'data: {"error": {"message": "boom"}}\n\n'], "boom"),
        ([b"data: {nonsense\n\n"], "JSONDecodeError"),
        ([DONE], "without a token"),
    ],
)
async def test_what_is_wrong_is_a_breach(chunks: list[bytes], said: str) -> None:
    found = gate.answer_breaches("here", [await answer_to(chunks)], 5, 3)
    assert len(found) == 1 and said in found[0]


async def test_a_refusal_and_a_dead_server_are_errors() -> None:
    async with server(sends([])) as url, load.open_session() as session:
        missing = await load.ask(session, url + "/elsewhere", load.body_of("m", "p", 3))
    async with load.open_session() as session:
        gone = await load.ask(session, url, load.body_of("m", "p", 3))
    assert missing.error.startswith("HTTP 404") and "Connect" in gone.error


async def test_a_refusal_with_a_time_is_asked_again() -> None:
    asked = 0

    async def completions(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked < 3:
            return web.Response(status=429, headers={"Retry-After": "0"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await sends(GOOD)(request, response)
        return response

    async with serving(completions) as url, load.open_session() as session:
        answer = await load.ask(session, url, load.body_of("m", "p", 3))
        asked = -10
        refused = await load.ask(session, url, load.body_of("m", "p", 3))
    assert (answer.error, answer.retries) == ("", 2)
    assert refused.error.startswith("HTTP 429") and refused.retries == load.TRIES - 1


def test_gaps_are_between_tokens() -> None:
    answer = Answer(0, token_s=[0.5, 0.75, 0.75, 1.5])
    assert answer.gaps_s == [0.25, 0.0, 0.75]


def test_repeats_must_be_equal() -> None:
    same = [[Answer(0, text="a"), Answer(1, text="b")] for _ in range(3)]
    assert gate.repeat_breaches("s", same) == []
    same[2][1].text = "c"
    assert len(gate.repeat_breaches("s", same)) == 1 and "gate prompt 1" in gate.repeat_breaches("s", same)[0]
    assert "empty answer" in gate.repeat_breaches("s", [[Answer(0)]])[0]


def test_pages_must_have_been_handed_over() -> None:
    assert gate.hand_over_breaches("s", 100, 0, 100) == []
    assert "99 prompt tokens were handed over" in gate.hand_over_breaches("s", 99, 0, 100)[0]
    assert "computed 7" in gate.hand_over_breaches("s", 100, 7, 100)[0]
