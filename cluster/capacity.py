"""What one request takes of the four things that run out, and what a replica has of them. Pure.

KV blocks and sequence slots of a decode replica, staging bytes of a node, prefill time. Admission, scaling and the
planner all compute them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is needed, or what there is; `math.inf` where that does not matter."""

    blocks: float
    slots: float
    staging_bytes: float = math.inf
    prefill_s: float = math.inf

    def requests(self, each: Capacity) -> float:
        """How many such requests this is enough for: what is scarcest decides."""
        return min(self._shares(each).values())

    def scarcest(self, each: Capacity) -> str:
        """The dimension that runs out first, by name."""
        shares = self._shares(each)
        return min(shares, key=lambda name: shares[name])

    def _shares(self, each: Capacity) -> dict[str, float]:
        replicas = {}
        for dimension in fields(self):
            have, takes = getattr(self, dimension.name), getattr(each, dimension.name)
            replicas[dimension.name] = math.inf if have == math.inf or not takes else have // takes
        return replicas


def of_request(
    prompt_tokens: int,
    output_tokens: int,
    *,
    block_tokens: int,
    sequences: int = 1,
    page_bytes: int = 0,
    ranks: int = 1,
    computed_tokens: int = 0,
    prompt_token_s: float = 0.0,
) -> Capacity:
    """What a request takes. `page_bytes`: of one rank's page in decode's format. `computed_tokens`: of the prompt, that
    prefill has to compute, `prompt_token_s` each."""
    return Capacity(
        blocks(prompt_tokens, output_tokens, block_tokens, sequences),
        sequences,
        staging_bytes(prompt_tokens, block_tokens, page_bytes, ranks),
        computed_tokens * prompt_token_s,
    )


def blocks(prompt_tokens: int, output_tokens: int, block_tokens: int, sequences: int = 1) -> int:
    """Blocks at the end of a request: the prompt once, the `output_tokens` of every sequence."""
    whole = -(-(prompt_tokens + output_tokens) // block_tokens)
    further = -(-output_tokens // block_tokens) if sequences > 1 else 0
    return whole + further * (sequences - 1)


def staging_bytes(prompt_tokens: int, block_tokens: int, page_bytes: int, ranks: int) -> int:
    """Bytes of a prompt's pages, whole pages, of all `ranks`."""
    return ranks * -(-prompt_tokens // block_tokens) * page_bytes
