"""Two checkpoints in one service, and a family with another form of cache: each through a service of its own.

`python -m ops.tiny_models.serve` does the same for every family that vLLM's CPU build runs. This module stands before
the ones that share a service, so that its own has ended when theirs starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.tiny_models.serve import EXACT, run


@pytest.mark.timeout(400)
def test_bf16_prefill_and_int4_decode(tmp_path: Path) -> None:
    """FP8 pages, prompts computed by the BF16 original, answers by its INT4 copy, which nobody has judged."""
    result = run("smollm2-int4", tmp_path)
    assert result.problems == ()
    assert result.warned
    assert result.tokens_moved == result.prompt_tokens
    # Prompts read by the original's weights do not make the answer worse than the INT4 copy's own reading does.
    assert result.nll_hand_over < result.nll_alone + 0.1
    by_pool = {row["where"].split()[0]: row["real"] for row in result.plan if row["what"] == "weights bytes"}
    assert by_pool["decode"] < 0.5 * by_pool["prefill"]


@pytest.mark.timeout(400)
def test_latent_pages_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """DeepSeek V3's form, which is Kimi's. Nothing is rounded on the way: both roads say the same, but for the model's
    own rounding."""
    result = run("deepseek-v3", tmp_path)
    assert result.problems == ()
    assert not result.warned
    assert result.mean_abs_difference <= EXACT < result.control / 4
