"""What a request will need: output length, pace, and the occupancy of a replica at a time to come. Pure.

The forecasts are deliberately plain: running means by size class. They decide how much is reserved; a wrong one costs
a preemption on decode or an idle block, never a wrong token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.controller.journal import Tracked, TrackedDict
from actors.controller.registry import Replica
from actors.messages import AdmitRequest
from cluster import capacity

SECOND = 1_000_000_000
PRIOR_OUTPUT_TOKENS = 512  # for a request without a useful max_tokens, until answers have been seen
SAMPLES_BEFORE_TRUST = 8
WEIGHT = 0.05  # of a new sample in a running mean
LONG_PROMPT = 1024  # tokens: from here on a prompt's time says in full what a token costs
STEP = 0.25  # by which such a prompt moves the median, as a share of it
MAD_TO_DEVIATION = 1.25  # standard deviation over mean absolute deviation, of a normal distribution


@dataclass(slots=True)
class _Mean(Tracked):
    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0  # mean absolute

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(WEIGHT, 1.0 / self.count)
        self.deviation += weight * (abs(value - self.mean) - self.deviation) if self.count > 1 else 0.0
        self.mean += weight * (value - self.mean)


@dataclass(slots=True)
class Forecast(Tracked):
    """Running means over the requests that ended well."""

    by_class: TrackedDict[int, _Mean] = field(default_factory=TrackedDict)
    output: _Mean = field(default_factory=_Mean)
    token_ns: float = 0.03 * SECOND  # between two tokens of one stream
    prompt_token_ns: float = 0.0002 * SECOND  # of a prefill replica that has work, over all its prompts' tokens
    _prefill_tokens: float = 1024.0  # running means of what it is made of
    _prefill_ns: float = 1024 * 0.0002 * SECOND
    median_token_ns: float = 0.0002 * SECOND  # of prompts' time over their tokens; long prompts count, stalls do not
    _decode_tokens: float = 64.0  # the same for `token_ns`: few tokens after a long pause must not weigh like many
    _decode_ns: float = 64 * 0.03 * SECOND
    hand_over_ns: float = 0.02 * SECOND  # from the proof of a prompt's pages to their being open on decode
    stay_ns: float = 0.0  # from its place on decode to its end, a request; 0: none has ended yet
    asked_blocks: float = 0.0  # of all requests that ever came, at their expected ends
    asked_requests: int = 0
    asked_squares: float = 0.0  # the same, each one squared: how unevenly they are spread

    def asked(self, blocks: int) -> None:
        """A request came that will hold `blocks` at its end."""
        self.asked_requests += 1
        self.asked_blocks += blocks
        self.asked_squares += blocks * blocks

    @property
    def mean_blocks(self) -> float:
        """Of a request at its end; 0 before any came."""
        return self.asked_blocks / self.asked_requests if self.asked_requests else 0.0

    def output_tokens(self, request: AdmitRequest) -> int:
        """Tokens of each sequence at its expected end, the ones already emitted included."""
        seen = self._seen(request)
        expected = PRIOR_OUTPUT_TOKENS if seen.count < SAMPLES_BEFORE_TRUST else math.ceil(seen.mean)
        emitted = per_sequence(request, request.num_output_tokens)
        expected = max(expected, emitted + emitted // 2 + 1)
        return max(1, min(expected, request.max_tokens))

    def spread_tokens(self, request: AdmitRequest) -> float:
        """Standard deviation of `output_tokens`; 0 where it is the most that the request may put out."""
        seen = self._seen(request)
        spread = PRIOR_OUTPUT_TOKENS / 2 if seen.count < SAMPLES_BEFORE_TRUST else MAD_TO_DEVIATION * seen.deviation
        return min(spread, float(request.max_tokens - self.output_tokens(request)))

    def _seen(self, request: AdmitRequest) -> _Mean:
        seen = self.by_class.get(request.max_tokens.bit_length())
        return self.output if seen is None or seen.count < SAMPLES_BEFORE_TRUST else seen

    def learn(self, request: AdmitRequest, num_output_tokens: int, decode_ns: int) -> None:
        """`num_output_tokens`: of all sequences together. Each of them is one answer."""
        length = per_sequence(request, num_output_tokens)
        self.by_class.setdefault(request.max_tokens.bit_length(), _Mean()).add(length)
        self.output.add(length)
        fresh = length - per_sequence(request, request.num_output_tokens)
        if fresh > 1 and decode_ns > 0:
            self._decode_tokens += WEIGHT * (fresh - self._decode_tokens)
            self._decode_ns += WEIGHT * (decode_ns - self._decode_ns)
            self.token_ns = self._decode_ns / self._decode_tokens

    def learn_stay(self, stay_ns: int) -> None:
        self.stay_ns += WEIGHT * (stay_ns - self.stay_ns) if self.stay_ns else stay_ns

    def learn_hand_over(self, took_ns: int) -> None:
        self.hand_over_ns += WEIGHT * (took_ns - self.hand_over_ns)

    def local_prefill_tokens(self, num_streams: int) -> int:
        """Prompt tokens that decode computes in the time of a hand-over; its `num_streams` streams wait as well."""
        return int(self.hand_over_ns / (self.prompt_token_ns * (1 + num_streams)))

    def learn_prefill(self, num_prompt_tokens: int, busy_ns: int) -> None:
        """A prefill replica has computed so many tokens in the time that it was busy with them."""
        self._prefill_tokens += WEIGHT * (num_prompt_tokens - self._prefill_tokens)
        self._prefill_ns += WEIGHT * (busy_ns - self._prefill_ns)
        self.prompt_token_ns = self._prefill_ns / max(1.0, self._prefill_tokens)
        # A short prompt's time is mostly what every prompt costs: over its tokens it would let a long one take minutes.
        weight = STEP * min(1.0, num_prompt_tokens / LONG_PROMPT) ** 2
        slower = busy_ns > self.median_token_ns * num_prompt_tokens
        self.median_token_ns *= 1 + weight if slower else 1 / (1 + weight)

    def prefill_ns(self, num_prompt_tokens: int) -> float:
        """What a prompt takes of a prefill replica's time, at the least: who would wait too long by this is refused."""
        return self.median_token_ns * num_prompt_tokens


