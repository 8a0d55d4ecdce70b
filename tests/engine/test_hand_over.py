"""A real BF16 prefill engine and a real FP8 decode engine.

After every test nothing is held anywhere (the conservation law that `settled` calls):
1. A handed-over prompt answers, at every length round the page size and over several prefill chunks.
2. Decode computes exactly the one position that it must. A seed draws the same however a prompt is cut.
3. Prefix-cache hits on either side, and a prompt that decode has whole.
4. Two requests at once, preemption on decode, preemption on prefill.
5. Abort while prefilling, while pages wait, while decoding.
6. Bytes that changed, proofs that are missing: decode computes the prompt itself and the answer is the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_specs import MODEL
from vllm.sampling_params import SamplingParams

from actors.messages import Verdict
from ops.engine_pair import EnginePair

TEXT = (
    "In the following text we describe the harbour in some detail, with facts, numbers and short examples, so that a "
    "reader who is new to it can follow. The first part gives background, the second part the main ideas, the third "
    "part a summary with questions and answers. Ferries leave every hour and carry pages of many colours. "
)


def greedy(num_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=3)


def prompt_of(tokenizer: Any, num_tokens: int, salt: str) -> list[int]:
    ids: list[int] = tokenizer.encode(f"[{salt}] " + TEXT * (num_tokens // 40 + 1))
    return ids[:num_tokens]


@pytest_asyncio.fixture(loop_scope="session")
async def settled(pair: EnginePair) -> AsyncIterator[EnginePair]:
    yield pair
    for _ in range(40):
        breaches = await pair.idle_breaches()
        if not breaches:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not settled: {breaches}")


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 64, 65, 257, 700])
async def test_lengths(settled: EnginePair, tokenizer: Any, num_tokens: int) -> None:
    prompt = prompt_of(tokenizer, num_tokens, f"len{num_tokens}")
    made = await settled.generate(prompt, greedy())
    assert (made.finish_reason, len(made.token_ids)) == ("length", 8)
    opened = made.opened
    assert opened is not None and opened.verdicts == {Verdict.OK: -(-num_tokens // 32)}
    assert opened.num_tokens == num_tokens
    # vLLM recomputes the last prompt position to sample from it; of a one-token prompt nothing is left to keep.
    assert made.cached_tokens == (num_tokens if num_tokens > 1 else 0)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 257])
async def test_decode_goes_on_after_prefills_own_token(settled: EnginePair, tokenizer: Any, num_tokens: int) -> None:
    prompt = prompt_of(tokenizer, num_tokens, f"then{num_tokens}")
    whole = await settled.generate(prompt, greedy(8))
    await settled.decode.core.reset_prefix_cache_async()
    rest = await settled.generate(prompt, greedy(7), then=whole.token_ids[:1])
    assert (rest.finish_reason, len(rest.token_ids)) == ("length", 7)
    assert rest.opened is not None and rest.opened.verdicts == {Verdict.OK: -(-num_tokens // 32)}
    # Every position of the prompt comes from prefill; the one that is computed is the token's.
    assert rest.opened.num_tokens == rest.cached_tokens == num_tokens
    second = whole.token_ids[1]
    assert abs(rest.logprobs[0].get(second, -99.0) - whole.logprobs[1][second]) < 1.0


async def test_decode_computes_one_position(settled: EnginePair, tokenizer: Any) -> None:
    before = (await settled.decode.audit())["scheduler"]["counters"]
    await settled.generate(prompt_of(tokenizer, 300, "one"), greedy(1))
    after = (await settled.decode.audit())["scheduler"]["counters"]
    assert after["tokens_opened"] - before["tokens_opened"] == 300
    assert after["tokens_recomputed"] == before["tokens_recomputed"]


async def test_a_seed_draws_the_same_over_chunks(settled: EnginePair, tokenizer: Any) -> None:
    """Computed in two chunks by decode alone, and in one position after a hand-over: as many draws, the same tokens.

    But for a draw or two that lie within FP8's rounding; a generator that is one draw ahead agrees in one of ten.
    """
    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    params = SamplingParams(max_tokens=16, temperature=2.0, seed=11, ignore_eos=True, allowed_token_ids=digits)
    prompt = prompt_of(tokenizer, 700, "seed")
    neighbour = settled.generate(prompt_of(tokenizer, 50, "by"), greedy(), hand_over=False)
    chunked, beside = await asyncio.gather(settled.generate(prompt, params, hand_over=False), neighbour)
    await settled.decode.core.reset_prefix_cache_async()
    handed = await settled.generate(prompt, params)
    same = sum(one == other for one, other in zip(chunked.token_ids, handed.token_ids, strict=True))
    assert same >= 11 and len(set(handed.token_ids)) > 3, (chunked.token_ids, handed.token_ids)
    assert (chunked.finish_reason, beside.finish_reason) == ("length", "length")


async def test_prefix_hits_on_both_sides(settled: EnginePair, tokenizer: Any) -> None:
    first = prompt_of(tokenizer, 320, "prefix")
    await settled.generate(first, greedy())
    longer = first + prompt_of(tokenizer, 100, "tail")
    made = await settled.generate(longer, greedy())
    # Decode had the first ten pages; only the rest came over, bound to their true positions.
    assert made.opened is not None and made.opened.verdicts == {Verdict.OK: 4}
    whole = await settled.generate(longer, greedy())
    assert whole.token_ids == made.token_ids


async def test_a_prompt_that_decode_has_whole_is_released_unread(settled: EnginePair, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, 128, "whole")
    first = await settled.generate(prompt + prompt[:5], greedy())
    again = await settled.generate(prompt + prompt[:5], greedy())
    assert again.token_ids == first.token_ids
    assert again.opened is not None and again.opened.num_pages == 1  # the partial last page is never cached


async def test_two_at_once_do_not_mix(settled: EnginePair, tokenizer: Any) -> None:
    prompts = [prompt_of(tokenizer, 90 + 40 * i, f"mix{i}") for i in range(4)]
    alone = [await settled.generate(prompt, greedy(1)) for prompt in prompts]
    together = await asyncio.gather(*(settled.generate(prompt, greedy(1)) for prompt in prompts))
    for one, other in zip(alone, together, strict=True):
        # Batching changes the order of additions, not the answer's first token.
        assert one.token_ids == other.token_ids


@pytest.mark.timeout(1_800)  # 8,400 tokens: minutes, on a CPU without AVX-512 that other tests share
async def test_preemption_on_both_sides(settled: EnginePair, tokenizer: Any) -> None:
    """More than decode's 255 pages are wanted at once: some requests are preempted and computed again by decode."""
    prompts = [prompt_of(tokenizer, 1000, f"big{i}") for i in range(7)]
    made = await asyncio.gather(*(settled.generate(prompt, greedy(200)) for prompt in prompts))
    assert all((m.finish_reason, len(m.token_ids)) == ("length", 200) for m in made)


