"""An engine pair with faults allowed, prompts whose greedy answers are known, and requests that can be watched."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.messages import HandOver
from cluster.fault_kinds import Side, page_fault
from cluster.spec import ClusterSpec
from ops.engine_pair import EnginePair

BLOCK_TOKENS = 32
NUM_PAGES = 192
HAND_OVER_S = 0.6  # the deadline that lost and late proofs run into
MAX_TOKENS = 9

# How far, in nats, the greedy token has to be ahead of the next one at every position of a prompt's answer. Company in
# the batch and the way of the prompt's pages move the logits by rounding (up to 0.5 here, on BF16 matrix products and
# FP8 pages): a nearer tie would fall the other way now and then, and feign or hide a wrong page.
MARGIN = 0.6
# Plain statements that a small model continues with confidence.
TEXTS = (
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, "
    "sixteen, seventeen, eighteen, nineteen, twenty, twenty-one, twenty-two, twenty-three, twenty-four,",
    "January, February, March, April, May, June, July, August, September, October, November, December. January, "
    "February, March, April, May, June, July, August, September, October, November, December. January,",
    "red green blue red green blue red green blue red green blue red green blue red green blue red green blue red "
    "green blue red green blue red green blue red green blue red green blue red green blue red green",
    "The harbour opens at nine. The ferry leaves at ten. The harbour opens at nine. The ferry leaves at ten. The "
    "harbour opens at nine. The ferry leaves at ten. The harbour opens at nine. The ferry leaves at ten. The "
    "harbour",
    "if x == 1: return 2 if x == 2: return 3 if x == 3: return 4 if x == 4: return 5 if x == 5: return 6 if x == 6:"
    " return 7 if x == 7: return 8 if x == 8:",
    "x = 1 y = 2 z = 3 x = 1 y = 2 z = 3 x = 1 y = 2 z = 3 x = 1 y = 2 z = 3 x = 1 y = 2 z = 3 x = 1 y = 2",
    "for i in range(10): print(i) for i in range(10): print(i) for i in range(10): print(i) for i in range(10): "
    "print(i) for i in range(10): print(i) for i",
    "gold silver bronze gold silver bronze gold silver bronze gold silver bronze gold silver bronze gold silver "
    "bronze gold silver bronze gold silver bronze gold silver bronze",
    "A dog barks. A cat meows. A cow moos. A dog barks. A cat meows. A cow moos. A dog barks. A cat meows. A cow "
    "moos. A dog barks. A cat meows. A cow moos. A dog",
)


@dataclass(slots=True)
class Prompt:
    name: str
    token_ids: list[int]
    answer: list[int] = field(default_factory=list)  # greedy, the first tokens of it


@dataclass(slots=True)
class Watched:
    """One request that is under way."""

    request_id: str
    prompt: Prompt
    task: asyncio.Task[None] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    margin: float = float("inf")  # nats between the greedy token and the next one, the least so far; when asked for
    at_end: Callable[[], None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: Any) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            # A row is the sampled token's, then the best and the second best.
            self.margin = min([self.margin, *(float(row[1] - row[2]) for row in output.new_logprobs.logprobs)])
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = str(output.stop_reason or "")
            if self.at_end is not None:
                self.at_end()
        self._news.set()

    async def emitted(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens and not self.finish_reason:
            self._news.clear()
            await self._news.wait()

    async def ended(self) -> None:
        assert self.task is not None
        await self.task

    @property
    def num_wrong(self) -> int:
        """Tokens that left the engine and are not the prompt's."""
        return sum(mine != right for mine, right in zip(self.token_ids, self.prompt.answer))

    @property
    def whole(self) -> bool:
        return self.finish_reason == "length" and not self.num_wrong


