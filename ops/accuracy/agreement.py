"""The arms of an evaluation, on real engines: one BF16 engine, one FP8 engine, the hand-over; and controls.

Every arm gets the same items. The first records its distributions; the others are compared with it position by
position, inside their own workers. Controls get some of the passages: the BF16 engine once more, which must look the
same, and faults planted into the good pair, request by request, which must be noticed with the engines that pass.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cluster.spec import ClusterSpec
from ops.accuracy import forcing, planted
from ops.accuracy.gates import AGAIN, FP8, HAND_OVER, REFERENCE
from ops.accuracy.tasks import Item, Size, ToolCase, judge_call
from ops.engine_pair import EnginePair

CALL_TOKENS = 40
_runs = itertools.count()

Say = Callable[[str], None]


class Position(NamedTuple):
    nll: float  # of the true token, nats
    kl: float  # KL(reference || this) over the whole vocabulary, nats
    flip: float  # 1.0: another token than the reference's is the most likely one
    hit: float  # 1.0: the true token is the most likely one


Scores = list[list[Position]]  # an item, a forced position


@dataclass(frozen=True, slots=True)
class Asked:
    items: Sequence[Item]
    calls: Sequence[ToolCase]
    size: Size

    @property
    def controls(self) -> list[Item]:
        """Passages of all lengths."""
        texts = [item for item in self.items if item.task == "text"]
        return texts[:: max(1, len(texts) // self.size.controls)][: self.size.controls]


async def score(
    pair: EnginePair,
    items: Sequence[Item],
    folder: Path,
    *,
    hand_over: bool,
    record: bool = False,
    against: bool = False,
    fault: str = "",
    concurrency: int = 8,
) -> Scores:
    """Each item's positions. Groups run side by side, the items of one in order; nothing is shared with earlier runs.

    `record` leaves distributions in `folder` by group and length of the prompt, `against` compares with them. `fault`:
    one of `planted.FAULTS`. RuntimeError where forcing or a hand-over failed.
    """
    run, gate = next(_runs), asyncio.Semaphore(concurrency)
    found: dict[int, list[Position]] = {}

    async def one(number: int, item: Item) -> None:
        figures, rows = folder / f"{run}-{number}.json", str(folder / f"{item.group}-{len(item.prompt)}.npy")
        params = forcing.forcing_params(item.forced, figures, rows if record else "", rows if against else "")
        made = await pair.generate(
            item.prompt, params, hand_over=hand_over, kind=fault, cache_salt=f"{run}-{item.group}"
        )
        if made.token_ids != item.forced:
            raise RuntimeError(f"forcing failed: {made.token_ids[:5]} for {item.forced[:5]}")
        if hand_over and (made.opened is None or not made.opened.ok):
            raise RuntimeError(f"item {number} was not handed over: {made.opened}; decode computed the prompt itself")
        found[number] = [Position(*row) for row in json.loads(figures.read_text())]
        figures.unlink()

    async def group(members: list[tuple[int, Item]]) -> None:
        async with gate:
            for number, item in members:
                await one(number, item)

    groups: dict[str, list[tuple[int, Item]]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.group, []).append((number, item))
    await asyncio.gather(*(group(members) for members in groups.values()))
    return [found[number] for number in range(len(items))]


async def call(pair: EnginePair, cases: Sequence[ToolCase], tokenizer: Any, *, hand_over: bool) -> list[dict[str, Any]]:
    """Greedy answers to tool requests, and whether each is a valid call and the right one."""
    from vllm.sampling_params import SamplingParams

    run, gate = next(_runs), asyncio.Semaphore(8)
    params = SamplingParams(max_tokens=CALL_TOKENS, temperature=0.0, ignore_eos=True)

    async def one(case: ToolCase) -> dict[str, Any]:
        async with gate:
            made = await pair.generate(case.prompt, params, hand_over=hand_over, cache_salt=f"{run}")
        text = tokenizer.decode(made.token_ids)
        valid, right = judge_call(text, case)
        return {"text": text, "valid": valid, "right": right}

    return list(await asyncio.gather(*(one(case) for case in cases)))


def forced_spec(base: ClusterSpec, *, prefill: bool, decode_kv: str, faults: bool = False) -> ClusterSpec:
    """`base` with the forcing processor in every engine and the wanted pools; `faults`: with what can plant faults."""
    tree: dict[str, Any] = base.model_dump()
    for role in ("prefill", "decode"):
        pool = tree["pools"][role]
        processors = [forcing.CLASS_PATH, *([planted.CLASS_PATH] if faults else [])]
        pool["engine_args"] = {**pool["engine_args"], "logits_processors": processors}
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


async def measure(base: ClusterSpec, asked: Asked, tokenizer: Any, say: Say) -> dict[str, Any]:
    """Runs all arms: `items` and `calls` by arm, `controls` by fault, JSON-ready, and what was left over."""
    with tempfile.TemporaryDirectory(prefix="pageferry-eval-") as name:
        folder = Path(name)
        scores: dict[str, Scores] = {}
        calls: dict[str, list[dict[str, Any]]] = {}
        say("one BF16 engine")
        alone = await EnginePair.start(forced_spec(base, prefill=False, decode_kv="bfloat16"))
        try:
            scores[REFERENCE] = await score(alone, asked.items, folder, hand_over=False, record=True)
            calls[REFERENCE] = await call(alone, asked.calls, tokenizer, hand_over=False)
            say("again, fewer requests at once: what batching alone changes")
            again = await score(alone, asked.controls, folder, hand_over=False, against=True, concurrency=3)
        finally:
            await alone.close()
        say("BF16 prefill + FP8 decode")
        pair = await EnginePair.start(forced_spec(base, prefill=True, decode_kv="fp8_e4m3", faults=True))
        try:
            for arm, over in ((FP8, False), (HAND_OVER, True)):
                say(f"arm {arm}")
                scores[arm] = await score(pair, asked.items, folder, hand_over=over, against=True)
                calls[arm] = await call(pair, asked.calls, tokenizer, hand_over=over)
            controls = {AGAIN: again}
            for fault in planted.FAULTS:
                say(f"planted: {fault}")
                controls[fault] = await score(pair, asked.controls, folder, hand_over=True, against=True, fault=fault)
            breaches = await pair.idle_breaches()
        finally:
            await pair.close()
    return {
        "items": [
            {"task": item.task, "group": item.group, "where": item.where}
            | {"positions": {arm: _rounded(rows[number]) for arm, rows in scores.items()}}
            for number, item in enumerate(asked.items)
        ],
        "calls": calls,
        "controls": {
            fault: [{"group": item.group, "positions": _rounded(row)} for item, row in zip(asked.controls, rows)]
            for fault, rows in controls.items()
        },
        "breaches": breaches,
    }


def _rounded(row: list[Position]) -> list[list[float]]:
    return [[round(position.nll, 5), round(position.kl, 6), position.flip, position.hit] for position in row]
