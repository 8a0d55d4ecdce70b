"""llm-compressor's data-free path: `python -m ops.compress.bench_peer SOURCE OUT IGNORE FORM WORKERS`.

Prints [seconds, peak resident bytes] as its last line. A process of its own, see `calibrate_pass`.
"""

from __future__ import annotations

import json
import resource
import sys
import time

BLOCK = (128, 128)


def main(argv: list[str]) -> int:
    import torch
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import model_free_ptq

    source, out, ignore, form, workers = argv
    torch.set_num_threads(1)
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=128, observer="memoryless_minmax"
    )
    converter = None
    if form == "fp8":
        converter = FP8BlockDequantizer(targets=["re:.*_proj$", "re:.*kv_a_proj_with_mqa$"], weight_block_size=BLOCK)
    started = time.monotonic()
    model_free_ptq(
        source,
        out,
        scheme=QuantizationScheme(targets=["Linear"], weights=weights),
        ignore=json.loads(ignore),
        max_workers=int(workers),
        device="cpu",
        converter=converter,
    )
    seconds = time.monotonic() - started
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
