"""The correctness gate: what must hold before any speed is shown. Pure; every breach is one plain sentence.

1. No request failed, and every stream ended with a finish reason, `[DONE]` and usage.
2. Usage is exact: as many prompt tokens as were sent, as many output tokens as were asked for.
3. A system gives one greedy answer for one prompt, in every round and however often it is asked.
4. A system that should hand pages over has done so, and computed no prompt again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ops.bench.load import Answer


def answer_breaches(where: str, answers: Iterable[Answer], prompt_tokens: int, output_tokens: int) -> list[str]:
    """Laws 1 and 2."""
    found = []
    for answer in answers:
        name = f"{where}, request {answer.index}"
        if answer.error:
            found.append(f"{name}: {answer.error}")
            continue
        if answer.num_prompt_tokens != prompt_tokens:
            found.append(f"{name}: usage says {answer.num_prompt_tokens} prompt tokens, {prompt_tokens} were sent")
        if answer.num_output_tokens != output_tokens:
            found.append(f"{name}: usage says {answer.num_output_tokens} output tokens, {output_tokens} were asked for")
        if answer.finish_reason != "length" or not answer.done_seen:
            found.append(
                f"{name}: ended as {answer.finish_reason!r}, [DONE] {'seen' if answer.done_seen else 'missing'}"
            )
    return found


def repeat_breaches(system: str, runs: Sequence[Sequence[Answer]]) -> list[str]:
    """Law 3: `runs[k][i]` is the k-th answer to prompt i."""
    found = []
    for index, first in enumerate(runs[0] if runs else ()):
        texts = {run[index].text for run in runs}
        if len(texts) > 1:
            found.append(f"{system}: {len(texts)} different greedy answers to gate prompt {index}: {sorted(texts)[:2]}")
        elif not first.text:
            found.append(f"{system}: an empty answer to gate prompt {index}")
    return found


def hand_over_breaches(system: str, moved: int, recomputed: int, expected: int) -> list[str]:
    """Law 4: tokens that decode took over and computed itself since the system started, against what was sent."""
    found = []
    if moved < expected:
        found.append(f"{system}: {moved} prompt tokens were handed over, {expected} were sent")
    if recomputed:
        found.append(f"{system}: decode computed {recomputed} prompt tokens itself")
    return found
