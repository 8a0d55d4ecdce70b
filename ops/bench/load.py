"""The load client of every benchmark: greedy streams of `/v1/completions` over httpx and httpx-sse, in one loop.

Times are those of the read of the socket that brought an event. TTFT is the time to the first event that carries a
token or a finish reason; TPOT is (last event - first event) / (output tokens - 1), so that a system that sends several
tokens in one event is not favoured.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
from httpx_sse import EventSource, SSEError

REQUEST_TIMEOUT_S = 300.0
TRIES = 5  # of a request that has to come again (429 with Retry-After)


@dataclass(slots=True)
class Answer:
    """What came of one request. `error` is "" when it is good."""

    index: int
    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_events: int = 0
    num_reads: int = 0  # of the socket, that brought a token
    token_s: list[float] = field(default_factory=list)  # when each token was read, since the request was sent
    done_seen: bool = False
    start_s: float = 0.0
    ttft_s: float = 0.0
    end_s: float = 0.0
    error: str = ""
    retries: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.start_s - self.ttft_s) / max(1, self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Time between each token and the one before; 0 for tokens of one event or one read."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:])]


@dataclass(slots=True)
class Wave:
    """All requests of one load on one system in one round."""

    concurrency: int
    seconds: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_output_tokens for answer in self.answers if not answer.error) / self.seconds


class _TimedText:
    """What `EventSource` wants of a response, with the time of the read of the socket that brought the latest text."""

    def __init__(self, response: httpx.Response) -> None:
        self.headers, self.read_s, self._response = response.headers, 0.0, response

    async def aiter_text(self) -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        async for data in self._response.aiter_bytes():
            self.read_s = time.perf_counter()
            yield decoder.decode(data)


def body_of(
    model: str, prompt: str | Sequence[int], num_tokens: int, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **(extra or {}),
    }


async def ask(session: httpx.AsyncClient, url: str, body: dict[str, Any], index: int = 0) -> Answer:
    """Sends one request and reads its stream to the end. Never raises for what the server does. A refusal that names a
    time (429, `Retry-After`) is waited out a few times; the wait is part of the answer's time."""
    answer = Answer(index, start_s=time.perf_counter())
    while (wait_s := await _try(session, url, body, answer)) is not None:
        answer.retries += 1
        await asyncio.sleep(wait_s)
    if not answer.error and not answer.ttft_s:
        answer.error = "the stream ended without a token"
    answer.end_s = answer.end_s or time.perf_counter()
    return answer


async def _try(session: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer) -> float | None:
    """Seconds to wait before the next try; None when the request has ended."""
    try:
        async with session.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code == 429 and answer.retries + 1 < TRIES and "retry-after" in response.headers:
                return float(response.headers["retry-after"])
            if response.status_code != 200:
                refusal = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {refusal[:300]}"
                return None
            text = _TimedText(response)
            async for event in EventSource(cast(httpx.Response, text)).aiter_sse():
                _take(answer, text.read_s, event.data)
    except (httpx.HTTPError, SSEError, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"[:300]
    return None


def _take(answer: Answer, now: float, data: str) -> None:
    if data == "[DONE]":
        answer.done_seen = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = f"error event: {event['error']}"[:300]
    if usage := event.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_output_tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        text, reason, ids = choice.get("text") or "", choice.get("finish_reason") or "", choice.get("token_ids") or ()
        # A token may have no text (yet): a special one, a part of a character. It is a token all the same.
        if not text and not reason and not ids:
            continue
        if not answer.ttft_s:
            answer.ttft_s = now - answer.start_s
        answer.num_reads += now != answer.end_s
        answer.end_s = now
        answer.num_events += 1
        answer.text += text
        answer.token_ids += ids
        answer.token_s += [now - answer.start_s] * len(ids)
        answer.finish_reason = reason or answer.finish_reason


def open_session() -> httpx.AsyncClient:
    """One a system: connections are kept, as a client library keeps them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)


async def wave(
    session: httpx.AsyncClient,
    url: str,
    model: str,
    prompts: Sequence[str | Sequence[int]],
    num_tokens: int,
    concurrency: int,
    extra: dict[str, Any] | None = None,
) -> Wave:
    """Keeps `concurrency` requests running until every prompt has been answered."""
    todo = iter(enumerate(prompts))
    answers: list[Answer] = []

    async def worker() -> None:
        for index, prompt in todo:
            answers.append(await ask(session, url, body_of(model, prompt, num_tokens, extra), index))

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return Wave(concurrency, seconds, sorted(answers, key=lambda answer: answer.index))
