"""Sends one request and keeps everything that a client can see of it: status, text, token ids, usage, how it ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ops.chaos.processes.forms import FORMS, Form

REQUEST_TIMEOUT_S = 75.0  # a hung process is fenced in 15 to 30 s


@dataclass(slots=True)
class Answer:
    """What came of one request. `ended`: complete, error (the service said so), broken (the connection ended), hung."""

    form: Form
    ended: str = ""  # "left": the client hung up
    status: int = 0
    error: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)  # by choice
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    num_usages: int = 0
    done: bool = False
    after_end: int = 0  # events of a choice after its finish reason
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.ids.values())


async def ask_and_leave(
    session: aiohttp.ClientSession, url: str, form: Form, body: dict[str, Any], after_s: float
) -> Answer:
    """Like `ask`, but hangs up after `after_s`; an answer that is whole by then stays what it is."""
    try:
        return await asyncio.wait_for(ask(session, url, form, body), after_s)
    except TimeoutError:
        now = time.monotonic()
        return Answer(form, ended="left", start_s=now - after_s, end_s=now)


async def ask(session: aiohttp.ClientSession, url: str, form: Form, body: dict[str, Any]) -> Answer:
    """Never raises for what the service or the connection does."""
    answer = Answer(form, start_s=time.monotonic())
    try:
        async with session.post(url + form.path, json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.ended, answer.error = "error", _message(await response.text())
            elif form.stream:
                await _read_stream(answer, response)
            else:
                _take_whole(answer, json.loads(await response.text()))
    except TimeoutError:
        answer.ended, answer.error = "hung", f"nothing more within {session.timeout.total:g} s"
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.ended, answer.error = "broken", f"{type(error).__name__}: {error}"
    answer.end_s = time.monotonic()
    if not answer.ended:
        whole = len(answer.finish) == form.num_choices and (answer.done or not form.stream)
        answer.ended = "complete" if whole else "broken"
    return answer


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


async def _read_stream(answer: Answer, response: aiohttp.ClientResponse) -> None:
    async for data in _events(response):
        if data == "[DONE]":
            answer.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.ended, answer.error = "error", str(event["error"].get("message", event["error"]))
            continue
        answer.first_s = answer.first_s or time.monotonic()
        if event.get("usage"):
            answer.usage = event["usage"]
            answer.num_usages += 1
        for choice in event.get("choices", ()):
            _take_delta(answer, choice, event)


def _take_delta(answer: Answer, choice: dict[str, Any], event: dict[str, Any]) -> None:
    index = int(choice["index"])
    delta = choice.get("delta") or {}
    text, ids = choice.get("text") or delta.get("content") or "", choice.get("token_ids") or []
    if answer.finish.get(index) and (text or ids):
        answer.after_end += 1
    answer.prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids") or answer.prompt_ids
    answer.ids.setdefault(index, []).extend(ids)
    answer.text[index] = answer.text.get(index, "") + text
    if choice.get("finish_reason"):
        answer.finish[index] = str(choice["finish_reason"])


def _take_whole(answer: Answer, whole: dict[str, Any]) -> None:
    answer.first_s = time.monotonic()
    answer.usage, answer.num_usages = whole.get("usage"), 1
    for choice in whole["choices"]:
        _take_delta(answer, {**choice, "delta": choice.get("message")}, whole)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def open_session(timeout_s: float = REQUEST_TIMEOUT_S) -> aiohttp.ClientSession:
    """A connection a request: what a frontend's death breaks must be its own requests and no idle connection."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def wave(
    session: aiohttp.ClientSession, url: str, model: str, rng: random.Random, spread_s: float
) -> list[Answer]:
    """One request of every form, started at random times within `spread_s`."""

    async def one(form: Form, wait_s: float, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(wait_s)
        return await ask(session, url, form, body)

    todo = [one(form, rng.uniform(0.0, spread_s), form.body(model, rng)) for form in FORMS]
    return list(await asyncio.gather(*todo))
