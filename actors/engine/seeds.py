"""Keeps a seeded request's random generator out of steps whose sample is thrown away. CPU only.

When a prompt is computed in chunks, vLLM samples after every chunk, throws the token away and turns the generator back
by its draws (`set_offset`), which only device generators can: on CPU the engine dies of a RuntimeError. Here the
generator is left out of the batch for such a step, so nothing is drawn from it, and put back before the next one: the
tokens are those of a prompt computed in one piece.
"""

from __future__ import annotations

from typing import Any


class SeedGuard:
    """`runner`: vLLM's V1 model runner. Both calls belong into its step: `set_aside` before the forward, `put_back`
    before the batch is changed for the next step."""

    def __init__(self) -> None:
        self._aside: set[str] = set()  # request ids

    def set_aside(self, runner: Any) -> None:
        batch = runner.input_batch
        thrown_away = runner.discard_request_mask.np
        for row in [row for row in batch.generators if thrown_away[row]]:
            del batch.generators[row]
            self._aside.add(batch.req_ids[row])

    def put_back(self, runner: Any) -> None:
        for request_id in self._aside:
            row = runner.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                runner.input_batch.generators[row] = runner.requests[request_id].generator
        self._aside.clear()
