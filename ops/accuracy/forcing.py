"""A vLLM logits processor that makes a request emit given tokens and compares the distributions behind them.

The reference engine's run writes the log-probabilities of the whole vocabulary at each forced position to a file; a
later engine's run reads the file inside its worker and leaves four figures a position. Logits are those of the model,
before any other processor has changed them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

EXTRA_ARG = "pageferry_force_tokens"
CLASS_PATH = "ops.accuracy.forcing:ForceTokens"


def forcing_params(continuation: list[int], figures: Path, record: str = "", against: str = "") -> SamplingParams:
    """Parameters of a request that emits `continuation` and leaves `figures`, JSON: [nll, kl, flip, hit] a position.

    `record`: file for its distributions. `against`: a recorded file; kl is KL(recorded || this) in nats, flip 1.0
    where the most likely token is another one. Without it both are 0. hit: 1.0 where the most likely token is the true.
    """
    order = {"tokens": list(continuation), "figures": str(figures), "record": record, "against": against}
    return SamplingParams(max_tokens=len(continuation), temperature=0.0, ignore_eos=True, extra_args={EXTRA_ARG: order})


class Tap:
    """What one forced request saw. A position that is computed again after a preemption takes the former's place."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.tokens: list[int] = order["tokens"]
        self._order = order
        self._reference = np.load(order["against"], mmap_mode="r") if order["against"] else None
        self._rows: dict[int, np.ndarray[Any, Any]] = {}
        self._figures: dict[int, list[float]] = {}

    def see(self, position: int, logits: torch.Tensor) -> None:
        logs = logits.float().log_softmax(-1).cpu()
        token, top = self.tokens[position], int(logs.argmax())
        kl = flip = 0.0
        if self._reference is not None:
            reference = torch.from_numpy(np.array(self._reference[position]))
            kl = float((reference.exp() * (reference - logs)).sum())
            flip = float(int(reference.argmax()) != top)
        self._figures[position] = [-float(logs[token]), kl, flip, float(top == token)]
        if self._order["record"]:
            self._rows[position] = logs.numpy()
        if position == len(self.tokens) - 1:
            self._write()

    def _write(self) -> None:
        every = range(len(self.tokens))
        if self._order["record"]:
            np.save(self._order["record"], np.stack([self._rows[position] for position in every]))
            self._rows.clear()
        partial = f"{self._order['figures']}.part"
        Path(partial).write_text(json.dumps([self._figures[position] for position in every]))
        os.replace(partial, self._order["figures"])


class ForceTokens(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        order: dict[str, Any] | None = (params.extra_args or {}).get(EXTRA_ARG)
        if not order:
            return None
        tap = Tap(order)

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            position = min(len(output_ids), len(tap.tokens) - 1)
            tap.see(position, logits)
            logits.fill_(float("-inf"))
            logits[tap.tokens[position]] = 0.0
            return logits

        return force
