"""`pageferry compress --bench-quality SRC TEXT`: what INT4 and FP8 KV do to one model, side by side.

Makes the checkpoints (rounding symmetric and asymmetric, GPTQ and AWQ where llm-compressor is given), then reads the
second half of TEXT with every one of them, with BF16 and FP8 KV, against the BF16 original. Calibration sees the first
half only.

Each checkpoint and each engine's reading is a piece. With `--keep DIR` finished pieces stay in DIR and the same command
goes on behind them, so that a long comparison can be run in portions (`--minutes`) or after a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.quality import Interval, Measures
from ops.compress.bench import hardware_line
from ops.compress.evaluate import Comparison, Engine, Text, compare, measure, read_text
from ops.compress.source import open_checkpoint

KV_DTYPES = ("auto", "fp8")
EXIT_UNFINISHED = 75
ORIGINAL = "BF16 weights"


@dataclass(frozen=True)
class Row:
    """One form: its sizes in bytes, and how it differs from BF16 weights with BF16 KV."""

    weights: str
    kv: str
    disk_bytes: int
    weights_loaded_bytes: int
    kv_bytes_per_token: float
    measures: Measures


class OutOfTime(Exception):
    """`--minutes` are over; what is finished stays in `--keep`."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pageferry compress --bench-quality", description=(__doc__ or "").split("\n")[0])
    top.add_argument("source", type=Path, metavar="SRC")
    top.add_argument("text", type=Path, metavar="TEXT")
    top.add_argument("--group-size", type=int, default=64)
    top.add_argument("--tokens", type=int, default=8192, help="of the second half of TEXT (8192)")
    top.add_argument("--window", type=int, default=512)
    top.add_argument("--samples", type=int, default=64, help="calibration windows of the first half (64)")
    top.add_argument("--calibrator-site", type=Path, default=None)
    top.add_argument("--scratch", type=Path, default=None, help="for the checkpoints; deleted afterwards")
    top.add_argument("--keep", type=Path, default=None, metavar="DIR", help="instead: a folder to go on from")
    minutes = f"start no piece after so many; exit {EXIT_UNFINISHED} if some are left (needs --keep)"
    top.add_argument("--minutes", type=float, default=0.0, metavar="M", help=minutes)
    top.add_argument("--picture", type=Path, default=None, metavar="FILE.png")
    top.add_argument("--json", action="store_true")
    return top