class Harness:
    def __init__(self, pair: EnginePair, seed: int, checked: bool) -> None:
        self.pair = pair
        self.seed = seed
        self.checked = checked
        self.prompts: list[Prompt] = []
        self._salts = itertools.count()

    # -- set-up

    @classmethod
    async def start(cls, spec: ClusterSpec, seed: int) -> Harness:
        pair = await EnginePair.start(spec)
        harness = cls(pair, seed, spec.integrity.mode == "check")
        try:
            await harness._learn(spec.model.tokenizer or spec.model.path)
        except BaseException:
            await pair.close()
            raise
        return harness

    async def _learn(self, tokenizer_path: str) -> None:
        """Answers of each prompt alone; a prompt that comes near a tie, alone or another way, is left out."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        candidates = [Prompt(f"p{i}", tokenizer.encode(text)[:120]) for i, text in enumerate(TEXTS)]
        margin = {prompt.name: float("inf") for prompt in candidates}
        for prompt in candidates:
            alone = await self.start_request(prompt, max_tokens=2 * MAX_TOKENS, margins=True)
            await alone.ended()
            prompt.answer = alone.token_ids
            margin[prompt.name] = alone.margin
        candidates = [p for p in candidates if margin[p.name] >= MARGIN and len(p.token_ids) > BLOCK_TOKENS]
        for way in ("together", "handed over", "from the cache"):
            runs = []
            for prompt in candidates:
                over, salt = await self.seal(prompt) if way == "handed over" else None, self.salt()
                if way == "from the cache":
                    await (await self.start_request(prompt, max_tokens=1, salt=salt)).ended()
                runs.append(
                    await self.start_request(prompt, max_tokens=2 * MAX_TOKENS, salt=salt, over=over, margins=True)
                )
            for run in runs:
                await run.ended()
                if run.num_wrong:
                    raise RuntimeError(
                        f"prompt {run.prompt.name}, {way}: {run.token_ids} instead of {run.prompt.answer}, although "
                        f"no two tokens were nearer than {MARGIN} nats when it ran alone: pages are wrong"
                    )
                margin[run.prompt.name] = min(margin[run.prompt.name], run.margin)
        self.prompts = [p for p in candidates if margin[p.name] >= MARGIN]
        if len(self.prompts) < 4:
            raise RuntimeError(
                f"only {len(self.prompts)} of {len(TEXTS)} prompts keep every token {MARGIN} nats ahead of the next "
                f"one with this model ({margin}); 4 are needed to tell a wrong page from a near tie"
            )

    # -- requests

    def salt(self) -> str:
        """A prefix cache of one's own: every page is fresh."""
        return f"chaos-{os.getpid()}-{next(self._salts)}"

    async def start_request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        salt: str | None = None,
        over: HandOver | None = None,
        margins: bool = False,
    ) -> Watched:
        from vllm.sampling_params import SamplingParams

        watched = Watched(uuid.uuid4().hex, prompt)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2 if margins else None
        )
        ticket = self.pair.alone(watched.request_id)
        if over is not None:
            ticket = self.pair.ticket(watched.request_id, len(prompt.token_ids))

        async def run() -> None:
            stream = self.pair.stream(watched.request_id, prompt.token_ids, params, ticket, over, salt)
            async for output in stream:
                watched.take(output)

        watched.task = asyncio.create_task(run())
        return watched

    async def seal(self, prompt: Prompt, before: Any = None) -> HandOver:
        """Prefills and seals; `before(ticket)` runs first. Raises TimeoutError when the proof does not come in time."""
        ticket = self.pair.ticket(uuid.uuid4().hex, len(prompt.token_ids))
        if before is not None:
            await before(ticket)
        try:
            over, _ = await self.pair.seal(ticket, prompt.token_ids)
        except TimeoutError:
            # What the controller does when a hand-over misses its deadline.
            await self.pair.transfer.release([(ticket.ticket_id, ticket.attempt)])
            raise
        return over

    async def abort(self, watched: Watched) -> None:
        await self.pair.decode.abort("rig", [watched.request_id])
        assert watched.task is not None
        watched.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watched.task
        watched.finish_reason = "abort"

    # -- faults

    async def worker_fault(self, kind: str, trial: int, target: str | int, more: float = 0) -> dict[str, Any]:
        host = self.pair.prefill if page_fault(kind).side is Side.PREFILL else self.pair.decode
        assert host is not None
        done: list[dict[str, Any]] = await host.core.collective_rpc_async(
            "pageferry_fault", args=(kind, trial, target, more)
        )
        return done[0]

    async def pool_fault(self, kind: str, trial: int, victim: str) -> dict[str, Any]:
        done: dict[str, Any] = await self.pair.decode.core.call_utility_async("pageferry_fault", kind, trial, victim)
        return done

    async def fault_log(self, side: str = "worker") -> list[dict[str, Any]]:
        host = self.pair.prefill if side == "prefill" else self.pair.decode
        assert host is not None
        logs: list[list[dict[str, Any]]] = await host.core.collective_rpc_async("pageferry_fault_log")
        return logs[0]

    # -- what is left

    async def settle(self, timeout_s: float = 5.0) -> list[str]:
        """Waits until both engines are idle; returns what is still held."""
        left: list[str] = []
        for _ in range(int(timeout_s / 0.05)):
            left = await self.pair.idle_breaches()
            if not left:
                break
        return left

    async def audit(self) -> dict[str, Any]:
        audit: dict[str, Any] = await self.pair.decode.core.call_utility_async("pageferry_audit", True)
        return audit

    async def lift_quarantine(self) -> int:
        lifted: int = await self.pair.decode.core.call_utility_async("pageferry_lift_quarantine")
        return lifted

    async def alive(self) -> bool:
        try:
            await asyncio.wait_for(self.pair.decode.core.call_utility_async("pageferry_scheduler"), 10)
        except Exception:
            return False
        return not self.pair.decode._failure

    async def close(self) -> None:
        await self.pair.close()


def spec_for(model: str, kinds: tuple[str, ...], seed: int, checked: bool, num_pages: int = NUM_PAGES) -> ClusterSpec:
    """BF16 prefill and FP8 decode with few pages, so that freed pages soon belong to another request."""
    pool = {
        "block_tokens": BLOCK_TOKENS,
        "kv_cache_gib": 1,
        "max_num_seqs": 16,
        "engine_args": {"enforce_eager": True, "num_gpu_blocks_override": num_pages},
    }
    return ClusterSpec.parse(
        {
            "model": {"path": model, "max_model_len": 512},
            "pools": {
                "prefill": {**pool, "kv_dtype": "bfloat16"},
                "decode": {**pool, "kv_dtype": "fp8_e4m3", "kv_scales": [0.5, 0.25]},
            },
            "transfer": {"staging_bytes_max": 64 << 20, "hand_over_s": HAND_OVER_S},
            "integrity": {"mode": "check" if checked else "off", "seals": "full" if checked else "off"},
            "faults": {"kinds": list(kinds), "seed": seed},
        }
    )
