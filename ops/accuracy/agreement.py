"""Teacher-forced agreement: how far a hand-over is from a single BF16 engine, beside how far a single FP8 engine is.

Every engine reads the same prompts and is made to emit the same continuations; at each position the logprob of the
true token and the top token are kept. Compared with the single BF16 engine: mean absolute logprob difference and
top-1 agreement, with 95 % bootstrap intervals over texts (positions of one text are not independent).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.spec import ClusterSpec
from ops.accuracy.forcing import CLASS_PATH, forcing_params
from ops.bench.stats import Interval, cluster_bootstrap
from ops.engine_pair import EnginePair

TOP_K = 5


@dataclass(frozen=True, slots=True)
class Passage:
    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True, slots=True)
class Position:
    logprob: float  # of the true token
    top: int  # the most likely token


Scores = list[list[Position]]  # per passage, per forced position


@dataclass(frozen=True, slots=True)
class Agreement:
    """One engine against the reference engine on the same text."""

    name: str
    positions: int
    mean_abs_logprob_difference: Interval
    mean_logprob_difference: Interval  # above 0: this engine finds the text less likely
    top1_agreement: Interval


def passages(token_ids: Sequence[int], prompt_lengths: Sequence[int], continuation: int) -> list[Passage]:
    """Cuts a text into one passage a prompt length, one after another. Raises when the text is too short."""
    need = sum(prompt_lengths) + continuation * len(prompt_lengths)
    if need > len(token_ids):
        raise ValueError(f"the text has {len(token_ids)} tokens; {len(prompt_lengths)} passages need {need}")
    made, at = [], 0
    for length in prompt_lengths:
        middle = at + length
        made.append(Passage(list(token_ids[at:middle]), list(token_ids[middle : middle + continuation])))
        at = middle + continuation
    return made


async def score(pair: EnginePair, texts: Sequence[Passage], *, hand_over: bool, concurrency: int = 8) -> Scores:
    gate = asyncio.Semaphore(concurrency)

    async def one(text: Passage) -> list[Position]:
        async with gate:
            made = await pair.generate(text.prompt, forcing_params(text.continuation, TOP_K), hand_over=hand_over)
        if made.token_ids != text.continuation:
            raise RuntimeError(f"forcing failed: {made.token_ids[:5]} for {text.continuation[:5]}")
        return [
            Position(logprobs[token], max(logprobs, key=lambda t: logprobs[t]))
            for token, logprobs in zip(text.continuation, made.logprobs, strict=True)
        ]

    return list(await asyncio.gather(*(one(text) for text in texts)))


def compare(name: str, scores: Scores, reference: Scores, seed: int = 0) -> Agreement:
    pairs = list(zip(scores, reference, strict=True))
    return Agreement(
        name=name,
        positions=sum(len(text) for text in scores),
        mean_abs_logprob_difference=cluster_bootstrap(
            [[abs(a.logprob - b.logprob) for a, b in zip(x, y)] for x, y in pairs], seed
        ),
        mean_logprob_difference=cluster_bootstrap(
            [[b.logprob - a.logprob for a, b in zip(x, y)] for x, y in pairs], seed
        ),
        top1_agreement=cluster_bootstrap([[float(a.top == b.top) for a, b in zip(x, y)] for x, y in pairs], seed),
    )


def paired_excess(over: Scores, single: Scores, reference: Scores, seed: int = 0) -> Interval:
    """Mean of |hand-over - BF16| - |single FP8 - BF16| a position; at or below 0: hand-over is no further away."""
    return cluster_bootstrap(
        [
            [abs(a.logprob - r.logprob) - abs(s.logprob - r.logprob) for a, s, r in zip(x, y, z)]
            for x, y, z in zip(over, single, reference, strict=True)
        ],
        seed,
    )


def forced_spec(base: ClusterSpec, *, prefill: bool, decode_kv: str) -> ClusterSpec:
    """`base` with the forcing processor in every engine, no prefix cache, and the wanted pools."""
    tree: dict[str, Any] = base.model_dump()
    for role in ("prefill", "decode"):
        pool = tree["pools"][role]
        pool["engine_args"] = {**pool["engine_args"], "logits_processors": [CLASS_PATH]}
        pool["enable_prefix_caching"] = False
    if not prefill:
        tree["pools"]["prefill"] = {
            "replicas": 0,
            "max_replicas": 1,
            "block_tokens": tree["pools"]["decode"]["block_tokens"],
        }
    tree["pools"]["decode"]["kv_dtype"] = decode_kv
    if decode_kv == "bfloat16":
        tree["pools"]["decode"]["kv_scales"] = (1.0, 1.0)
    return ClusterSpec.parse(tree)


async def measure(base: ClusterSpec, texts: Sequence[Passage], say: Any = print) -> dict[str, Any]:
    """Runs the three arms and returns the report as JSON-ready values, capacity of the two pools included."""
    say("single BF16 engine ...")
    alone = await EnginePair.start(forced_spec(base, prefill=False, decode_kv="bfloat16"))
    try:
        reference = await score(alone, texts, hand_over=False)
        again = await score(alone, texts, hand_over=False)
        bf16 = alone.decode.announcement()
    finally:
        await alone.close()
    say("BF16 prefill + FP8 decode: hand-over, and decode alone as the single FP8 engine ...")
    pair = await EnginePair.start(forced_spec(base, prefill=True, decode_kv="fp8_e4m3"))
    try:
        over = await score(pair, texts, hand_over=True)
        single = await score(pair, texts, hand_over=False)
        fp8 = pair.decode.announcement()
        breaches = await pair.idle_breaches()
    finally:
        await pair.close()
    rows = [
        compare("BF16 again (noise of batching)", again, reference),
        compare("single FP8 engine", single, reference),
        compare("hand-over BF16 -> FP8", over, reference),
    ]
    excess = paired_excess(over, single, reference)
    per_token = {
        name: a.engine["kv_cache_bytes"] / ((a.blocks_total + 1) * a.block_tokens)
        for name, a in (("bf16", bf16), ("fp8", fp8))
    }
    return {
        "passages": len(texts),
        "positions": rows[0].positions,
        "nll_bf16": statistics.fmean(-p.logprob for t in reference for p in t),
        "rows": [asdict(row) for row in rows],
        "excess_of_hand_over": asdict(excess),
        "kv_bytes_per_token": per_token,
        "tokens_in_the_same_bytes": per_token["bf16"] / per_token["fp8"],
        "breaches": breaches,
    }
