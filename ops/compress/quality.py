"""What is known about a checkpoint's quality, as one small file inside it: `quality.json`.

A compressed checkpoint is unjudged until its distributions were compared with the original's on a text. The file
names the bytes it speaks of; when they change, it speaks of nothing. Standard library only, so that whoever starts a
service can read it at no cost.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

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


# Bound -> the figure it limits. The upper end of its interval must hold, not just the mean.
BOUNDS = {"max_kl": "kl", "max_flips": "flips", "max_ppl": "ppl", "max_ppl_ratio": "ppl_ratio"}


def parse_bounds(texts: Iterable[str]) -> dict[str, float]:
    """`["max_kl=0.05", "max_flips=0.1,max_ppl_ratio=1.02"]` to a mapping. ValueError names what cannot be read."""
    bounds: dict[str, float] = {}
    for item in (part for text in texts for part in text.split(",") if part):
        name, _, value = item.partition("=")
        if name not in BOUNDS:
            raise ValueError(f"--require {item}: no bound {name!r}; known: {', '.join(BOUNDS)}")
        try:
            bounds[name] = float(value)
        except ValueError:
            raise ValueError(f"--require {item}: {value!r} is not a number; write {name}=0.05") from None
    return bounds


def unmet_bounds(measures: Measures, bounds: dict[str, float]) -> tuple[str, ...]:
    """One line for each bound that the interval's upper end exceeds (NaN exceeds everything)."""
    lines = []
    for name, limit in bounds.items():
        found: Interval = getattr(measures, BOUNDS[name])
        if not found.high <= limit:
            lines.append(f"{name}={limit:g}: {found.mean:.4g}, interval {found.low:.4g} to {found.high:.4g}")
    return tuple(lines)


def judge(verdict: Verdict, bounds: dict[str, float]) -> Verdict:
    """The same measures under (new) bounds. An unjudged checkpoint stays unjudged."""
    if verdict.measures is None:
        return verdict
    unmet = unmet_bounds(verdict.measures, bounds)
    if not bounds:
        state, reason = State.MEASURED, "compared with its original; no bounds were given, so it is not called good"
    elif unmet:
        state, reason = State.REJECTED, "; ".join(unmet)
    else:
        state, reason = State.ACCEPTED, "every bound holds at the upper end of its interval"
    changed = {"state": state, "reason": reason, "bounds": dict(bounds), "unmet": unmet}
    return Verdict(**{**{name: getattr(verdict, name) for name in verdict.__dataclass_fields__}, **changed})


def content_sha256(checkpoint: Path) -> str:
    """Names a checkpoint's bytes by its config, index and the sizes of its files; reads no weights."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    index = checkpoint / "model.safetensors.index.json"
    digest.update(index.read_bytes() if index.exists() else b"")
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()


def verdict_json(verdict: Verdict, checkpoint_sha256: str) -> bytes:
    body = {"version": VERSION, "checkpoint_sha256": checkpoint_sha256, **asdict(verdict)}
    return (json.dumps(body, indent=1) + "\n").encode()


def store_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Writes quality.json for the checkpoint's bytes as they are now, whole or not at all."""
    partial = checkpoint / f".{FILE_NAME}.part"
    with partial.open("wb") as file:
        file.write(verdict_json(verdict, content_sha256(checkpoint)))
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, checkpoint / FILE_NAME)


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
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error!r}); run `pageferry compress --evaluate` again") from error
    if verdict.state is not State.UNJUDGED and raw["checkpoint_sha256"] != content_sha256(checkpoint):
        return Verdict(State.UNJUDGED, f"{file} speaks of other bytes: the checkpoint was changed after it was judged")
    return verdict


UNJUDGED = Verdict(State.UNJUDGED, "not yet compared with its original: run `pageferry compress --evaluate TEXT`")
UNJUDGED_FILES = {FILE_NAME: verdict_json(UNJUDGED, "")}
