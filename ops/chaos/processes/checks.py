"""The laws: what each answer must be, and what a service without requests must not hold. Knows nothing of faults."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ops.chaos.processes.forms import Recovery, problems_of
from ops.chaos.processes.load import Answer

QUIET_S = 40.0
# How far below the likeliest token a greedy one may be, for the rounding of other pages and other batches. A token that
# follows from a text with something doubled or cut out is mostly tens of thousands of places down.
UNLIKELY_NATS = 2.5
UNLIKELY_RANK = 5
NEAR_NATS = 1.0  # the same when the pages are read as they were then: only the batch and the replica are others
PROXY_ERRORS = (500, 502, 503)  # from the proxy, when a frontend dies before it has answered anything
CLEAR = ("is gone", "did not reproduce", "gave this request up", "no room", "no other place", "cannot be continued")


@dataclass(slots=True)
class Findings:
    """`problems` must be empty. `lost`: requests that ended neither whole nor with a clear error that they may have."""

    requests: int = 0
    complete: int = 0
    clear_errors: int = 0
    left: int = 0  # hung up by the client
    broken: int = 0  # connections of a frontend that was killed
    lost: int = 0
    token_faults: int = 0  # tokens twice, missing, or that do not follow from those before
    tokens: int = 0
    problems: list[str] = field(default_factory=list)


def judge(answers: Sequence[Answer], may_break: bool) -> Findings:
    found = Findings(requests=len(answers))
    for answer in answers:
        name = answer.form.name
        if answer.ended == "complete":
            found.complete += 1
            found.tokens += answer.num_tokens
            wrong = _whole(answer)
            found.token_faults += bool(wrong)
            found.problems += [f"{name}: {each}" for each in wrong]
        elif answer.ended == "left":
            found.left += 1
        elif answer.ended == "error" and _may_fail(answer):
            found.clear_errors += 1
        elif may_break and (answer.ended == "broken" or answer.status in PROXY_ERRORS):
            found.broken += 1
        else:
            found.lost += 1
            found.problems.append(f"{name}: {answer.ended} with status {answer.status}: {answer.error}")
    return found


def _may_fail(answer: Answer) -> bool:
    if not any(words in answer.error for words in CLEAR):
        return False
    return answer.form.recovery is not Recovery.ALWAYS


def _whole(answer: Answer) -> list[str]:
    form, usage = answer.form, answer.usage or {}
    wrong = [each for index in answer.finish for each in _choice(answer, index)]
    if answer.num_usages != 1:
        wrong.append(f"usage came {answer.num_usages} times")
    if usage.get("completion_tokens") != answer.num_tokens:
        wrong.append(f"{answer.num_tokens} tokens came, usage says {usage.get('completion_tokens')}")
    if answer.prompt_ids and usage.get("prompt_tokens") != len(answer.prompt_ids):
        wrong.append(f"a prompt of {len(answer.prompt_ids)} tokens, usage says {usage.get('prompt_tokens')}")
    if answer.after_end:
        wrong.append(f"{answer.after_end} events after the end of a choice")
    if sorted(answer.finish) != list(range(form.num_choices)):
        wrong.append(f"choices {sorted(answer.finish)} of {form.num_choices}")
    return wrong


def _choice(answer: Answer, index: int) -> list[str]:
    return problems_of(answer.form, answer.text[index], len(answer.ids.get(index, ())), answer.finish[index])


# -- do the tokens follow from one another


async def implausible(session: aiohttp.ClientSession, url: str, model: str, answers: Sequence[Answer]) -> list[str]:
    """Greedy answers, given to the service again as prompts: each token must be (nearly) the likeliest one there.

    A token that came twice, or one that is missing, leaves a place where the text does not go on as it would.
    """
    plain = [answer for answer in answers if answer.ended == "complete" and answer.form.plain and answer.prompt_ids]
    found = await asyncio.gather(*(_surprise(session, url, model, answer) for answer in plain))
    return [each for each in found if each]


async def _surprise(session: aiohttp.ClientSession, url: str, model: str, answer: Answer) -> str:
    prompt, ids = answer.prompt_ids, answer.ids[0]
    body = {"model": model, "prompt": [*prompt, *ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return f"{answer.form.name}: cannot be checked, HTTP {response.status}: {(await response.text())[:200]}"
        positions = (await response.json())["choices"][0]["prompt_logprobs"][len(prompt) :]
    for place, (token, position) in enumerate(zip(ids, positions, strict=True)):
        best = max(position.values(), key=lambda each: float(each["logprob"]))
        mine = position[str(token)]
        gap = float(best["logprob"]) - float(mine["logprob"])
        if gap > UNLIKELY_NATS and mine["rank"] > UNLIKELY_RANK:
            by_pages = await _gap_by_pages(session, url, model, [*prompt, *ids[:place]], token)
            if by_pages > NEAR_NATS:
                where = f"{answer.form.name}: token {place} of {len(ids)} after {len(prompt)}"
                return (
                    f"{where} is {mine['decoded_token']!r}, {gap:.1f} nats less likely than "
                    f"{best['decoded_token']!r}, {by_pages:.1f} after a hand-over"
                )
    return ""


async def _gap_by_pages(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], token: int) -> float:
    """Nats from the likeliest token to `token` when decode reads the prompt from handed-over pages, as it did then.

    Prompt logprobs are computed from keys and values that are not rounded yet. After hundreds of words without sense
    the next token is so open that FP8's rounding alone can be worth the nats that the first look allows.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 20}
    body |= {"return_tokens_as_token_ids": True, "cache_salt": uuid.uuid4().hex}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        top = (await response.json())["choices"][0]["logprobs"]["top_logprobs"][0]
    return float(max(top.values()) - top.get(f"token_id:{token}", float("-inf")))


# -- the service at rest


def leftovers(status: dict[str, Any], audit: dict[str, Any]) -> list[str]:
    """What a service without requests must not hold, in words."""
    found = [f"breach: {breach}" for breach in audit["breaches"]]
    if status["tickets"]["in_flight"]:
        found.append(f"tickets in flight: { {k: v for k, v in status['tickets']['by_state'].items() if v} }")
    if status["staging"]["bytes_held"] or status["staging"]["leases"]:
        found.append(f"staging: {status['staging']['bytes_held']} bytes in {status['staging']['leases']} leases")
    if status["queue"]["waiting"]:
        found.append(f"{status['queue']['waiting']} requests in the queue")
    for pool, each in ((pool, each) for pool, all_of in status["pools"].items() for each in all_of["replicas"]):
        held = {name: each[name] for name in ("blocks_held", "blocks_quarantined", "running", "waiting") if each[name]}
        if held:
            found.append(f"{pool} {each['replica_id']} ({each['state']}): {held}")
    return found


async def rest(session: aiohttp.ClientSession, url: str, within_s: float = QUIET_S) -> tuple[list[str], float]:
    """(what is still held after `within_s`, seconds until nothing was)."""
    began = time.monotonic()
    while True:
        try:
            left = leftovers(await fetch(session, url, "/status"), await fetch(session, url, "/status/audit"))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            left = [f"status does not answer: {type(error).__name__}: {error}"]
        took = time.monotonic() - began
        if not left or took > within_s:
            return left, took
        await asyncio.sleep(0.25)


async def fetch(session: aiohttp.ClientSession, url: str, path: str) -> Any:
    async with session.get(url + path, timeout=aiohttp.ClientTimeout(total=8)) as response:
        if response.status != 200:
            raise ValueError(f"{path} answered {response.status}: {(await response.text())[:200]}")
        return await response.json()
