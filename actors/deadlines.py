"""How long each stage of a hand-over may take: from bytes, tokens and the pace that was seen. Pure."""

from __future__ import annotations

SLACK = 3.0  # times the expected time
BYTES_PER_S = 100e6  # that even a slow network between two nodes carries
ANSWER_S = 6.0  # for a transfer actor that has nothing to move


def hand_over_s(least_s: float, prefill_tokens: int, prompt_token_ns: float, num_bytes: int) -> float:
    """Seconds from the place of a request to its pages opened on decode.

    `prefill_tokens`: prompt tokens that its prefill replica computes until then, those of others before it included.
    `num_bytes`: that cross between nodes. `least_s`: `transfer.hand_over_s`, for what does not depend on size.
    """
    return round(least_s + SLACK * prefill_tokens * prompt_token_ns / 1e9 + num_bytes / BYTES_PER_S, 3)


def read_s(num_bytes: int, same_node: bool, rest_s: float) -> float:
    """Seconds that decode waits for the bytes of a hand-over; `rest_s`: until the hand-over's own deadline."""
    return min(rest_s, ANSWER_S + (0.0 if same_node else num_bytes / BYTES_PER_S))
