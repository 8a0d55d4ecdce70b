"""What the simulated language model says: each token follows from every token before it.

A wrong continuation, a token twice or a page of another prompt therefore shows in the tokens that a client gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from ops.simulate.traces import Arrival

MASK = (1 << 64) - 1
FACTOR, STEP = 6364136223846793005, 1442695040888963407
_powers = np.ones(1, np.uint64)


def advance(state: int, tokens: Sequence[int]) -> int:
    """The model's state after reading `tokens`; 64 bits."""
    if len(tokens) > 32:
        return _advance_far(state, tokens)
    for token in tokens:
        state = (state * FACTOR + token + STEP) & MASK
    return state


def _advance_far(state: int, tokens: Sequence[int]) -> int:
    return page_states(state, tokens, len(tokens))[-1]


def page_states(state: int, tokens: Sequence[int], page_tokens: int) -> list[int]:
    """The state after each page of `tokens`, which are whole pages: a page is a polynomial in FACTOR, modulo 2**64."""
    global _powers
    if len(_powers) <= page_tokens:
        with np.errstate(over="ignore"):
            _powers = np.cumprod(np.array([1] + [FACTOR] * 2 * page_tokens, np.uint64), dtype=np.uint64)
    values = np.asarray(tokens, np.uint64).reshape(-1, page_tokens) + np.uint64(STEP)
    power, states = int(_powers[page_tokens]), []
    for total in (values * _powers[:page_tokens][::-1]).sum(axis=1, dtype=np.uint64).tolist():
        state = (state * power + total) & MASK
        states.append(state)
    return states


def next_token(state: int, salt: int) -> int:
    """The token that follows a state; `salt` stands for the sampler's randomness. Below 2**30."""
    mixed = (state ^ (salt * 0x9E3779B97F4A7C15 & MASK)) * 0xBF58476D1CE4E5B9 & MASK
    return (mixed >> 29) & 0x3FFFFFFF


def generate(state: int, salt: int, count: int) -> tuple[list[int], int]:
    """`next_token` and `advance` by turns, `count` times: the tokens, and the state after them."""
    tokens, salt = [], salt * 0x9E3779B97F4A7C15 & MASK
    for _ in range(count):
        token = ((state ^ salt) * 0xBF58476D1CE4E5B9 & MASK) >> 29 & 0x3FFFFFFF
        state = (state * FACTOR + token + STEP) & MASK
        tokens.append(token)
    return tokens, state


@dataclass(slots=True)
class Script:
    """How one sequence goes: `total` is the position at which the model ends it, None where only max_tokens does."""

    num_prompt_tokens: int
    total: int | None
    salts: list[int] = field(default_factory=list)  # of engines that sampled it without a seed, as they came


class Model:
    """Shared by all engines of a cluster, like a checkpoint."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}  # by request id

    def script_of(self, engine_id: str) -> Script:
        return self.scripts[engine_id.split("~")[0]]

    def salt_of(self, engine_id: str, params: SamplingParams, engine: str) -> int:
        """The seed; without one and not greedy, something that no other engine would draw."""
        if params.seed is not None:
            return int(params.seed)
        salt = int.from_bytes(f"{engine} {engine_id}".encode()[-16:], "little") % 1_000_003 + 1_000
        self.script_of(engine_id).salts.append(salt)
        return salt


def prompt_of(arrival: Arrival, page_tokens: int = 32) -> list[int]:
    """Token ids whose full pages are equal exactly where the arrival's prefix hashes are."""
    tokens: list[int] = []
    for page in arrival.prefix_hashes[: arrival.prompt_tokens // page_tokens]:
        first = page % 100_003
        tokens.extend(range(first, first + page_tokens))
    rest = arrival.prompt_tokens - len(tokens)
    first = (arrival.at_ns + len(tokens)) % 99_991
    return [*tokens, *range(first, first + rest)]


def request_of(request_id: str, arrival: Arrival, prompt: list[int], max_tokens: int, seed: int) -> EngineCoreRequest:
    """The request as AsyncLLM would add it. Its sampling parameters make it survive a loss as `arrival.recovery`."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=seed)
    if arrival.recovery != "resume":
        params.presence_penalty = 0.5
    if arrival.recovery == "none":
        params.temperature, params.seed = 1.0, None
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
