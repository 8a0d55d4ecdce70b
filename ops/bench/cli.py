"""`pageferry bench PLAN`: arms that differ in one named change, in paired rounds, each behind a correctness gate.

PLAN is a YAML file or a shipped plan by name. `--overhead`: what a hand-over adds to the time to first token, phase by
phase. `--ferry`: pages alone, against memory copying.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.json_output import run as run_json
from cluster.spec import ClusterSpec, SpecError, parse_overrides
from ops.bench import facts

RESULTS = facts.ROOT / "ops" / "results"


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make.add_argument(
        "plan", nargs="?", help=f"a plan file, or one of {', '.join(shipped())}; with --overhead a topology"
    )
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all arms: pools.decode.max_num_seqs=16")
    kind = make.add_mutually_exclusive_group()
    kind.add_argument("--overhead", action="store_true", help="time to first token with a hand-over against one engine")
    kind.add_argument("--ferry", action="store_true", help="seal + move + open against memory copying; no engine")
    make.add_argument("--quick", action="store_true", help="fewer rounds and requests: a look, not a figure to quote")
    make.add_argument("--rounds", type=int, help="instead of the plan's")
    make.add_argument("--minutes", type=float, help="no new round after this long; what was measured is reported")
    make.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    make.add_argument("--out", type=Path, help="folder for results; default: ops/results, for plans its bench/")
    make.add_argument("--port", type=int, default=8810, help="first of the HTTP ports that are used")
    make.add_argument("--seed", type=int, default=1, help="of prompts and bootstrap of --overhead")
    make.add_argument("--threads", type=int, default=1, help="OpenMP threads an engine of --overhead")
    load = make.add_argument_group("overhead")
    load.add_argument("--prompt-tokens", type=int, default=1000)
    load.add_argument("--before", type=Path, help="an earlier overhead.json, whose phases are drawn beside these")
    load.add_argument("--pairs", type=int, default=None, help="default: 30 (10 with --quick)")
    pages = make.add_argument_group("ferry")
    pages.add_argument("--pages", default=None, help="page counts; default: 1,4,16,64,256,1024")
    pages.add_argument("--memory-gib", type=float, default=2.5, help="for caches and staging of one layout")
    return make


def shipped() -> list[str]:
    return sorted(file.stem for file in (Path(__file__).parent / "plans").glob("*.yaml"))


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        if args.ferry:
            return _ferry(args, argv)
        if args.overhead:
            config = args.plan or "local-cpu"
            return _overhead(args, argv, config, ClusterSpec.load(config, parse_overrides(args.overrides)))
        if not args.plan:
            raise ValueError(f"name a plan: a YAML file, or one of {', '.join(shipped())}")
        return _plan(args, argv)
    except (SpecError, ValueError, RuntimeError) as error:
        print(f"pageferry bench: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("pageferry bench: interrupted; what was started has been ended", file=sys.stderr)
        return 130


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def numbers(name: str, text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    if text is None:
        return tuple(default)
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} is {text!r}, must be whole numbers with commas, such as 1,4,8") from None
    if not found or min(found) < 1:
        raise ValueError(f"--{name} is {text!r}, must be numbers >= 1")
    return found


def plain(value: Any) -> Any:
    """JSON-ready: dataclasses become mappings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {key: plain(part) for key, part in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def deliver(args: argparse.Namespace, name: str, report: dict[str, Any], text: str) -> Path:
    """Prints the report and writes `name.json` and `name.md`; returns where the picture goes."""
    name = f"{name}-quick" if args.quick else name
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(plain(report), indent=1)
    (out / f"{name}.json").write_text(written + "\n")
    heading = f"# `{report['facts']['command']}`\n\n{facts.one_line(report['facts'])}\n"
    (out / f"{name}.md").write_text(f"{heading}\n{text}\n\n![{name}]({name}.png)\n")
    if args.json:
        print_json(plain(report))
    else:
        print(text)
    say(f"written: {out / name}.json, .md, .png")
    return out / f"{name}.png"


def refuse(found: Sequence[str]) -> int:
    """The gate is red: every breach, and no speed."""
    print("pageferry bench: the correctness gate is red, so no speed is shown:", file=sys.stderr)
    for breach in found[:40]:
        print(f"  {breach}", file=sys.stderr)
    if len(found) > 40:
        print(f"  ... and {len(found) - 40} more", file=sys.stderr)
    return 1


def _tokenizer(spec: ClusterSpec) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(spec.model.tokenizer or spec.model.path)


def _plan(args: argparse.Namespace, argv: list[str]) -> int:
    """Runs a plan and writes its raw requests as one results file, also when the gate is red."""
    from ops.bench import arms, plan, report, rounds
    from ops.bench.drive import vocabulary

    made = plan.read(args.plan, small=args.quick)
    made = made.model_copy(update={"set": (*made.set, *args.overrides), "rounds": args.rounds or made.rounds})
    specs = [arms.build(made, name, args.port + index) for index, name in enumerate(made.names)]
    base = ClusterSpec.load(made.config, parse_overrides(list(made.set)))
    words = vocabulary(_tokenizer(base))
    say(f"{made.name}: {made.rounds} rounds of {', '.join(made.names)}")
    known, until = facts.gather(argv), time.monotonic() + 60 * (args.minutes or math.inf)
    out = args.out or report.STORE
    out.mkdir(parents=True, exist_ok=True)
    name = f"{made.name}-quick" if args.quick else made.name
    file = out / f"{name}-{known['commit'] or 'unknown'}.json"
    tree: dict[str, Any] = {}

    def keep(visits: list[rounds.Visit]) -> None:
        tree.update(report.results(made, known, specs, visits, words, base.model.path))
        file.write_text(json.dumps(tree) + "\n")

    with tempfile.TemporaryDirectory(prefix="pfb-logs-") as folder:
        asyncio.run(rounds.run(made, specs, words, say, Path(folder), until, keep))
    if tree["breaches"]:
        return refuse(tree["breaches"])
    print_json(tree) if args.json else print(report.markdown([tree]))
    say(f"written: {file}; `pageferry report {file} --out PAGE` makes a page of it")
    return 0


def _overhead(args: argparse.Namespace, argv: list[str], config: str, spec: ClusterSpec) -> int:
    from ops.bench import overhead, picture, steps, systems

    report: dict[str, Any] = {"facts": facts.gather(argv)}
    plan = overhead.Plan(
        pairs=args.pairs or (10 if args.quick else 30), prompt_tokens=args.prompt_tokens, seed=args.seed
    )
    chosen = [
        systems.plain_vllm(spec, args.port, "fp8_e4m3", args.threads),
        systems.plain_vllm(spec, args.port + 1, "bfloat16", args.threads),
        systems.ours(
            spec, config, ["admission.local_prefill_max_tokens=0", *args.overrides], args.port + 2, args.threads
        ),
    ]
    with tempfile.TemporaryDirectory(prefix="pfb-logs-") as folder:
        made = asyncio.run(overhead.run(chosen, plan, _tokenizer(spec), say, Path(folder)))
    if made.breaches:
        return refuse(made.breaches)
    report |= {"plan": plan, "gate": "green", **overhead.build(made)}
    bare = asyncio.run(steps.measure(spec, _tokenizer(spec), plan.prompt_tokens, plan.pairs, args.seed, say))
    report["engine_pair"] = bare
    path = deliver(args, "overhead", report, f"{overhead.table(report)}\n\n{steps.table(bare)}")
    caption = f"{report['facts']['command']}\n{facts.one_line(report['facts'])}"
    before = json.loads(args.before.read_text())["phases"] if args.before else []
    picture.phases(report["phases"], before, caption, path)
    return 0


def _ferry(args: argparse.Namespace, argv: list[str]) -> int:
    from ops.bench import ferry, picture

    report: dict[str, Any] = {"facts": facts.gather(argv)}
    default = (1, 16, 64) if args.quick else ferry.PAGE_COUNTS
    memory = int((min(args.memory_gib, 1.0) if args.quick else args.memory_gib) * (1 << 30))
    report |= ferry.measure(numbers("pages", args.pages, default), memory, say)
    path = deliver(args, "ferry", report, ferry.table(report))
    picture.ferry(report, f"{report['facts']['command']}\n{facts.one_line(report['facts'])}", path)
    return 0


if __name__ == "__main__":
    sys.exit(run_json(main, sys.argv[1:]))
