"""Every token once, the prompt counted once, whatever engines come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from app.request.emitted import EmittedTokens, ReplayDiffers


def output(*tokens: int, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r~2", new_token_ids=list(tokens), **more)


def logprobs(*tokens: int) -> LogprobsLists:
    rows = np.array(tokens).reshape(-1, 1)
    return LogprobsLists(rows, rows * -0.5, np.arange(len(tokens)))


def stats(prompt: int, local: int, external: int) -> PrefillStats:
    made = PrefillStats()
    made.set(prompt, local, external)
    return made


@pytest.mark.parametrize(
    ("prompt", "cached", "page", "written"), [(100, 0, 32, 96), (100, 64, 32, 32), (96, 96, 32, 0), (100, 0, None, 0)]
)
def test_usage_is_that_of_the_engine_that_computed_the_prompt(
    prompt: int, cached: int, page: int | None, written: int
) -> None:
    emitted = EmittedTokens("r", page)
    emitted.cached_tokens = cached
    taken = emitted.take(output(5, prefill_stats=stats(prompt, 0, prompt - 1)))
    assert taken is not None and taken.prefill_stats is not None
    found = taken.prefill_stats
    assert (found.num_cached_tokens, found.num_external_cached_tokens) == (cached, 0)
    assert (found.num_computed_tokens, found.num_cache_creation_tokens) == (prompt - cached, written)
    assert taken.request_id == "r"


def test_a_prompt_that_decode_computed_keeps_decodes_own_numbers() -> None:
    taken = EmittedTokens("r", 32).take(output(5, prefill_stats=stats(100, 32, 0)))
    assert taken is not None and taken.prefill_stats is not None and taken.prefill_stats.num_cached_tokens == 32


def test_log_probabilities_of_tokens_that_are_out_are_cut_off() -> None:
    emitted = EmittedTokens("r", 32)
    emitted.take(output(5, 6, new_logprobs=logprobs(5, 6)))
    emitted.new_engine(replays=True)
    taken = emitted.take(output(5, 6, 7, 8, new_logprobs=logprobs(5, 6, 7, 8)))
    assert taken is not None and taken.new_logprobs is not None
    assert taken.new_token_ids == [7, 8]
    assert taken.new_logprobs.logprob_token_ids.tolist() == [[7], [8]]
    assert emitted.tokens == [5, 6, 7, 8]


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_replay_adds_exactly_what_is_new(tokens: list[int], data: st.DataObject) -> None:
    out = data.draw(st.integers(0, len(tokens)))
    emitted = EmittedTokens("r", 32)
    seen: list[int] = []
    for token in tokens[:out]:
        taken = emitted.take(output(token))
        seen += taken.new_token_ids if taken is not None else []
    emitted.new_engine(replays=True)
    position = 0
    while position < len(tokens):
        step = data.draw(st.integers(1, 3))
        finish = FinishReason.STOP if position + step >= len(tokens) and len(tokens) > out else None
        taken = emitted.take(output(*tokens[position : position + step], finish_reason=finish))
        seen += taken.new_token_ids if taken is not None else []
        position += step
    assert seen == emitted.tokens == tokens


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_a_replay_that_goes_another_way_is_seen_before_a_token_gets_out(tokens: list[int], data: st.DataObject) -> None:
    emitted = EmittedTokens("r", 32)
    emitted.take(output(*tokens))
    emitted.new_engine(replays=True)
    wrong = data.draw(st.integers(0, len(tokens) - 1))
    for token in tokens[:wrong]:
        assert emitted.take(output(token)) is None
    with pytest.raises(ReplayDiffers):
        emitted.take(output(tokens[wrong] + 1))
    assert emitted.tokens == tokens
