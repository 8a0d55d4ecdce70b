"""What the client of one request has been given so far, and how the next engine output becomes part of it.

Engines come and go under a request; its transcript has every token once, its prompt counted once, on one clock.
"""

from __future__ import annotations

import time

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import PrefillStats


class ReplayDiffers(Exception):
    """Run again from the start, an engine did not come by the tokens that are out already."""


class EmittedTokens:
    """`page_tokens` is None when no engine caches prefixes."""

    def __init__(self, request_id: str, page_tokens: int | None) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.began = time.monotonic()
        self.first_token = self.last_token = 0.0
        self.cached_tokens: int | None = None  # of the prompt, in the prefix cache of the prefill that computed it
        self._page_tokens = page_tokens
        self._to_replay = 0  # tokens that the current engine will send again

    def new_engine(self, *, replays: bool) -> None:
        self._to_replay = len(self.tokens) if replays else 0

    def take(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The output as vLLM's output processor should see it; None when there is nothing new in it."""
        if self._to_replay and (output.new_token_ids or output.finish_reason is not None):
            self._compare(output)
            if not output.new_token_ids and output.finish_reason is None:
                return None
        if self.tokens:
            output.events = output.prefill_stats = None  # the prompt was queued and computed once, for the client
        if (stats := output.prefill_stats) is not None and self.cached_tokens is not None:
            self._restate(stats, self.cached_tokens)
        if output.new_token_ids:
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token
        self.tokens.extend(output.new_token_ids)
        output.request_id = self.request_id
        output.kv_transfer_params = None
        return output

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between two tokens after the first."""
        count = len(self.tokens) - 1
        return (self.last_token - self.first_token) / count if count > 0 else None

    def _compare(self, output: EngineCoreOutput) -> None:
        """Takes the tokens that are out already off the output. Raises `ReplayDiffers`."""
        new = output.new_token_ids
        done = len(self.tokens) - self._to_replay
        overlap = min(len(new), self._to_replay)
        same = self.tokens[done : done + overlap] == list(new[:overlap])
        self._to_replay -= overlap
        if not same or (self._to_replay and output.finish_reason is not None):
            raise ReplayDiffers(
                "the decode replica of this request is gone and another one did not reproduce its tokens"
            )
        output.new_token_ids = new[overlap:]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(overlap, len(new) - overlap)
        output.new_prompt_logprobs_tensors = None

    def _restate(self, stats: PrefillStats, cached: int) -> None:
        """What a single engine would report of this prompt: what its own prefix cache had, and what it wrote to it."""
        prompt, page = stats.num_prompt_tokens, self._page_tokens
        stats.set(prompt, min(cached, prompt), 0)
        stats.num_cache_creation_tokens = max(0, prompt // page * page - cached) if page is not None else 0
