"""GPTQ or AWQ by llm-compressor, as a process of its own: `python -m ops.compress.calibrate_pass SPEC`.

llm-compressor wants other versions of some libraries than the engine does, so it may live in a folder of its own
(`--calibrator-site`), which only this process sees.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

INSTALL = (
    "calibrated methods need llm-compressor: pip install --no-deps --target SITE "
    f"-r {Path(__file__).with_name('calibrator.txt')}, and then --calibrator-site SITE; or use --method rtn"
)
EXIT_NOT_INSTALLED = 7


def _recipe(spec: dict[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=spec["symmetric"], strategy="group", group_size=spec["group_size"]
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if spec["method"] == "gptq":
        return GPTQModifier(config_groups=groups, ignore=spec["ignore"])
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=spec["ignore"])]


def run(spec: dict[str, Any]) -> None:
    """`spec`: source, out, method, symmetric, group_size, ignore, windows (token ids)."""
    import torch
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # no device to pin for
    model = AutoModelForCausalLM.from_pretrained(spec["source"], dtype=torch.bfloat16)
    rows = [torch.tensor([window]) for window in spec["windows"]]
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    oneshot(
        model=model,
        dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]  # a list is a dataset to it
        recipe=_recipe(spec),
        max_seq_length=rows[0].shape[1],
        num_calibration_samples=len(rows),
    )
    model.save_pretrained(spec["out"], save_compressed=True)


def main(argv: list[str]) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import llmcompressor  # noqa: F401
    except ImportError as error:
        print(f"{INSTALL} ({error})", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    run(json.loads(Path(argv[0]).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
