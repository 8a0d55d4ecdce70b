"""What is known about a checkpoint's quality: `quality.json` inside it, and what a service makes of that at its start.

A compressed checkpoint is unjudged until `pageferry compress --evaluate` has compared its distributions with the
original's on a text. The file names the bytes it speaks of; when they change, it speaks of nothing. Standard library
only, so that a service that starts can read it at no cost.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from cluster.spec import ClusterSpec, PoolSpec

logger = logging.getLogger("pageferry.quality")

FILE_NAME = "quality.json"
VERSION = 1


class State(StrEnum):
    ORIGINAL = "original"  # not quantised: nothing to judge
    UNJUDGED = "unjudged"  # never compared with its original
    MEASURED = "measured"  # compared, no bounds were given
    ACCEPTED = "accepted"  # compared, every bound holds
    REJECTED = "rejected"  # compared, some bound does not hold


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Measures:
    """Candidate against reference, teacher-forced on one text, over `positions` predicted tokens.

    `kl`: mean KL(reference || candidate), nats. `flips`: share of positions whose most likely token differs.
    `ppl_reference`, `ppl`: perplexities. `ppl_ratio`: ppl / ppl_reference, paired. All over the same positions.
    """

    positions: int
    kl: Interval
    flips: Interval
    ppl_reference: Interval
    ppl: Interval
    ppl_ratio: Interval


@dataclass(frozen=True)
class Bucket:
    """The measures of positions `first` .. `last` (exclusive) of the windows."""

    first: int
    last: int
    measures: Measures


@dataclass(frozen=True)
class Verdict:
    """`reason` says in words why the state is what it is. `measures` is None unless the pair was compared;
    `kv_cache_dtype` is the candidate's in that comparison."""

    state: State
    reason: str
    measures: Measures | None = None
    by_position: tuple[Bucket, ...] = ()
    kv_cache_dtype: str = "auto"
    reference: str = ""
    text_sha256: str = ""
    bounds: dict[str, float] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """True only when there is nothing to judge, or it was judged and every bound holds."""
        return self.state in (State.ORIGINAL, State.ACCEPTED)


def content_sha256(checkpoint: Path) -> str:
    """Names a checkpoint's bytes by its config, index and the sizes of its files; reads no weights."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    index = checkpoint / "model.safetensors.index.json"
    digest.update(index.read_bytes() if index.exists() else b"")
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()


def _interval(raw: dict[str, Any]) -> Interval:
    return Interval(float(raw["mean"]), float(raw["low"]), float(raw["high"]))


def _measures(raw: dict[str, Any]) -> Measures:
    names = ("kl", "flips", "ppl_reference", "ppl", "ppl_ratio")
    return Measures(int(raw["positions"]), *(_interval(raw[name]) for name in names))


def read_verdict(checkpoint: Path) -> Verdict:
    """The verdict on the checkpoint folder as it is now. ValueError when quality.json cannot be read."""
    file = checkpoint / FILE_NAME
    config = json.loads((checkpoint / "config.json").read_text())
    text_config = config.get("text_config") or {}
    quantised = config.get("quantization_config") or text_config.get("quantization_config")
    if not file.exists():
        if not quantised or quantised.get("quant_method") == "fp8":
            return Verdict(State.ORIGINAL, "not made by compressing another checkpoint here")
        return Verdict(State.UNJUDGED, f"{checkpoint} is quantised and has no {FILE_NAME}")
    try:
        raw = json.loads(file.read_text())
        measures = _measures(raw["measures"]) if raw["measures"] else None
        verdict = Verdict(
            State(raw["state"]), raw["reason"], measures,
            tuple(Bucket(b["first"], b["last"], _measures(b["measures"])) for b in raw["by_position"]),
            raw["kv_cache_dtype"], raw["reference"], raw["text_sha256"], raw["bounds"], tuple(raw["unmet"]),
        )  # fmt: skip
        same = verdict.state is State.UNJUDGED or raw["checkpoint_sha256"] == content_sha256(checkpoint)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error!r}); run `pageferry compress --evaluate` again") from error
    if not same:
        return Verdict(State.UNJUDGED, f"{file} speaks of other bytes: the checkpoint was changed after it was judged")
    return verdict


class PoorQuality(ValueError):
    """A pool's checkpoint that must not serve as things stand; says why, and the ways out."""


