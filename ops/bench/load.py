"""A streaming load generator for `/v1/completions`, in one asyncio loop: closed loop, fixed concurrency, greedy.

Times are taken when the bytes of an event arrive. TTFT is the time to the first event that carries text or a finish
reason; TPOT is (last event - first event) / (output tokens - 1), so that a system that sends several tokens in one
event is not favoured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 300.0


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
    """All requests of one concurrency on one system in one round."""

    concurrency: int
    seconds: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_output_tokens for answer in self.answers) / self.seconds


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, str]]:
    """(arrival, data) of each server-sent event."""
    rest = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip().decode()


def body_of(model: str, prompt: str, num_tokens: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
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


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], index: int = 0) -> Answer:
    """Sends one request and reads its stream to the end. Never raises for what the server does."""
    answer = Answer(index, start_s=time.perf_counter())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return answer
            async for now, data in _events(response):
                _take(answer, now, data)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"[:300]
    if not answer.error and not answer.ttft_s:
        answer.error = "the stream ended without a token"
    return answer


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
        text, reason = choice.get("text") or "", choice.get("finish_reason") or ""
        # A token may have no text (yet): a special one, a part of a character. It is a token all the same.
        if not text and not reason and not choice.get("token_ids"):
            continue
        if not answer.ttft_s:
            answer.ttft_s = now - answer.start_s
        answer.num_reads += now != answer.end_s
        answer.end_s = now
        answer.num_events += 1
        answer.token_s += [now - answer.start_s] * len(choice.get("token_ids") or ())
        answer.text += text
        answer.finish_reason = reason or answer.finish_reason


def open_session() -> aiohttp.ClientSession:
    """One a system: connections are kept, as a client library keeps them."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def wave(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompts: Sequence[str],
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
