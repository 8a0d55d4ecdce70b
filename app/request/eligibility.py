"""Request forms: which can be split over two pools, how each survives a lost decode replica, and what is sent. Pure.

The rules name what they know to be safe; everything else is served by decode alone, or not resumed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from app.request.state import Recovery

INTERNAL_ARGS = ("kv_transfer_params", "ec_transfer_params")
MAX_PREFIX_HASHES = 1024  # pages of a prompt that are hashed for prefix affinity
GREEDY_BELOW = 1e-5  # vLLM treats smaller temperatures as greedy


def check_encodable(request: EngineCoreRequest) -> None:
    """Raises `VLLMValidationError`, with the field's name, for a request that no message to an engine could hold."""
    try:
        encode(request)
    except (OverflowError, UnicodeEncodeError) as error:
        where = next((w for w in (request.sampling_params, request.pooling_params) if w is not None), request)
        field = next((f for f in where.__struct_fields__ if not _encodes(getattr(where, f))), "")
        message = f"{field or 'the request'} cannot be passed to an engine: {error}"
        raise VLLMValidationError(message, parameter=field or None) from error


def encode(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(frame) for frame in MsgpackEncoder().encode(request)]


def _encodes(value: Any) -> bool:
    try:
        MsgpackEncoder().encode(value)
        return True
    except (OverflowError, UnicodeEncodeError):
        return False


def is_constrained(request: EngineCoreRequest) -> bool:
    """Whether a grammar, a schema or the like bounds what may be sampled."""
    return request.sampling_params is not None and request.sampling_params.structured_outputs is not None


def disaggregates(request: EngineCoreRequest) -> bool:
    """Whether prefill may compute this prompt and decode go on from its pages.

    Not so: pooling and embeddings (no decode phase), prompt logprobs (they need every prompt position's logits in the
    engine that answers), multi-modal inputs and prompt embeddings (the pages depend on more than token ids), LoRA (the
    adapter would have to be on both sides), and requests that must not read a prefix.
    """
    params = request.sampling_params
    return (
        params is not None
        and request.pooling_params is None
        and bool(request.prompt_token_ids)
        and not request.mm_features
        and request.prompt_embeds is None
        and request.lora_request is None
        and params.prompt_logprobs is None
        and params.prompt_logprob_token_ids is None
        and not params.skip_reading_prefix_cache
    )


def recovery_of(request: EngineCoreRequest) -> Recovery:
    """How tokens that are out already can be continued on another replica, exactly.

    What an engine remembers of its own output is lost with it: penalty counts, the random generator, the grammar, bad
    words across the seam, a thinking budget. Repetition penalty counts prompt and output alike, so it survives.
    """
    params = request.sampling_params
    if params is None or request.mm_features or request.prompt_embeds is not None:
        return Recovery.REPLAY if params is None else Recovery.NONE
    greedy = params.temperature < GREEDY_BELOW
    remembers = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.structured_outputs is not None
        or bool(params.bad_words)
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.trace_decode_token_ids is not None
        or bool(params.extra_args)
        or (params.seed is not None and not greedy)
    )
    if not remembers:
        return Recovery.RESUME
    return Recovery.REPLAY if greedy or params.seed is not None else Recovery.NONE


def as_continuation(request: EngineCoreRequest, tokens: Sequence[int]) -> EngineCoreRequest:
    """The same request with the tokens that are out already as the end of its prompt."""
    params = request.sampling_params
    assert params is not None and params.max_tokens is not None and request.prompt_token_ids is not None
    if not tokens:
        return request
    rest = params.clone()
    rest.max_tokens = params.max_tokens - len(tokens)
    assert rest.max_tokens > 0, "a request with all its tokens out has finished"
    rest.min_tokens = max(0, params.min_tokens - len(tokens))
    rest.prompt_logprobs = None  # they left with the first output
    rest.prompt_logprob_token_ids = None
    prompt = [*request.prompt_token_ids, *tokens]
    return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling_params=rest)


def with_private_cache_salt(request: EngineCoreRequest, ticket_id: int) -> EngineCoreRequest:
    """The same request with a prefix cache of its ticket's own: it reads no page that was computed before."""
    salt = f"pageferry ticket {ticket_id} {request.cache_salt or ''}"
    return msgspec.structs.replace(request, cache_salt=hashlib.sha256(salt.encode()).hexdigest()[:32])


def samples_at_prefill(request: EngineCoreRequest, recovery: Recovery) -> bool:
    """Whether the token after this prompt may be prefill's own, out before the pages have moved.

    Only where decode can go on from prompt and token exactly, as after a loss, and only where it has to go on.
    """
    params = request.sampling_params
    return params is not None and (params.max_tokens or 0) > 1 and recovery is Recovery.RESUME


def for_prefill(request: EngineCoreRequest, samples: bool) -> EngineCoreRequest:
    """What the prefill engine computes: the prompt and one token.

    `samples`: the token is sampled as the client wants it. Else it is not read: no grammar, no logprobs, no end.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, watermarking=False)
    if samples:
        assert request.sampling_params is not None
        params = request.sampling_params.clone()
        params.min_tokens = min(1, params.min_tokens)
    params.max_tokens = 1
    return msgspec.structs.replace(request, sampling_params=params, reasoning_ended=None, reasoning_parser_kwargs=None)


def prefix_hashes(tokens: Sequence[int], block_tokens: int, salt: str | None) -> tuple[int, ...]:
    """One chained 64-bit hash a full page of the prompt, first page first; equal only for equal prefixes.

    They steer requests to replicas that have a prefix cached. The engine's own, independent hashes decide a hit.
    """
    chain = hashlib.blake2b((salt or "").encode(), digest_size=8).digest()
    hashes = []
    for start in range(0, min(len(tokens) // block_tokens, MAX_PREFIX_HASHES) * block_tokens, block_tokens):
        page = array("q", tokens[start : start + block_tokens]).tobytes()
        chain = hashlib.blake2b(chain + page, digest_size=8).digest()
        hashes.append(int.from_bytes(chain, "little") >> 1)
    return tuple(hashes)
