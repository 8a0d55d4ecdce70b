"""A vLLM worker extension that sees the whole distribution behind every prompt position.

vLLM returns the logprob of a few tokens; KL needs all of them, from two engines that do not fit into memory together.
So the first engine's log-probabilities go to a file, and the second is compared with it position by position, inside
its worker. Only the logits module's output is watched, nothing is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS_AT_ONCE = 64
ALIGNED = 0.02  # nats between vLLM's own logprob of a token and the tap's: other rows differ by far more


class LogitTap:
    """Mixed into vLLM's worker (`worker_extension_cls`); methods are called through `collective_rpc`.

    One request at a time, each in one step: `tap_start` once, then for each window a generate call with
    `prompt_logprobs=0` followed by `tap_window`.
    """

    get_model: Any

    def tap_start(self, path: str, record: bool) -> None:
        """`path`: float32 log-probabilities [positions, vocabulary], written if `record`, else compared with."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        found = [module for module in self.get_model().modules() if isinstance(module, LogitsProcessor)]
        if len(found) != 1:
            raise ValueError(f"the model has {len(found)} logits modules; exactly one can be compared")
        self._tap_path, self._tap_record, self._tap_row = Path(path), record, 0
        self._tap_rows: list[torch.Tensor] = []
        found[0].register_forward_hook(self._tap_see)

    def _tap_see(self, module: Any, inputs: Any, output: torch.Tensor | None) -> None:
        if output is not None:  # ranks that do not gather the logits have none
            self._tap_rows.append(output.detach().float().cpu())

    def tap_window(self, token_ids: list[int], logprobs: list[float]) -> list[list[float]] | None:
        """Takes what one request produced. `logprobs`: vLLM's own for token_ids[1:], by which the rows are aligned.

        Returns [nll, kl, flip] a position when comparing (kl of reference || this), [nll, 0, 0] when recording, None
        on ranks without logits. RuntimeError when the rows cannot be matched with the tokens.
        """
        if not self._tap_rows:
            return None
        rows, self._tap_rows = torch.cat(self._tap_rows), []
        targets = torch.tensor(token_ids[1:])
        logs = _aligned(rows, targets, torch.tensor(logprobs))
        file = self._tap_file(len(logs), logs.shape[1])
        figures = []
        for start in range(0, len(logs), ROWS_AT_ONCE):
            part = logs[start : start + ROWS_AT_ONCE]
            nll = -part.gather(1, targets[start : start + ROWS_AT_ONCE, None])[:, 0]
            stored = file[start : start + ROWS_AT_ONCE]
            if self._tap_record:
                stored[:] = part.numpy()
                figures += [[float(value), 0.0, 0.0] for value in nll]
                continue
            reference = torch.from_numpy(np.array(stored))
            kl = (reference.exp() * (reference - part)).sum(1)
            flip = reference.argmax(1) != part.argmax(1)
            figures += [[float(n), float(k), float(f)] for n, k, f in zip(nll, kl, flip, strict=True)]
        self._tap_row += len(logs)
        return figures

    def _tap_file(self, rows: int, vocabulary: int) -> np.memmap[Any, np.dtype[np.float32]]:
        """This window's place in the file, which grows window by window."""
        offset = self._tap_row * vocabulary * 4
        if self._tap_record:
            with self._tap_path.open("ab") as file:
                file.truncate(offset + rows * vocabulary * 4)
        mode: Any = "r+" if self._tap_record else "r"
        return np.memmap(self._tap_path, np.float32, mode, offset, (rows, vocabulary))


def _aligned(rows: torch.Tensor, targets: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the prompt's positions, float32. The engine also computes the row it samples from,
    before or after them; which it was shows in vLLM's own numbers."""
    count = len(targets)
    worst = []
    for start in {0, len(rows) - count}:
        if start < 0:
            continue
        logs = rows[start : start + count].log_softmax(1)
        difference = float((logs.gather(1, targets[:, None])[:, 0] - logprobs).abs().max())
        if difference <= ALIGNED:
            return logs
        worst.append(difference)
    raise RuntimeError(
        f"{len(rows)} rows of logits for {count} prompt positions, off by {worst} nats from the engine's own "
        "logprobs: the engine split or reordered the prompt"
    )
