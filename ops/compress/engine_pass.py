"""One engine over the text, as a process of its own: `python -m ops.compress.engine_pass SPEC OUT`.

A process, because an engine's memory comes back only when its process ends, and the next one needs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DEFAULT_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: it ends with it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`spec`: checkpoint, kv_cache_dtype, tensor_parallel, windows (token ids), tap_file, record.

    Returns `figures`, [nll, kl, flip] for each position of each window (see `LogitTap.tap_window`);
    `weights_loaded_bytes`, as loaded and before an engine's own packing, 0 where workers are processes of their own;
    `kv_bytes_per_token`, over all layers of a rank.
    """
    import psutil
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from actors.engine.vllm_patches import count_loaded_weights, loaded_weight_bytes

    count_loaded_weights()
    longest = max(len(window) for window in spec["windows"])
    memory: dict[str, Any] = {}
    if current_platform.is_cpu():  # vLLM's default share is more than is free beside anything else, and is refused
        machine = psutil.virtual_memory()
        memory["gpu_memory_utilization"] = round(min(0.9, 0.8 * machine.available / machine.total), 3)
    engine = LLM(
        spec["checkpoint"],
        skip_tokenizer_init=True,
        kv_cache_dtype=spec["kv_cache_dtype"],
        tensor_parallel_size=spec["tensor_parallel"],
        max_model_len=longest + 1,
        max_num_batched_tokens=max(2048, longest),
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        worker_extension_cls="ops.compress.logit_tap.LogitTap",
        **memory,
    )
    engine.collective_rpc("tap_start", args=(spec["tap_file"], spec["record"]))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    results = []
    for number, window in enumerate(spec["windows"]):
        output = engine.generate({"prompt_token_ids": window}, sampling, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        logprobs = [entry[token].logprob for entry, token in zip(output.prompt_logprobs, window) if entry]
        answers = engine.collective_rpc("tap_window", args=(window, logprobs))
        results.append(next(answer for answer in answers if answer is not None))
        print(f"window {number + 1} of {len(spec['windows'])}", file=sys.stderr, flush=True)
    cache = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    tokens = cache.num_blocks * engine.llm_engine.vllm_config.cache_config.block_size
    return {
        "figures": results,
        "weights_loaded_bytes": loaded_weight_bytes(),
        "kv_bytes_per_token": sum(tensor.size for tensor in cache.kv_cache_tensors) / tokens,
    }


def main(argv: list[str]) -> int:
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    spec_file, out_file = Path(argv[0]), Path(argv[1])
    results = run(json.loads(spec_file.read_text()))
    partial = out_file.with_suffix(".part")
    partial.write_text(json.dumps(results))
    partial.rename(out_file)  # whole or not there: a later command may go on from it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
