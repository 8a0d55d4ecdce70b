"""Every family that vLLM's CPU build runs is handed over between two real engines; INT4 decode under BF16 prefill.

DeepSeek V3 (the Kimi form: MLA and experts) keeps BF16 pages, since the CPU build has no FP8 MLA cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_specs import MODEL, pair_spec
from vllm.sampling_params import SamplingParams

from actors.messages import Verdict
from ops.engine_pair import EnginePair
from ops.tiny_models.build import build

FAMILIES = {"deepseek-v3": "bfloat16", "glm4-moe": "fp8_e4m3", "qwen3-moe": "fp8_e4m3"}


@contextlib.asynccontextmanager
async def running(**overrides: Any) -> AsyncIterator[EnginePair]:
    made = await EnginePair.start(pair_spec(**overrides))
    try:
        yield made
        assert await made.idle_breaches() == []
    finally:
        await made.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_is_handed_over(family: str, tmp_path: Path, tokenizer: Any) -> None:
    build(family, tmp_path / family, Path(MODEL))
    kv = FAMILIES[family]
    scales = [1.0, 1.0] if kv == "bfloat16" else [0.5, 0.25]
    prompt = tokenizer.encode("The harbour master counts ferries. " * 12)[:75]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
    async with running(
        model__path=str(tmp_path / family), pools__decode__kv_dtype=kv, pools__decode__kv_scales=scales
    ) as pair:
        over = await pair.generate(prompt, params.clone())
        alone = await pair.generate(prompt[:-1] + prompt[:1], params.clone(), hand_over=False)
        assert over.opened is not None and over.opened.verdicts == {Verdict.OK: 3}
        assert len(over.token_ids) == len(alone.token_ids) == 6
        order = pair.decode.layout.order
        assert (order == "mla") == (family == "deepseek-v3")
        if kv == "bfloat16":
            # Nothing is rounded on the way, so decode alone says the same first token with the same logprob.
            single = await pair.generate(prompt, params.clone(), hand_over=False)
            token = single.token_ids[0]
            assert over.token_ids[0] == token
            assert over.logprobs[0][token] == pytest.approx(single.logprobs[0][token], abs=0.05)


async def test_int4_decode_under_bf16_prefill(tmp_path: Path, tokenizer: Any) -> None:
    """Two checkpoints, one service: only geometry and tokenizer have to agree."""
    from app.cli import main

    int4 = tmp_path / "int4"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    assert main(["compress", MODEL, str(int4), "--group-size", "64"]) == 0
    prompt = tokenizer.encode("The capital of France is")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with running(pools__decode__weights=str(int4)) as pair:
        assert pair.prefill is not None
        prefill, decode = pair.prefill.announcement(), pair.decode.announcement()
        assert prefill.fingerprint == decode.fingerprint
        assert prefill.engine["weights"] != decode.engine["weights"]
        made = await pair.generate(prompt, params)
        assert made.opened is not None and made.opened.ok
        assert "Paris" in tokenizer.decode(made.token_ids)
