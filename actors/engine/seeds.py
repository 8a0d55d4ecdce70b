"""Keeps a seeded request's random generator out of steps whose sample is thrown away. CPU only.

When a prompt is computed in chunks, vLLM samples after every chunk, throws the token away and turns the generator back
by its draws (`set_offset`), which only device generators can: on CPU the engine dies of a RuntimeError. Here the
generator is left out of the batch for such a step, so nothing is drawn from it, and put back before the next one: the
tokens are those of a prompt computed in one piece.
"""

from __future__ import annotations

from actors.engine.runner_view import V1View


class SeedGuard:
    """Both calls belong into the runner's step: `set_aside` before the forward, `put_back` before the batch is changed
    for the next step."""

    def __init__(self, view: V1View) -> None:
        self._view = view
        self._aside: list[str] = []  # request ids

    def set_aside(self) -> None:
        self._aside += self._view.take_discarded_generators()

    def put_back(self) -> None:
        for request_id in self._aside:
            self._view.put_generator_back(request_id)
        self._aside.clear()