def check_quality(spec: ClusterSpec, pool: str) -> str:
    """What a service says at its start about the checkpoint of `pool` ("prefill" or "decode"); "" if nothing.

    A verdict is looked for in what may be compressed: a pool's own `weights`, and `model.path` when it holds
    the file. (A model that its makers published quantised is its own original.) Raises `PoorQuality` by the pool's
    `weights_quality`: "check" refuses a checkpoint that was found bad or whose file cannot be read, "require" also one
    without a verdict or bounds, "ignore" none. A checkpoint that is not a folder on this machine is not
    judged here; its replicas look again where they run.
    """
    settings: PoolSpec = getattr(spec.pools, pool)
    folder = Path(settings.weights or spec.model.path)
    if not (folder / "config.json").is_file() or not (settings.weights or (folder / FILE_NAME).is_file()):
        return ""
    name = f"pools.{pool}: {folder}"
    options = f"--evaluate TEXT --kv-cache-dtype {_kv(settings)} --require max_kl=..."
    again = f"run `pageferry compress SRC {folder} {options}`"
    try:
        verdict = read_verdict(folder)
    except ValueError as error:
        if settings.weights_quality == "ignore":
            return f"{name}: {error}"
        raise PoorQuality(f"{name}: {error}, or set pools.{pool}.weights_quality: ignore") from None
    if verdict.state is State.REJECTED and settings.weights_quality != "ignore":
        raise PoorQuality(
            f"{name} was found bad: {verdict.reason}. Serve another checkpoint (pools.{pool}.weights; a calibrated "
            "one: --method gptq or awq), judge it by other bounds (`pageferry compress SRC DST --require ...`), or "
            f"set pools.{pool}.weights_quality: ignore"
        )
    if not verdict.good and settings.weights_quality == "require":
        raise PoorQuality(
            f"{name} is {verdict.state.value}: {verdict.reason}; pools.{pool}.weights_quality is require, so {again}, "
            "or set it to check"
        )
    return _remark(name, verdict, settings, again)


def _kv(settings: PoolSpec) -> str:
    return "fp8" if settings.kv_dtype == "fp8_e4m3" else "auto"


def _remark(name: str, verdict: Verdict, settings: PoolSpec, again: str) -> str:
    """What is worth knowing although it is served."""
    if verdict.state is State.UNJUDGED:
        return f"{name} has not been compared with its original ({verdict.reason}); its answers may be poor: {again}"
    if verdict.measures is None:
        return ""
    kl, flips = verdict.measures.kl, verdict.measures.flips
    seen = f"KL {kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}] nats, {flips.mean:.1%} of top-1 tokens differ"
    other = (
        ""
        if _kv(settings) == _kv_judged(verdict)
        else (f"; judged with kv_cache_dtype {verdict.kv_cache_dtype}, this pool keeps {settings.kv_dtype}")
    )
    if verdict.state is State.ACCEPTED and not other:
        return ""
    return f"{name} is {verdict.state.value}: {seen}{other}: {again}"


def _kv_judged(verdict: Verdict) -> str:
    return "fp8" if verdict.kv_cache_dtype.startswith("fp8") else "auto"


def refuse_poor_quality(spec: ClusterSpec, *pools: str) -> None:
    """`check_quality` of each of these pools that may have replicas (default: both); remarks go to the log."""
    for pool in pools or ("prefill", "decode"):
        settings: PoolSpec = getattr(spec.pools, pool)
        if settings.bounds[1] and (remark := check_quality(spec, pool)):
            logger.warning("%s", remark)
