"""Which forms are split, how each survives a lost decode replica, what is sent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_cluster import request
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import StructuredOutputsParams

from app.request import eligibility
from app.request.state import Recovery


def test_plain_generation_is_split() -> None:
    assert eligibility.disaggregates(request())
    assert eligibility.disaggregates(request(logprobs=5, presence_penalty=1.0, seed=1))


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_decode_serves_alone_what_needs_every_prompt_position(params: dict[str, Any]) -> None:
    assert not eligibility.disaggregates(request(**params))


def test_decode_serves_alone_what_pages_do_not_describe() -> None:
    plain = request()
    lora = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a")
    assert not eligibility.disaggregates(msgspec.structs.replace(plain, lora_request=lora))
    pooling = msgspec.structs.replace(plain, sampling_params=None, pooling_params=PoolingParams())
    assert not eligibility.disaggregates(pooling)
    assert not eligibility.disaggregates(msgspec.structs.replace(plain, prompt_token_ids=None))


@pytest.mark.parametrize(
    ("params", "recovery"),
    [
        ({}, Recovery.RESUME),
        ({"temperature": 1.0}, Recovery.RESUME),
        ({"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {1: 2.0}, "min_tokens": 4}, Recovery.RESUME),
        ({"seed": 1}, Recovery.RESUME),  # greedy never draws
        ({"temperature": 1.0, "seed": 1}, Recovery.REPLAY),
        ({"presence_penalty": 0.5}, Recovery.REPLAY),
        ({"frequency_penalty": 0.5, "temperature": 0.7, "seed": 1}, Recovery.REPLAY),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, Recovery.REPLAY),
        ({"bad_words": ["a b"]}, Recovery.REPLAY),
        ({"presence_penalty": 0.5, "temperature": 1.0}, Recovery.NONE),
        ({"structured_outputs": StructuredOutputsParams(regex="a+"), "temperature": 1.0}, Recovery.NONE),
        ({"extra_args": {"plugin": 1}, "temperature": 1.0}, Recovery.NONE),
    ],
)
def test_recovery(params: dict[str, Any], recovery: Recovery) -> None:
    assert eligibility.recovery_of(request(**params)) is recovery


def test_a_resumed_request_has_its_tokens_as_prompt_and_fewer_to_go() -> None:
    original = request(max_tokens=10, min_tokens=3, stop=["x"], logprobs=2)
    again = eligibility.as_continuation(original, [7, 8, 9, 10])
    assert again.prompt_token_ids == [*range(10), 7, 8, 9, 10]
    assert again.sampling_params is not None and original.sampling_params is not None
    assert (again.sampling_params.max_tokens, again.sampling_params.min_tokens) == (6, 0)
    assert again.sampling_params.logprobs == 2
    assert original.sampling_params.max_tokens == 10 and original.prompt_token_ids == [*range(10)]
    assert eligibility.as_continuation(original, []) is original


def test_a_resumed_request_keeps_parameters_that_vllm_shares() -> None:
    original = request(max_tokens=10)
    assert original.sampling_params is not None
    original.sampling_params.skip_clone = True  # as vLLM marks parameters that it owns: clone() is then the identity
    eligibility.as_continuation(original, [1])
    assert original.sampling_params.max_tokens == 10


def test_prefix_hashes_are_chained_full_pages() -> None:
    tokens = list(range(100))
    hashes = eligibility.prefix_hashes(tokens, 32, None)
    assert len(hashes) == 3 and len(set(hashes)) == 3
    assert eligibility.prefix_hashes(tokens[:64], 32, None) == hashes[:2]
    assert eligibility.prefix_hashes([1, *tokens[1:]], 32, None)[1:] != hashes[1:], "a page depends on all before it"
    assert eligibility.prefix_hashes(tokens[:31], 32, None) == ()
    assert not set(hashes) & set(eligibility.prefix_hashes(tokens, 32, "another tenant"))
    assert all(0 <= each < 2**63 for each in hashes)