async def test_abort_while_prefilling(settled: EnginePair, tokenizer: Any) -> None:
    ticket = settled.ticket("abort-prefill", 1500)
    task = asyncio.create_task(settled.seal(ticket, prompt_of(tokenizer, 1500, "abort")))
    await asyncio.sleep(0.4)
    assert len(settled.transfer.machine.staging) == 1 and not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_abort_with_pages_in_staging(settled: EnginePair, tokenizer: Any) -> None:
    ticket = settled.ticket("abort-sealed", 200)
    await settled.seal(ticket, prompt_of(tokenizer, 200, "sealed"))
    assert len(settled.transfer.machine.staging) == 1
    await settled.transfer.release([(ticket.ticket_id, 1)])


async def test_abort_while_decoding(settled: EnginePair, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, 200, "decoding")
    ticket = settled.ticket("abort-decode", 200)
    over, _ = await settled.seal(ticket, prompt)
    seen = 0
    async for output in settled.stream("abort-decode", prompt, greedy(400), ticket, over):
        seen += len(output.new_token_ids)
        if seen >= 3:
            break
    await settled.decode.abort("rig", ["abort-decode"])


async def test_changed_bytes_are_computed_again(settled: EnginePair, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, 130, "changed")
    ticket = settled.ticket("changed", 130)
    over, _ = await settled.seal(ticket, prompt)
    settled.transfer.memory.map[over.lease.offset + 1000] ^= 1
    tokens: list[int] = []
    async for output in settled.stream("changed", prompt, greedy(), ticket, over):
        tokens += output.new_token_ids
    opened = await settled.wait_opened((ticket.ticket_id, 1))
    assert opened is not None and opened.verdicts[Verdict.MISMATCH] == 1
    alone = await settled.generate(prompt, greedy(), hand_over=False)
    assert tokens == alone.token_ids


async def test_a_released_lease_is_computed_again(settled: EnginePair, tokenizer: Any) -> None:
    prompt = prompt_of(tokenizer, 130, "released")
    ticket = settled.ticket("released", 130)
    over, _ = await settled.seal(ticket, prompt)
    await settled.transfer.release([(ticket.ticket_id, 1)])
    tokens: list[int] = []
    async for output in settled.stream("released", prompt, greedy(), ticket, over):
        tokens += output.new_token_ids
    assert len(tokens) == 8


async def test_a_dead_reader_of_another_attempt_opens_nothing(settled: EnginePair, tokenizer: Any) -> None:
    """A proof of attempt 1 for bytes of attempt 2: every page is refused."""
    prompt = prompt_of(tokenizer, 64, "attempt")
    ticket = settled.ticket("attempt", 64)
    over, _ = await settled.seal(ticket, prompt)
    import msgspec

    forged = msgspec.structs.replace(over, seal=msgspec.structs.replace(over.seal, attempt=2))
    async for _ in settled.stream("attempt", prompt, greedy(2), ticket, forged):
        pass
    opened = await settled.wait_opened((ticket.ticket_id, 1))
    assert opened is not None and opened.verdicts == {Verdict.STALE: 2}


async def test_the_announcement_tells_what_the_engine_holds(pair: EnginePair) -> None:
    assert pair.prefill is not None
    on_disk = Path(MODEL, "model.safetensors").stat().st_size
    for host, bytes_per_token in ((pair.prefill, 23_040), (pair.decode, 11_520)):
        said = host.announcement()
        assert said.engine["weights_loaded_bytes"] == pytest.approx(on_disk, rel=0.002)
        lane = bool(os.environ.get("PAGEFERRY_V2_ON_CPU"))  # see test_v2_runner.py
        assert said.engine["model_runner"] == ("V2" if lane else "V1") and said.engine["async_scheduling"] is lane
        assert said.engine["attention_backend"] == "CPU_ATTN" and said.engine["kv_cache_layout"] == "LBHNC"
        assert said.engine["cuda_graphs"] == "NONE" and said.engine["device"] == "cpu"
        assert said.engine["kv_cache_bytes"] == (said.blocks_total + 1) * said.block_tokens * bytes_per_token
    # The same bytes hold twice the tokens (vLLM's null block aside).
    assert pair.prefill.layout.page_bytes >= 1.98 * pair.decode.layout.page_bytes
