"""Two real engines with dummy weights on one GPU: BF16 prefill, FP8 decode, hand-over against decode alone.

Weights mean nothing, so tokens are compared and not gated; pages, verdicts and what is left afterwards are. A dry run
builds specs and engine arguments; `measure` itself runs in tests/engine on CPU engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.engine.config import engine_kwargs
from actors.messages import Role, Verdict
from cluster.spec import ClusterSpec
from ops.engine_pair import EnginePair
from ops.gpu_check.plan import Options, Row

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
_LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32000, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
MODELS = {"llama-8b": _LLAMA, "deepseek-v2-lite": _LATENT}
_COMMON = {
    "dtype": "bfloat16", "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def spec_of(folder: Path, name: str) -> ClusterSpec:
    """Writes the model's configuration; there is no checkpoint, and no tokenizer."""
    model = folder / "models" / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_COMMON | MODELS[name]))
    engine = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.4}
    pool = {"gpus_per_replica": 1, "block_tokens": 64, "max_num_seqs": 64, "engine_args": engine}
    return ClusterSpec.parse(
        {
            "model": {"path": str(model), "name": name, "max_model_len": 16384},
            "pools": {
                "prefill": {**pool, "kv_dtype": "bfloat16", "max_num_batched_tokens": 4096},
                "decode": {**pool, "kv_dtype": "fp8_e4m3"},
            },
            "transfer": {"staging_bytes_max": 4 << 30, "hand_over_s": 60, "lease_s": 60},
            "integrity": {"mode": "check", "seals": "full"},
        }
    )


async def measure(pair: EnginePair, lengths: tuple[int, ...], max_tokens: int = 16) -> list[Row]:
    """Each prompt handed over, then computed by decode alone; at the end nothing may be left."""
    from vllm.sampling_params import SamplingParams

    assert pair.prefill is not None
    rows: list[Row] = [
        {"role": str(host.role), "engine": host.announcement().engine} for host in (pair.prefill, pair.decode)
    ]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for length in lengths:
        prompt = [(7 * i * i + 31 * i + length) % 30000 + 10 for i in range(length)]
        took: dict[bool, float] = {}
        made = {}
        for handed_over in (True, False):
            began = time.perf_counter()
            made[handed_over] = await pair.generate(prompt, params, hand_over=handed_over, cache_salt=str(handed_over))
            took[handed_over] = time.perf_counter() - began
        opened = made[True].opened
        verdicts = {} if opened is None else {str(verdict): count for verdict, count in opened.verdicts.items()}
        same = sum(a == b for a, b in zip(made[True].token_ids, made[False].token_ids))
        rows.append(
            {
                "prompt_tokens": length, "verdicts": verdicts, "same_tokens": same, "of": max_tokens,
                "handed_over_s": took[True], "alone_s": took[False],
                "ok": set(verdicts) == {str(Verdict.OK)} and len(made[True].token_ids) == max_tokens,
            }
        )  # fmt: skip
    for host in (pair.prefill, pair.decode):
        audit: dict[str, Any] = await host.audit()
        rows.append({"role": str(host.role), "workers": audit["workers"]})
    left = await pair.idle_breaches()
    rows.append({"what": "left when idle", "left": left, "ok": not left})
    return rows


async def on_gpu(spec: ClusterSpec, lengths: tuple[int, ...]) -> list[Row]:
    began = time.perf_counter()
    pair = await EnginePair.start(spec)
    try:
        started: Row = {"model": spec.model.served_name, "start_s": time.perf_counter() - began}
        return [started, *await measure(pair, lengths)]
    finally:
        await pair.close()


def run(options: Options) -> Iterator[Row]:
    for name in MODELS:
        spec = spec_of(options.folder, name)
        if options.dry:
            for role in Role:
                arguments = engine_kwargs(spec, role, f"{role}-0", "socket", "life", 1)
                yield {
                    "model": name,
                    "role": str(role),
                    "arguments": arguments,
                    "ok": bool(arguments["kv_transfer_config"]),
                }
            continue
        for row in asyncio.run(on_gpu(spec, (100, 1000, 8000, 15000))):
            yield {"model": name, **row}
