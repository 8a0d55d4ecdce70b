"""The steps of one hand-over between two real engines, without Ray and HTTP: what the engines and the ferry cost alone.

Prompts of the same length go through an engine pair by turns: handed over, and computed by decode alone as a single
FP8 engine would. What the service adds to this (Serve, controller, HTTP) is the difference to what is measured over
HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams

from actors.messages import HandOver, Ticket
from cluster.spec import ClusterSpec
from ops.bench import prompts, stats
from ops.engine_pair import EnginePair

STEPS = {
    "prefill": "prefill engine: compute the prompt and seal its pages",
    "seal": "- of which sealing",
    "proof": "wait for the proof after that",
    "submit": "decode host: begin_read, request into the engine",
    "first_token": "decode engine: first token",
    "open": "- of which opening the pages",
    "decode_step": "- of which one decode step (as the second token took)",
}
OUTPUT_TOKENS = 4


@dataclass(slots=True)
class Hand:
    """Seconds of one request."""

    ttft: float
    parts: dict[str, float] = field(default_factory=dict)


def params() -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


async def _first_tokens(
    pair: EnginePair, request_id: str, prompt: list[int], ticket: Ticket, over: HandOver | None
) -> tuple[float, list[float]]:
    """When decode had taken the request, and when each token came."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    pair._queues[request_id] = queue
    try:
        await pair.decode.submit("rig", pair.frames(request_id, prompt, params()), ticket, over)
        submitted, times = time.perf_counter(), []
        while True:
            output = await queue.get()
            times += [time.perf_counter()] * len(output.new_token_ids)
            if output.finish_reason is not None:
                return submitted, times
    finally:
        del pair._queues[request_id]


async def handed_over(pair: EnginePair, prompt: list[int]) -> Hand:
    assert pair.prefill is not None
    request_id = uuid.uuid4().hex
    ticket = pair.ticket(request_id, len(prompt))
    began = time.perf_counter()
    sealing = asyncio.ensure_future(pair.controller.seal_of((ticket.ticket_id, ticket.attempt)))
    await pair.prefill.prefill(ticket, pair.frames(request_id, prompt, SamplingParams(max_tokens=1)))
    prefilled = time.perf_counter()
    sealed = await asyncio.wait_for(sealing, ticket.deadline_s)
    proven = time.perf_counter()
    over = HandOver(
        ticket_id=ticket.ticket_id, attempt=1, seal=sealed.seal, lease=sealed.lease, deadline_s=ticket.deadline_s
    )
    submitted, times = await _first_tokens(pair, request_id, prompt, ticket, over)
    opened = await pair.wait_opened((ticket.ticket_id, ticket.attempt))
    if opened is None or not opened.ok:
        raise RuntimeError(f"the pages of a prompt of {len(prompt)} tokens did not open: {opened}")
    parts = {
        "prefill": prefilled - began,
        "proof": proven - prefilled,
        "submit": submitted - proven,
        "first_token": times[0] - submitted,
        "open": opened.seconds,
        "decode_step": times[1] - times[0],
    }
    return Hand(times[0] - began, parts)


async def alone(pair: EnginePair, prompt: list[int]) -> Hand:
    request_id = uuid.uuid4().hex
    began = time.perf_counter()
    _, times = await _first_tokens(pair, request_id, prompt, pair.alone(request_id), None)
    return Hand(times[0] - began)


async def _seal_ns(pair: EnginePair) -> int:
    assert pair.prefill is not None
    return sum(int(worker["seal_ns"]) for worker in (await pair.prefill.audit())["workers"])


async def measure(
    spec: ClusterSpec, tokenizer: Any, num_tokens: int, pairs: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Medians of the steps, and the ratio of both ways' time to first token by turns."""
    say("an engine pair without Ray, for the steps of a hand-over")
    pair = await EnginePair.start(spec)
    try:
        for turn in range(3):
            await _turn(pair, tokenizer, num_tokens, seed, f"warm-up {turn}", turn)
        before = await _seal_ns(pair)
        made = [await _turn(pair, tokenizer, num_tokens, seed, f"steps {turn}", turn) for turn in range(pairs)]
        seal_s = (await _seal_ns(pair) - before) / 1e9 / pairs
        breaches = await pair.idle_breaches()
    finally:
        await pair.close()
    if breaches:
        raise RuntimeError(f"the engine pair did not settle: {'; '.join(breaches)}")
    return _report([over for over, _ in made], [single for _, single in made], seal_s)


async def _turn(
    pair: EnginePair, tokenizer: Any, num_tokens: int, seed: int, label: str, turn: int
) -> tuple[Hand, Hand]:
    """One cold prompt each way; each in its turn goes first."""
    over_ids, single_ids = (
        tokenizer(prompts.make(tokenizer, num_tokens, seed, f"{label} {way}", 0))["input_ids"]
        for way in ("over", "alone")
    )
    if turn % 2:
        single = await alone(pair, single_ids)
        return await handed_over(pair, over_ids), single
    over = await handed_over(pair, over_ids)
    return over, await alone(pair, single_ids)


def _report(over: Sequence[Hand], single: Sequence[Hand], seal_s: float) -> dict[str, Any]:
    times = [(a.ttft, b.ttft) for a, b in zip(over, single, strict=True)]
    medians = {name: stats.p50([hand.parts[name] for hand in over]) for name in STEPS if name != "seal"}
    medians["seal"] = seal_s
    return {
        "pairs": len(times),
        "ttft_p50_s": stats.p50([a for a, _ in times]),
        "ttft_alone_p50_s": stats.p50([b for _, b in times]),
        "ratio": stats.paired_ratio(times),
        "difference_s": stats.paired_difference(times),
        "steps": [{"step": label, "name": name, "p50_s": medians[name]} for name, label in STEPS.items()],
    }


def table(report: dict[str, Any]) -> str:
    difference = report["difference_s"]
    cell = f"{difference.value * 1e3:.1f} [{difference.low * 1e3:.1f}, {difference.high * 1e3:.1f}]"
    lines = [
        f"The same two engines without Ray and HTTP, {report['pairs']} turns: TTFT p50 "
        f"{report['ttft_p50_s'] * 1e3:.1f} ms handed over, {report['ttft_alone_p50_s'] * 1e3:.1f} ms by decode alone "
        f"(FP8); ratio "
        f"{report['ratio'].text(3)}, difference {cell} ms.",
        "",
        "| step of a hand-over | p50 ms |",
        "|---|---:|",
    ]
    return "\n".join(lines + [f"| {row['step']} | {row['p50_s'] * 1e3:.1f} |" for row in report["steps"]])
