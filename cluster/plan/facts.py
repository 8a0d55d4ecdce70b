"""Carried-over facts of models and GPUs (`cluster/models.json`) and how a name or path becomes them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "models.json"
GIB = 1 << 30


class PlanError(ValueError):
    """A plan that cannot be made from what was given; the message names the field and the way out."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator. `hbm_gib` is what the driver shows, not the number on the box. All zero-speed for a CPU.

    Dense peaks in TFLOP/s without sparsity; `link_gb_s` is one direction between the GPUs of a node, 1e9 B/s.
    """

    name: str
    hbm_gib: float
    hbm_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    link_gb_s: float

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    def tflops(self, storage: str) -> float:
        """Peak that a matmul over weights stored as `storage` can use; weight-only formats compute in BF16."""
        return self.fp8_tflops if storage.startswith("fp8") and self.fp8_tflops else self.bf16_tflops


CPU = "CPU"
# A host core pool: memory for KV is given explicitly (VLLM_CPU_KVCACHE_SPACE), speed by --gpu-tb-s and --gpu-tflops.
_CPU = Gpu(CPU, hbm_gib=0.0, hbm_tb_s=0.012, bf16_tflops=0.1, fp8_tflops=0.0, link_gb_s=10.0)


@cache
def facts() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text())
    return data


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name."""
    names = list(known)
    lowered = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.3)
    hint = f"; did you mean {lowered[close[0]]!r}?" if close else ""
    return f"{hint} known: {', '.join(sorted(names))}" if hint else f"; known: {', '.join(sorted(names))}"


def known_models() -> list[str]:
    return sorted(facts()["models"])


def known_gpus() -> list[str]:
    return [*sorted(facts()["gpus"]), CPU]


def gpu(name: str, hbm_gib: float | None = None, hbm_tb_s: float | None = None, tflops: float | None = None) -> Gpu:
    """The GPU `name` with what the caller knows better put in.

    `name` may be the driver's, such as "NVIDIA H100 80GB HBM3".
    An unknown name is allowed only with `hbm_gib` and `hbm_tb_s`, since nothing may be guessed about it.
    """
    if name.lower() == CPU.lower():
        gpu = _CPU
    elif key := _gpu_key(name):
        gpu = Gpu(name=key, **facts()["gpus"][key])
    elif hbm_gib and hbm_tb_s:
        gpu = Gpu(name, hbm_gib, hbm_tb_s, bf16_tflops=tflops or 0.0, fp8_tflops=0.0, link_gb_s=32.0)
    else:
        raise PlanError(
            f"gpu {name!r} is unknown{nearest(name, known_gpus())}; or give --gpu-hbm-gib and --gpu-tb-s for it"
        )
    for field, value in (("hbm_gib", hbm_gib), ("hbm_tb_s", hbm_tb_s), ("tflops", tflops)):
        if value is not None and value <= 0:
            raise PlanError(f"gpu {field} {value} must be above 0")
    return replace(
        gpu,
        hbm_gib=gpu.hbm_gib if hbm_gib is None else hbm_gib,
        hbm_tb_s=gpu.hbm_tb_s if hbm_tb_s is None else hbm_tb_s,
        bf16_tflops=gpu.bf16_tflops if tflops is None else tflops,
        # A peak given by hand stands for every format: nothing is known about its FP8 units.
        fp8_tflops=gpu.fp8_tflops if tflops is None else 0.0,
    )


def _gpu_key(name: str) -> str | None:
    words = set(re.split(r"[-\s]+", name.lower()))
    return next((key for key in facts()["gpus"] if set(re.split(r"[-\s]+", key.lower())) <= words), None)


def model_config(model: str) -> tuple[str, dict[str, Any], Path | None]:
    """`(name, HF config, folder)` of a known name, a checkpoint folder, or a config.json.

    The folder is None unless `model` is a folder, whose safetensors can then be measured.
    """
    path = Path(model)
    known = facts()["models"]
    if model.lower() in known:
        return model.lower(), dict(known[model.lower()]["config"]), None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "is neither a known model nor a file or folder"
        raise PlanError(f"model {model!r} {what}{nearest(model, known_models())}; or the path of a Hugging Face config")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"model {model!r}: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"model {model!r}: {file} holds {type(config).__name__}, not a Hugging Face config")
    return (path.name if path.is_dir() else path.parent.name or path.stem), config, path if path.is_dir() else None


def model_notes(name: str) -> list[str]:
    entry = facts()["models"].get(name, {})
    return list(entry.get("notes", ()))


def native_weights(name: str) -> str | None:
    """The weight format a known model is published in."""
    entry = facts()["models"].get(name, {})
    value = entry.get("native_weights")
    return str(value) if value else None
