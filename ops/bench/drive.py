"""The loads of a plan against one running system: which sessions there are, when each begins, and what came of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.bench import load as client
from ops.bench.load import Answer
from ops.bench.plan import AnyLoad, Beside, Closed, Objective, PlanError, Poisson, Prompts, Ramp, Replay
from ops.bench.prompts import WORDS

BESIDE_AFTER_S = 1.0  # streams have their first tokens by then


@dataclass(frozen=True, slots=True)
class Session:
    """`turns`: the new token ids of each turn; `at_s`: when it begins, for loads with times of their own."""

    turns: tuple[tuple[int, ...], ...]
    output_tokens: int
    at_s: float = 0.0


@dataclass(slots=True)
class Sent:
    """A request as it was sent, and its answer."""

    answer: Answer
    prompt_tokens: int
    output_tokens: int
    turn: int


@dataclass(slots=True)
class Outcome:
    """One load in one round. `goodput` and `largest`: of a ramp only, requests a second within the objective and
    the concurrency that gave them (0: not even the smallest). `beside`: what came beside it, a row of its own."""

    seconds: float
    sent: list[Sent] = field(default_factory=list)
    goodput: float | None = None
    largest: int | None = None
    beside: Outcome | None = None


def vocabulary(tokenizer: Any) -> list[int]:
    """Token ids of plain words, of which prompts are drawn."""
    return sorted({token for word in WORDS for token in tokenizer(f" {word}", add_special_tokens=False)["input_ids"]})


def _rng(*parts: object) -> random.Random:
    return random.Random(hashlib.sha256("/".join(str(part) for part in parts).encode()).digest())


def sessions(load: AnyLoad, words: Sequence[int], seed: int, label: str, count: int | None = None) -> list[Session]:
    """The same for every arm of a round; no two rounds share a prompt (but for prefixes that the plan shares)."""
    if isinstance(load, Replay):
        return _replayed(load, words, seed, label)
    if isinstance(load, Closed | Poisson):
        count = load.requests
    elif isinstance(load, Beside):
        count = load.concurrency
    rng, made, at_s = _rng(seed, label, load.name), [], 0.0
    for index in range(count or 1):
        if isinstance(load, Poisson):
            at_s += rng.expovariate(load.rate)
        made.append(
            Session(_turns(load.prompts, words, rng, _prefix(load, words, seed, index)), load.output_tokens, at_s)
        )
    return made


def _prefix(load: AnyLoad, words: Sequence[int], seed: int, index: int) -> tuple[int, ...]:
    rng = _rng(seed, load.name, "prefix", index % load.prompts.groups)
    return tuple(rng.choices(words, k=load.prompts.prefix_tokens))


def _turns(
    prompts: Prompts, words: Sequence[int], rng: random.Random, prefix: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    first = (*prefix, *rng.choices(words, k=prompts.tokens - len(prefix)))
    return (first, *(tuple(rng.choices(words, k=prompts.turn_tokens)) for _ in range(prompts.turns - 1)))


def _replayed(load: Replay, words: Sequence[int], seed: int, label: str) -> list[Session]:
    rng, made = _rng(seed, label, load.name), []
    for number, line in enumerate(Path(load.trace).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            tokens, output = int(row["prompt_tokens"]), int(row["output_tokens"])
            made.append(Session((tuple(rng.choices(words, k=tokens)),), output, float(row["at_s"]) / load.speed))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{load.trace}:{number} is no request of a trace: {error!r}") from None
    return made


def digest(made: Sequence[Session]) -> str:
    """Names the prompts."""
    return hashlib.sha256(repr([(s.turns, s.output_tokens, round(s.at_s, 6)) for s in made]).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Target:
    http: httpx.AsyncClient
    url: str
    model: str

    async def talk(self, session: Session, number: int) -> list[Sent]:
        """All turns of a session, one after another; it ends at the first that fails."""
        said: list[int] = []
        sent = []
        for turn, new in enumerate(session.turns):
            said += new
            body = client.body_of(self.model, list(said), session.output_tokens)
            answer = await client.ask(self.http, self.url, body, number)
            sent.append(Sent(answer, len(said), session.output_tokens, turn))
            if answer.error:
                break
            said += answer.token_ids
        return sent


async def run(target: Target, load: AnyLoad, words: Sequence[int], seed: int, label: str) -> Outcome:
    if isinstance(load, Ramp):
        return await _ramp(target, load, words, seed, label)
    made = sessions(load, words, seed, label)
    if isinstance(load, Closed):
        return await _closed(target, made, load.concurrency)
    if isinstance(load, Beside):
        return await _beside(target, load, made, words, _rng(seed, label, load.name, "long"))
    return await _timed(target, made)


async def _closed(target: Target, made: Sequence[Session], concurrency: int) -> Outcome:
    todo: Iterator[tuple[int, Session]] = iter(enumerate(made))
    found: list[Sent] = []

    async def worker() -> None:
        for number, session in todo:
            found.extend(await target.talk(session, number))

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return _outcome(began, found)


async def _beside(
    target: Target, load: Beside, made: Sequence[Session], words: Sequence[int], rng: random.Random
) -> Outcome:
    long: list[Sent] = []
    began = time.perf_counter()
    streams = asyncio.ensure_future(_closed(target, made, load.concurrency))
    await asyncio.wait((streams,), timeout=BESIDE_AFTER_S)
    while not streams.done():
        session = Session((tuple(rng.choices(words, k=load.long_tokens)),), load.long_output_tokens)
        long += await target.talk(session, len(long))
    outcome = await streams
    outcome.beside = _outcome(began, long)
    return outcome


async def _timed(target: Target, made: Sequence[Session]) -> Outcome:
    """Each session begins at its time, however many others are running."""
    found: list[Sent] = []
    began = time.perf_counter()

    async def begin(number: int, session: Session) -> None:
        await asyncio.sleep(began + session.at_s - time.perf_counter())
        found.extend(await target.talk(session, number))

    await asyncio.gather(*(begin(number, session) for number, session in enumerate(made)))
    return _outcome(began, found)


async def _ramp(target: Target, load: Ramp, words: Sequence[int], seed: int, label: str) -> Outcome:
    whole = Outcome(0.0, goodput=0.0, largest=0)
    for concurrency in load.steps:
        made = sessions(load, words, seed, f"{label} at {concurrency}", concurrency * load.requests_per_slot)
        step = await _closed(target, made, concurrency)
        whole.seconds += step.seconds
        whole.sent += step.sent
        good = sum(meets(each.answer, load.objective) for each in step.sent)
        if good < load.objective.share * len(step.sent):
            break
        whole.goodput, whole.largest = good / step.seconds, concurrency
    return whole


def meets(answer: Answer, objective: Objective) -> bool:
    return not answer.error and answer.ttft_s <= objective.ttft_s and answer.tpot_s <= objective.tpot_s


def _outcome(began: float, found: list[Sent]) -> Outcome:
    seconds = time.perf_counter() - began
    return Outcome(seconds, sorted(found, key=lambda sent: (sent.answer.index, sent.turn)))
