"""Does the compressed model still say the same? Both engines read one text, teacher-forced; the whole distributions
are compared at every position.

Each window of the text is a prompt of its own, so a position's context is what precedes it in its window. Intervals
are bootstrapped over windows, not tokens: tokens of one window are not independent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.quality import Bucket, Interval, Measures, State, Verdict
from ops.compress.source import open_checkpoint

RESAMPLES = 2000
SEED = 20
BUCKET_ENDS = (16, 64, 256, 1024, 4096, 16384, 65536)

Figures = npt.NDArray[np.float64]  # [windows, positions]


@dataclass(frozen=True)
class Engine:
    """One side of the comparison."""

    checkpoint: Path
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Text:
    """Windows of token ids, all of one length, spread evenly over a text."""

    windows: tuple[tuple[int, ...], ...]
    sha256: str


@dataclass(frozen=True)
class Comparison:
    """Per position, [windows, positions]: negative log-likelihoods of the true next token under both, KL(reference ||
    candidate) in nats, and 1.0 where the most likely token differs."""

    nll_reference: Figures
    nll: Figures
    kl: Figures
    flips: Figures
    weights_loaded_bytes: int = 0  # of the candidate's engine; 0 where its workers are processes of their own
    kv_bytes_per_token: float = 0.0


def read_text(file: Path, checkpoint: Path, num_tokens: int, window: int) -> Text:
    """Cuts `file` into about num_tokens / window windows with the checkpoint's tokenizer. ValueError when it is too
    short for eight of them (an interval over fewer means nothing)."""
    from transformers import AutoTokenizer

    raw = file.read_text(encoding="utf-8")
    count = max(8, num_tokens // window)
    ids: list[int] = AutoTokenizer.from_pretrained(str(checkpoint))(raw, add_special_tokens=False)["input_ids"]
    if window < 2 or len(ids) < count * window:
        raise ValueError(
            f"{file} holds {len(ids)} tokens; {count} windows of {window} need {count * window}: "
            "take a longer text, a smaller --window or fewer --tokens (eight windows at least)"
        )
    stride = (len(ids) - window) // max(1, count - 1)
    windows = tuple(tuple(ids[start * stride : start * stride + window]) for start in range(count))
    return Text(windows, hashlib.sha256(raw.encode()).hexdigest())


def compare(
    reference: Engine,
    candidates: Sequence[Engine],
    text: Text,
    scratch: Path,
    tensor_parallel: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Runs the reference once and every candidate against it, one engine after the other.

    `scratch` needs positions x vocabulary x 4 bytes. ValueError when tokenizers differ or space is short; RuntimeError
    with the engine's last words when it fails.
    """
    first = open_checkpoint(reference.checkpoint)
    for candidate in candidates:
        other = open_checkpoint(candidate.checkpoint)
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise ValueError(f"{candidate.checkpoint} and {reference.checkpoint} have different tokenizer files")
    needed = sum(len(window) for window in text.windows) * int(first.text_config["vocab_size"]) * 4
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise ValueError(
            f"{scratch} needs {needed >> 20} MiB for log-probabilities and has {free >> 20}: fewer --tokens"
        )
    with tempfile.TemporaryDirectory(prefix=".evaluating-", dir=scratch) as name:
        folder = Path(name)
        results: list[Comparison] = []
        first_pass, recorded = _pass(reference, text, folder, tensor_parallel, "", say)
        for engine in candidates:
            found, _ = _pass(engine, text, folder, tensor_parallel, recorded, say)
            raw = np.array(found["figures"], np.float64)
            nll_reference = np.array(first_pass["figures"], np.float64)[..., 0]
            sizes = (found["weights_loaded_bytes"], found["kv_bytes_per_token"])
            results.append(Comparison(nll_reference, raw[..., 0], raw[..., 1], raw[..., 2], *sizes))
    return results


def _pass(
    engine: Engine, text: Text, folder: Path, tensor_parallel: int, against: str, say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """What `engine_pass` returns, and the name under which its distributions can be compared with. `against`: that of
    the reference; "" records one."""
    spec: dict[str, Any] = {
        "checkpoint": str(engine.checkpoint),
        "kv_cache_dtype": engine.kv_cache_dtype,
        "tensor_parallel": tensor_parallel,
        "windows": text.windows,
        "record": not against,
    }
    identity = [spec, against, open_checkpoint(engine.checkpoint).fingerprint]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    out_file = folder / f"{name}.json"
    if not out_file.exists():
        say(f"{engine.checkpoint} with kv_cache_dtype {engine.kv_cache_dtype}")
        spec["tap_file"] = str(folder / f"{against or name}.f32")
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "ops.compress.engine_pass", str(spec_file), str(out_file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise RuntimeError(f"the engine for {engine.checkpoint} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(out_file.read_text())
    return found, name


def _interval(statistic: Callable[[Figures], Figures], per_window: Figures, picks: npt.NDArray[np.int64]) -> Interval:
    """`statistic` maps means over positions and windows to the figure; resampled over windows."""
    spread = statistic(per_window[picks].mean(axis=1))
    low, high = np.quantile(spread, (0.025, 0.975))
    return Interval(float(statistic(per_window.mean(keepdims=True))[0]), float(low), float(high))


def measure(comparison: Comparison, first: int = 0, last: int | None = None, resamples: int = RESAMPLES) -> Measures:
    """The measures over positions `first` .. `last` of every window, with 95 % intervals. The same seed everywhere."""

    def windows(figures: Figures) -> Figures:
        means: Figures = figures[:, first:last].mean(axis=1)
        return means

    count = len(comparison.nll)
    picks = np.random.default_rng(SEED).integers(0, count, (resamples, count))

    def same(value: Figures) -> Figures:
        return value

    return Measures(
        positions=int(comparison.nll[:, first:last].size),
        kl=_interval(same, windows(comparison.kl), picks),
        flips=_interval(same, windows(comparison.flips), picks),
        ppl_reference=_interval(np.exp, windows(comparison.nll_reference), picks),
        ppl=_interval(np.exp, windows(comparison.nll), picks),
        ppl_ratio=_interval(np.exp, windows(comparison.nll - comparison.nll_reference), picks),
    )


def buckets(comparison: Comparison) -> tuple[Bucket, ...]:
    """The measures by position: a defect that grows with context shows here first."""
    total, first, found = comparison.nll.shape[1], 0, []
    for end in BUCKET_ENDS:
        last = min(end, total)
        if first < last:
            found.append(Bucket(first, last, measure(comparison, first, last)))
        first = last
    return tuple(found)


def verdict_of(comparison: Comparison, reference: Engine, candidate: Engine, text: Text) -> Verdict:
    """Measured, not yet judged: see `quality.judge`."""
    return Verdict(
        state=State.MEASURED,
        reason="",
        measures=measure(comparison),
        by_position=buckets(comparison),
        kv_cache_dtype=candidate.kv_cache_dtype,
        reference=f"{open_checkpoint(reference.checkpoint).fingerprint} kv_cache_dtype {reference.kv_cache_dtype}",
        text_sha256=text.sha256,
    )
