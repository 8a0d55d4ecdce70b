"""`pageferry bench`: paired benchmarks of the service, each behind a correctness gate.

Without a switch: plain `vllm serve`, Ray's `ray.serve.llm` prefill/decode app and this service, one after another, in
rounds. `--overhead`: what a hand-over adds to the time to first token. `--ferry`: pages alone, against memory copying.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
SYSTEMS = ("vllm-fp8", "vllm-bf16", "vllm-fp8-2threads", "ray-pd", "ray-pd-fp8", "pageferry")
DEFAULT_SYSTEMS = ("vllm-fp8", "ray-pd", "pageferry")


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make.add_argument("config", nargs="?", default="local-cpu", help="topology file, or a shipped one by name")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as pools.decode.max_num_seqs=16")
    kind = make.add_mutually_exclusive_group()
    kind.add_argument("--overhead", action="store_true", help="time to first token with a hand-over against one engine")
    kind.add_argument("--ferry", action="store_true", help="seal + move + open against memory copying; no engine")
    make.add_argument("--quick", action="store_true", help="fewer rounds and sizes: a look, not a figure to quote")
    make.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    make.add_argument("--out", type=Path, default=RESULTS, help="folder for .json, .md and .png; default: ops/results")
    make.add_argument("--port", type=int, default=8810, help="first of the HTTP ports that are used")
    make.add_argument("--seed", type=int, default=1, help="of prompts and bootstrap")
    make.add_argument("--threads", type=int, default=1, help="OpenMP threads an engine")
    load = make.add_argument_group("systems")
    load.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help=f"of {', '.join(SYSTEMS)}; first: baseline")
    load.add_argument("--concurrency", default=None, help="default: 1,4,8,16 (1,8 with --quick)")
    load.add_argument("--rounds", type=int, default=None, help="default: 3 (1 with --quick)")
    load.add_argument("--prompt-tokens", type=int, default=None, help="default: 256; 1000 with --overhead")
    load.add_argument("--output-tokens", type=int, default=32)
    load.add_argument("--requests-a-slot", type=int, default=2, help="requests a wave for each one that runs at once")
    load.add_argument("--pairs", type=int, default=None, help="with --overhead; default: 30 (10 with --quick)")
    pages = make.add_argument_group("ferry")
    pages.add_argument("--pages", default=None, help="page counts; default: 1,4,16,64,256,1024")
    pages.add_argument("--memory-gib", type=float, default=2.5, help="for caches and staging of one layout")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        if args.ferry:
            return _ferry(args, argv)
        spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
        return _overhead(args, argv, spec) if args.overhead else _systems(args, argv, spec)
    except (SpecError, ValueError, RuntimeError) as error:
        print(f"pageferry bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
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
    args.out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(plain(report), indent=1)
    (args.out / f"{name}.json").write_text(written + "\n")
    heading = f"# `{report['facts']['command']}`\n\n{facts.one_line(report['facts'])}\n"
    (args.out / f"{name}.md").write_text(f"{heading}\n{text}\n")
    if args.json:
        print_json(plain(report))
    else:
        print(text)
    say(f"written: {args.out / name}.json, .md, .png")
    return Path(args.out / f"{name}.png")


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


def _choose(args: argparse.Namespace, spec: ClusterSpec, names: Sequence[str]) -> list[Any]:
    from ops.bench import systems

    chosen = []
    for index, name in enumerate(names):
        port = args.port + index
        match name:
            case "vllm-fp8":
                chosen.append(systems.plain_vllm(spec, port, "fp8_e4m3", args.threads))
            case "vllm-bf16":
                chosen.append(systems.plain_vllm(spec, port, "bfloat16", args.threads))
            case "vllm-fp8-2threads":
                chosen.append(systems.plain_vllm(spec, port, "fp8_e4m3", 2))
            case "ray-pd":
                chosen.append(systems.ray_llm(spec, port, "bfloat16", args.threads))
            case "ray-pd-fp8":
                chosen.append(systems.ray_llm(spec, port, "fp8_e4m3", args.threads))
            case "pageferry":
                chosen.append(systems.ours(spec, args.config, args.overrides, port, args.threads))
            case _:
                raise ValueError(f"--systems has {name!r}; there are {', '.join(SYSTEMS)}")
    return chosen


def _systems(args: argparse.Namespace, argv: list[str], spec: ClusterSpec) -> int:
    from ops.bench import compare, figures, picture

    report: dict[str, Any] = {"facts": facts.gather(argv)}
    default = (1, 8) if args.quick else (1, 4, 8, 16)
    plan = compare.Plan(
        rounds=args.rounds or (1 if args.quick else 3),
        concurrencies=numbers("concurrency", args.concurrency, default),
        prompt_tokens=args.prompt_tokens or 256,
        output_tokens=args.output_tokens,
        requests_min=3 * args.requests_a_slot,
        requests_per_slot=args.requests_a_slot,
        seed=args.seed,
    )
    chosen = _choose(args, spec, args.systems.split(","))
    titles = {system.name: system.title for system in chosen}
    say(f"{plan.rounds} rounds of {', '.join(titles.values())}; one at a time, started anew in every round")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pfb-logs-") as folder:
        visits = asyncio.run(compare.run(chosen, plan, _tokenizer(spec), say, Path(folder)))
    if found := compare.breaches(visits):
        return refuse(found)
    report |= {"plan": plan, "gate": "green", "titles": titles, "seconds": time.monotonic() - began}
    report["visits"] = compare.as_dict(visits)
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "systems-raw.json"  # a quarter of an hour's work is not lost if what follows fails
    raw.write_text(json.dumps(plain(report)))
    made = figures.build(visits, list(titles), plan.concurrencies)
    report |= made
    words = (
        f"Prompts of {plan.prompt_tokens} tokens, {plan.output_tokens} output tokens, greedy, {plan.rounds} rounds; "
        f"gate green ({sum(len(v.gate) for v in visits) * compare.GATE_PROMPTS} repeated answers equal, usage exact)."
    )
    path = deliver(args, "systems", report, f"{words}\n\n{figures.table(made, titles)}")
    picture.systems(made, titles, f"{report['facts']['command']}\n{facts.one_line(report['facts'])}", path)
    raw.unlink()
    return 0


def _overhead(args: argparse.Namespace, argv: list[str], spec: ClusterSpec) -> int:
    from ops.bench import overhead, picture, steps

    report: dict[str, Any] = {"facts": facts.gather(argv)}
    plan = overhead.Plan(
        pairs=args.pairs or (10 if args.quick else 30), prompt_tokens=args.prompt_tokens or 1000, seed=args.seed
    )
    chosen = _choose(args, spec, ["vllm-fp8", "vllm-bf16", "pageferry"])
    with tempfile.TemporaryDirectory(prefix="pfb-logs-") as folder:
        made = asyncio.run(overhead.run(chosen, plan, _tokenizer(spec), say, Path(folder)))
    if made.breaches:
        return refuse(made.breaches)
    report |= {"plan": plan, "gate": "green", **overhead.build(made)}
    bare = asyncio.run(steps.measure(spec, _tokenizer(spec), plan.prompt_tokens, plan.pairs, args.seed, say))
    report["engine_pair"] = bare
    path = deliver(args, "overhead", report, f"{overhead.table(report)}\n\n{steps.table(bare)}")
    caption = f"{report['facts']['command']}\n{facts.one_line(report['facts'])}"
    picture.phases([(row["phase"], row["mean_s"]) for row in report["phases"]], caption, path)
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
