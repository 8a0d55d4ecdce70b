"""`pageferry compress --bench-quality SRC TEXT`: what INT4 and FP8 KV do to one model, side by side.

Makes the checkpoints (rounding symmetric and asymmetric, GPTQ and AWQ where llm-compressor is given), then reads the
second half of TEXT with every one of them, with BF16 and FP8 KV, against the BF16 original. Calibration sees the first
half only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from cluster.quality import Interval, Measures
from ops.compress.bench import hardware_line
from ops.compress.evaluate import Engine, compare, measure, read_text
from ops.compress.source import open_checkpoint

KV_DTYPES = ("auto", "fp8")


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


def _line(name: str, kv: str, gib: float, measures: Measures) -> str:
    def cell(interval: Interval, digits: int) -> str:
        return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"

    dtype = "BF16" if kv == "auto" else "FP8"
    cells = [cell(measures.kl, 4), cell(measures.flips, 3), cell(measures.ppl, 2), cell(measures.ppl_ratio, 4)]
    return f"| {name} | {dtype} | {gib:.3f} | {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    from ops.compress.cli import main as compress_main

    args = parser().parse_args(argv)
    halves = args.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="compress-quality-", dir=args.scratch) as folder:
        scratch = Path(folder)
        (scratch / "calibrate.txt").write_text(halves[: len(halves) // 2], encoding="utf-8")
        (scratch / "judge.txt").write_text(halves[len(halves) // 2 :], encoding="utf-8")
        made: dict[str, Path] = {"BF16 weights": args.source}
        for number, (name, options) in enumerate(_variants(args, scratch / "calibrate.txt").items()):
            made[name] = scratch / f"int4-{number}"
            status = compress_main([str(args.source), str(made[name]), "--json", *options])
            if status:
                return status
        text = read_text(scratch / "judge.txt", args.source, args.tokens, args.window)
        engines = [(name, Engine(path, kv)) for name, path in made.items() for kv in KV_DTYPES]

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        comparisons = compare(Engine(args.source), [engine for _, engine in engines], text, scratch, say=say)
        sizes = {path: open_checkpoint(path).nbytes / 2**30 for path in made.values()}
    measured = [measure(comparison) for comparison in comparisons]
    windows = f"{len(text.windows)} windows of {args.window} tokens, 95 % intervals over windows"
    print(f"{hardware_line()}; {windows}; the reference is BF16 weights with BF16 KV (its first row: run again)")
    print("| weights | KV | GiB on disk | KL, nats | top-1 flips | perplexity | ratio |\n|---|---|---|---|---|---|---|")
    for (name, engine), measures in zip(engines, measured, strict=True):
        print(_line(name, engine.kv_cache_dtype, sizes[engine.checkpoint], measures))
    if args.json:
        rows = [
            {"weights": name, "kv": engine.kv_cache_dtype, "gib": sizes[engine.checkpoint], **asdict(measures)}
            for (name, engine), measures in zip(engines, measured, strict=True)
        ]
        print(json.dumps({"hardware": hardware_line(), "rows": rows}))
    return 0
