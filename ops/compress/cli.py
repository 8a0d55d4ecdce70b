"""`pageferry compress SRC DST`: a BF16 or block-scaled FP8 checkpoint to INT4, checked and judged."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.quality import State, Verdict, read_verdict
from ops.compress.calibrated import METHODS, Calibration, check_calibrator, identity_of
from ops.compress.families import PACKABLE, choose, family_of
from ops.compress.plan import Action, Options, Plan, make_plan
from ops.compress.progress import ProgressBar
from ops.compress.quality import judge, parse_bounds, store_verdict
from ops.compress.run import MemoryExceeded, Resources, RunFigures, compress, default_workers
from ops.compress.source import Checkpoint, open_checkpoint

CALIBRATION_WINDOW = 512
EXIT_FAILED, EXIT_USAGE, EXIT_UNMET, EXIT_INTERRUPTED = 1, 2, 3, 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pageferry compress",
        description="Turn a BF16 or block-scaled FP8 checkpoint into group-quantised INT4 (compressed-tensors) that "
        "vLLM and transformers load as is. Run the same command again to go on after a kill.",
        epilog="Exit status: "
        "0 done, and every --require bound holds; 1 failed; 2 wrong usage; 3 a bound does not "
        "hold, or the result is unjudged and bounds were asked for; 130 interrupted",
    )
    top.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder (config.json and safetensors)")
    top.add_argument("destination", type=Path, metavar="DST", help="folder to make; appears only when whole")
    form = top.add_argument_group("what is packed")
    form.add_argument("--group-size", type=int, default=128, metavar="N", help="weights a scale (128)")
    form.add_argument("--asymmetric", action="store_true", help="a zero point for each group")
    form.add_argument(
        "--clip", type=int, default=5, metavar="N", help="clipping ratios tried, 1.0 downwards by 0.05 (5)"
    )
    form.add_argument("--pack", action="append", default=[], metavar="KIND", help=f"also pack: {', '.join(PACKABLE)}")
    form.add_argument("--keep", action="append", default=[], metavar="KIND", help="keep as it is; kinds as above")
    form.add_argument("--keep-match", action="append", default=[], metavar="REGEX", help="keep modules by name")
    form.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor parallelism that groups must fit; of evaluation (1)"
    )
    form.add_argument(
        "--shard-gib", type=float, default=0.0, metavar="GIB", help="size of an output file (1/16 of all)"
    )
    work = top.add_argument_group("how")
    work.add_argument(
        "--method", choices=METHODS, default="rtn", help="rtn: rounding with clipping search; else llm-compressor"
    )
    work.add_argument("--calibrate", type=Path, metavar="TEXT", help="for gptq and awq; not the text of --evaluate")
    work.add_argument("--samples", type=int, default=64, metavar="N", help="windows of 512 tokens to calibrate on (64)")
    work.add_argument("--calibrator-site", type=Path, metavar="DIR", help="pip --target folder of llm-compressor")
    work.add_argument("--workers", type=int, default=0, metavar="N", help="processes (one a core)")
    work.add_argument("--max-memory", type=float, default=4.0, metavar="GIB", help="of all processes together (4)")
    work.add_argument("--restart", action="store_true", help="throw an unfinished run's work away")
    work.add_argument("--dry-run", action="store_true", help="show what would be packed and stop")
    work.add_argument("--json", action="store_true", help="print figures as one JSON object")
    check = top.add_argument_group("is it right, is it good")
    check.add_argument("--verify", action="store_true", help="re-read the result and compare it with the source")
    check.add_argument("--evaluate", type=Path, metavar="TEXT", help="compare the pair's answers on this text")
    check.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="of the result when evaluated (auto)")
    check.add_argument("--tokens", type=int, default=8192, metavar="N", help="of TEXT to read (8192)")
    check.add_argument("--window", type=int, default=512, metavar="N", help="tokens a prompt (512)")
    check.add_argument("--require", action="append", default=[], metavar="BOUND=X",
                       help="max_kl, max_flips, max_ppl, max_ppl_ratio: exit 3 unless judged and within")  # fmt: skip
    return top


def _options(args: argparse.Namespace, calibration: str) -> Options:
    if args.clip < 1 or args.clip > 11:
        raise ValueError(f"--clip {args.clip}: from 1 (no search) to 11 (down to 0.5)")
    return Options(
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        clip_grid=tuple(round(1.0 - 0.05 * step, 2) for step in range(args.clip)),
        shard_bytes=int(args.shard_gib * 2**30),
        tensor_parallel=args.tp,
        method=args.method,
        calibration=calibration,
    )


def _calibration(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[str, Calibration | None]:
    """What --method needs beside the plan: its identity and its input."""
    if args.method == "rtn":
        return "", None
    if not args.calibrate:
        raise ValueError(f"--method {args.method} needs a text: --calibrate TEXT")
    if args.evaluate and args.evaluate.resolve() == args.calibrate.resolve():
        raise ValueError(f"{args.calibrate} cannot both calibrate and judge: give --evaluate another text")
    from ops.compress.evaluate import read_text

    check_calibrator(checkpoint, Calibration((), args.calibrator_site))
    text = read_text(args.calibrate, args.source, args.samples * CALIBRATION_WINDOW, CALIBRATION_WINDOW)
    return identity_of(text.windows, text.sha256), Calibration(text.windows, args.calibrator_site)


def plan_table(checkpoint: Checkpoint, plan: Plan) -> str:
    """What would become of each kind of module."""
    rows: dict[str, list[int]] = {}
    for task in plan.tasks:
        row = rows.setdefault(task.kind, [0, 0, 0, 0])
        row[0] += 1
        row[1] += task.action is Action.PACK
        row[2] += task.bytes_in
        row[3] += task.bytes_out
    family = family_of(checkpoint.model_type)
    lines = [f"{checkpoint.model_type}: family {family.name} ({family.reason})",
             f"{'kind':<18}{'tensors':>9}{'packed':>9}{'GiB before':>12}{'GiB after':>12}"]  # fmt: skip
    for kind, row in sorted(rows.items(), key=lambda item: -item[1][2]):
        lines.append(f"{kind:<18}{row[0]:>9}{row[1]:>9}{row[2] / 2**30:>12.3f}{row[3] / 2**30:>12.3f}")
    total = f"{plan.bytes_in / 2**30:>12.3f}{plan.bytes_out / 2**30:>12.3f}"
    return "\n".join([*lines, f"{'all':<18}{'':>18}{total}  in {len(plan.shards)} files"])


def caution(plan: Plan) -> str:
    """What readers of this form cannot do, "" for the default form."""
    experts = any(task.kind == "routed_experts" and task.action is Action.PACK for task in plan.tasks)
    if plan.options.symmetric or not experts:
        return ""
    return (
        "caution: asymmetric experts load only in vLLM's CUDA kernels (Marlin and Triton declare them); its CPU build "
        "and transformers 5.19 refuse them. Symmetric ones load in all three"
    )


def _made_from(destination: Path, checkpoint: Checkpoint) -> None:
    report = destination / "report.json"
    if not report.exists():
        raise ValueError(f"{destination} exists and was not made by this command; name another destination")
    if json.loads(report.read_text())["source"]["fingerprint"] != checkpoint.fingerprint:
        raise ValueError(f"{destination} was made from another checkpoint than {checkpoint.path} is now")


def _compress(
    args: argparse.Namespace, checkpoint: Checkpoint, plan: Plan, calibration: Calibration | None
) -> RunFigures:
    workers = args.workers or default_workers()
    resources = Resources(workers, int(args.max_memory * 2**30))
    with ProgressBar(plan.bytes_in) as bar:
        return compress(checkpoint, plan, args.destination, resources, args.restart, calibration, bar.advance)


def _run_line(figures: RunFigures) -> str:
    resumed = f", went on after {figures.resumed_files} files" if figures.resumed_files else ""
    return (
        f"{figures.bytes_in / 1e6:.0f} MB in {figures.seconds:.1f} s, {figures.mb_per_s:.0f} MB/s, "
        f"{figures.workers} processes, peak {figures.peak_bytes >> 20} of {figures.max_memory_bytes >> 20} MiB{resumed}"
    )


def _verified(
    args: argparse.Namespace, checkpoint: Checkpoint, plan: Plan, out: dict[str, Any], say: Callable[[str], None]
) -> bool:
    from ops.compress.verify import verify  # torch: the compressing parent does without

    with ProgressBar(plan.bytes_in) as bar:
        result = verify(checkpoint, plan, args.destination, args.workers or default_workers(), bar.advance)
    out["verify"] = asdict(result)
    for problem in result.problems[:20]:
        say(f"verify: {problem}")
    state = f"{len(result.problems)} problems" if result.problems else "all as planned"
    say(f"verify: {result.tensors} tensors, {result.packed} of them INT4, decoded by {result.decoder}: {state}")
    return not result.problems


def _evaluate(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    from ops.compress import evaluate as evaluation  # engines, tokenizers

    reference = evaluation.Engine(args.source)
    candidate = evaluation.Engine(args.destination, args.kv_cache_dtype)
    text = evaluation.read_text(args.evaluate, args.source, args.tokens, args.window)
    say(f"{len(text.windows)} windows of {args.window} tokens of {args.evaluate}")
    (comparison,) = evaluation.compare(reference, [candidate], text, args.destination.parent, args.tp, say)
    verdict = evaluation.verdict_of(comparison, reference, candidate, text)
    store_verdict(args.destination, judge(verdict, {}))


def verdict_table(verdict: Verdict) -> str:
    """The measures for people, the whole text first, then by position."""
    assert verdict.measures is not None
    heads = ("positions", "tokens", "KL, nats", "top-1 flips", "ppl before", "after", "ratio")
    widths = (14, 7, 28, 26, 11, 11, 0)
    lines = ["  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))]
    rows = [("all", verdict.measures)]
    rows += [(f"{bucket.first}..{bucket.last - 1}", bucket.measures) for bucket in verdict.by_position]
    for name, m in rows:
        kl = f"{m.kl.mean:.5f} [{m.kl.low:.5f}, {m.kl.high:.5f}]"
        flips = f"{m.flips.mean:.4f} [{m.flips.low:.4f}, {m.flips.high:.4f}]"
        ratio = f"{m.ppl_ratio.mean:.4f} [{m.ppl_ratio.low:.4f}, {m.ppl_ratio.high:.4f}]"
        cells = (name, str(m.positions), kl, flips, f"{m.ppl_reference.mean:.3f}", f"{m.ppl.mean:.3f}", ratio)
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def _run(args: argparse.Namespace) -> int:
    bounds = parse_bounds(args.require)
    checkpoint = open_checkpoint(args.source)
    choice = choose(family_of(checkpoint.model_type), args.pack, args.keep, args.keep_match)
    identity, calibration = _calibration(args, checkpoint)
    plan = make_plan(checkpoint, choice, _options(args, identity))

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout)

    say(plan_table(checkpoint, plan))
    if warning := caution(plan):
        say(warning)
    if args.dry_run:
        if args.json:
            print_json({"destination": str(args.destination), "dry_run": True})
        return 0
    out: dict[str, Any] = {"destination": str(args.destination)}
    if args.destination.exists():
        _made_from(args.destination, checkpoint)
        say(f"{args.destination} is there already")
    else:
        figures = _compress(args, checkpoint, plan, calibration)
        out["run"] = {**asdict(figures), "mb_per_s": figures.mb_per_s}
        say(_run_line(figures))
    if args.verify and not _verified(args, checkpoint, plan, out, say):
        return EXIT_FAILED
    if args.evaluate:
        _evaluate(args, say)
    verdict = judge(read_verdict(args.destination), bounds)
    if bounds and verdict.measures:
        store_verdict(args.destination, verdict)
    if verdict.measures:
        say(verdict_table(verdict))
    out["verdict"] = {"state": verdict.state.value, "reason": verdict.reason, "unmet": verdict.unmet}
    say(f"quality: {verdict.state.value}: {verdict.reason}")
    if args.json:
        print_json(out)
    return _status(verdict, bounds)


def _status(verdict: Verdict, bounds: dict[str, float]) -> int:
    return EXIT_UNMET if bounds and verdict.state is not State.ACCEPTED else 0


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"pageferry compress: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (MemoryExceeded, RuntimeError, OSError) as error:
        print(f"pageferry compress: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("pageferry compress: interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