def per_sequence(request: AdmitRequest, num_tokens: int) -> int:
    """`num_tokens` of all the request's sequences, as tokens of one."""
    return -(-num_tokens // max(1, request.num_sequences))


def blocks_for(request: AdmitRequest, output_tokens: int, block_tokens: int, sequences: int | None = None) -> int:
    """Blocks of a request at its end: the prompt once, the outputs of every sequence (or of `sequences` at once)."""
    sequences = request.num_sequences if sequences is None else sequences
    return capacity.blocks(request.num_prompt_tokens, output_tokens, block_tokens, sequences)


def predict_occupancy(replica: Replica, now_ns: int, ends_ns: int, need: int, growth: float) -> tuple[int, int]:
    """Blocks on `replica` at the worst moment until `ends_ns`, and at `ends_ns`, with a new request of `need` blocks.

    Every ticket grows in a straight line (`growth` blocks a second) to its reservation and is gone after its expected
    end; one that has outlived its forecast stays in full. Between two ends the sum only grows, so the worst moments
    are the ends: one sweep from the last end backwards sees them all, in time linear in the replica's tickets.
    """
    steady = replica.occupancy.blocks_quarantined + replica.unexplained
    level, slope, anchor = 0.0, 0.0, 0.0  # of tickets that end later: sum reserved, sum growth, sum growth * end
    at_end, peak = -1.0, 0.0
    growth /= SECOND
    for end, _, reserved, grows, _ in reversed(replica.ends):
        if end <= now_ns:
            steady += reserved
            continue
        if at_end < 0.0 and end <= ends_ns:
            at_end = level - anchor + ends_ns * slope
        rate = grows / SECOND
        level += reserved
        slope += rate
        anchor += rate * end
        if end <= ends_ns:
            then = level - anchor + end * slope + need - growth * (ends_ns - end)
            if then > peak:
                peak = then
    if at_end < 0.0:
        at_end = level - anchor + ends_ns * slope
    at_end = (at_end if at_end > 0.0 else 0.0) + need
    return steady + math.ceil(peak if peak > at_end else at_end), steady + math.ceil(at_end)