def _variants(args: argparse.Namespace, calibration: Path) -> dict[str, list[str]]:
    group = str(args.group_size)
    small = str(max(32, args.group_size // 2))
    variants = {
        f"INT4 RTN g{group}, no clipping search": ["--group-size", group, "--clip", "1"],
        f"INT4 RTN g{group}": ["--group-size", group],
        f"INT4 RTN g{small} asymmetric": ["--group-size", small, "--asymmetric"],
    }
    if args.calibrator_site:
        extra = ["--calibrate", str(calibration), "--samples", str(args.samples)]
        extra += ["--calibrator-site", str(args.calibrator_site), "--group-size", group]
        variants[f"INT4 GPTQ g{group}"] = ["--method", "gptq", *extra]
        variants[f"INT4 AWQ g{group}"] = ["--method", "awq", *extra]
    return variants


@contextlib.contextmanager
def _workplace(args: argparse.Namespace) -> Iterator[Path]:
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        yield args.keep
        return
    with tempfile.TemporaryDirectory(prefix="compress-quality-", dir=args.scratch) as folder:
        yield Path(folder)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Pieces:
    """Says when to stop. The first piece is always allowed, so that every call gets on."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + minutes * 60 if minutes else float("inf")
        self._begun = 0

    def begin(self, what: str) -> None:
        if self._begun and time.monotonic() >= self._until:
            raise OutOfTime(f"stopped before: {what}")
        self._begun += 1


def _checkpoints(args: argparse.Namespace, place: Path, calibration: Path, pieces: _Pieces) -> dict[str, Path]:
    """Every form by its name, made unless an earlier call did. RuntimeError when one cannot be made."""
    from ops.compress.cli import main as compress_main

    made: dict[str, Path] = {ORIGINAL: args.source}
    for name, options in _variants(args, calibration).items():
        made[name] = place / "".join(letter if letter.isalnum() else "-" for letter in name)
        if not made[name].exists():
            pieces.begin(name)
            _say(f"making {name}")
            with contextlib.redirect_stdout(sys.stderr):
                status = compress_main([str(args.source), str(made[name]), *options])
            if status:
                raise RuntimeError(f"{name} could not be made: pageferry compress ended with {status}")
    return made


def _read(
    source: Path, made: dict[str, Path], text: Text, place: Path, pieces: _Pieces
) -> Iterator[tuple[str, Engine, Comparison]]:
    passes = place / "passes"
    for kv in KV_DTYPES:
        for name, path in made.items():
            engine = Engine(path, kv)
            pieces.begin(f"{name}, KV {kv}")
            (comparison,) = compare(Engine(source), [engine], text, place, say=_say, keep=passes)
            yield name, engine, comparison


def _windows(args: argparse.Namespace, place: Path, half: str) -> Text:
    """The judging half as token ids; cutting megabytes of text takes as long as an engine's start, so it is kept."""
    sha256 = hashlib.sha256(half.encode()).hexdigest()
    file = place / f"windows-{sha256[:16]}-{args.tokens}-{args.window}.json"
    if not file.exists():
        text = read_text(place / "judge.txt", args.source, args.tokens, args.window)
        file.write_text(json.dumps(text.windows))
    return Text(tuple(tuple(window) for window in json.loads(file.read_text())), sha256)


def _line(row: Row) -> str:
    def cell(interval: Interval, digits: int) -> str:
        return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"

    m = row.measures
    cells = [cell(m.kl, 4), cell(m.flips, 3), cell(m.ppl, 2), cell(m.ppl_ratio, 4)]
    sizes = f"{row.disk_bytes / 2**20:.1f} | {row.weights_loaded_bytes / 2**20:.1f} | {row.kv_bytes_per_token:,.0f}"
    return f"| {row.weights} | {row.kv} | {sizes} | {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    """Sizes and measures with 95 % intervals, one line a form."""
    heads = ("weights", "KV", "MiB on disk", "MiB loaded", "KV bytes a token", "KL, nats", "top-1 flips", "perplexity")
    lines = [f"| {' | '.join(heads)} | ratio |", "|---" * (len(heads) + 1) + "|"]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def draw(file: Path, rows: list[Row]) -> None:
    """KL and perplexity ratio of every form with its interval, beside what it weighs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    places = list(range(len(rows)))
    colors = ["#4c72b0" if row.kv == "BF16" else "#dd8452" for row in rows]
    panels = [("KL from BF16, nats", "kl"), ("perplexity / BF16's", "ppl_ratio")]
    for axis, (label, field) in zip(axes, panels, strict=False):
        found = [getattr(row.measures, field) for row in rows]
        for place, interval, color in zip(places, found, colors, strict=True):
            axis.plot([interval.low, interval.high], [place, place], color=color, linewidth=3, alpha=0.5)
            axis.plot(interval.mean, place, "o", color=color)
        axis.set_xlabel(f"{label} (95 % interval)")
        axis.grid(axis="x", alpha=0.3)
    axes[2].barh(places, [row.weights_loaded_bytes / 2**20 for row in rows], color=colors, height=0.6)
    axes[2].set_xlabel("MiB of weights in the engine")
    axes[0].set_yticks(places, [f"{row.weights}, KV {row.kv}" for row in rows])
    axes[0].invert_yaxis()
    figure.savefig(file, dpi=110, metadata={"Software": None})


def run(args: argparse.Namespace, place: Path, rows: list[Row]) -> Text:
    """Appends to `rows` as they come. OutOfTime when some are left for another call."""
    pieces = _Pieces(args.minutes)
    whole = args.text.read_text(encoding="utf-8")
    halves = {"calibrate.txt": whole[: len(whole) // 2], "judge.txt": whole[len(whole) // 2 :]}
    for name, half in halves.items():
        (place / name).write_text(half, encoding="utf-8")
    made = _checkpoints(args, place, place / "calibrate.txt", pieces)
    text = _windows(args, place, halves["judge.txt"])
    for name, engine, comparison in _read(args.source, made, text, place, pieces):
        kv = "BF16" if engine.kv_cache_dtype == "auto" else "FP8"
        sizes = (comparison.weights_loaded_bytes, comparison.kv_bytes_per_token)
        rows.append(Row(name, kv, open_checkpoint(engine.checkpoint).nbytes, *sizes, measure(comparison)))
    return text


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.minutes and args.keep is None:
        _say("pageferry compress --bench-quality: --minutes needs --keep DIR, or nothing would be left to go on from")
        return 2
    rows: list[Row] = []
    try:
        with _workplace(args) as place:
            text = run(args, place, rows)
    except OutOfTime as stop:
        if rows:
            print(table(rows))
        _say(f"pageferry compress --bench-quality: {stop}; the same command goes on from {args.keep}")
        return EXIT_UNFINISHED
    except (ValueError, FileNotFoundError) as error:
        _say(f"pageferry compress --bench-quality: {error}")
        return 2
    except (RuntimeError, OSError) as error:
        _say(f"pageferry compress --bench-quality: {error}")
        return 1
    windows = f"{len(text.windows)} windows of {args.window} tokens, 95 % intervals over windows"
    print(f"{hardware_line()}; {windows}; the reference is BF16 weights with BF16 KV (its first row: run again)")
    print(table(rows))
    if args.picture:
        draw(args.picture, rows)
    if args.json:
        tree: dict[str, Any] = {"hardware": hardware_line(), "rows": [asdict(row) for row in rows]}
        print_json(tree)
    return 0
