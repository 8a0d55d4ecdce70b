"""A vLLM logits processor that makes a request emit given tokens, so that engines can be compared on the same text.

Logprobs are vLLM's raw ones (`logprobs_mode="raw_logprobs"`), taken before any processor, so they are what the model
said of each position while the text itself is forced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

EXTRA_ARG = "pageferry_force_tokens"
CLASS_PATH = "ops.accuracy.forcing:ForceTokens"


def forcing_params(continuation: list[int], num_logprobs: int) -> SamplingParams:
    """Parameters of a request that emits `continuation` and reports the top `num_logprobs` at each position."""
    return SamplingParams(
        max_tokens=len(continuation),
        temperature=0.0,
        ignore_eos=True,
        logprobs=num_logprobs,
        extra_args={EXTRA_ARG: list(continuation)},
    )


class ForceTokens(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        forced: list[int] | None = (params.extra_args or {}).get(EXTRA_ARG)
        if not forced:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[min(len(output_ids), len(forced) - 1)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force
