"""`pageferry simulate`: the real controller in a simulated cluster.

pageferry simulate --seeds 200 --seed 0 --faults all --json   random clusters, loads and faults, every law checked
pageferry simulate --scenario FILE                            one written-down run again
pageferry simulate published                                  the published decode curve of Kimi K2.6 on H200
pageferry simulate autoscale                                  occupancy scaling against ongoing-request scaling
pageferry simulate scale                                      decision times with 1,000 decode replicas
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from ops.simulate.checkers import Verdicts, check
from ops.simulate.cluster import ClusterSim
from ops.simulate.faults import FaultKind, parse_kinds
from ops.simulate.scenario import Scenario, random_scenario

REPORTED = 10


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if args.what == "published":
        from ops.simulate import published

        return published.main(args)
    if args.what == "autoscale":
        from ops.simulate import autoscalers

        return autoscalers.main(args)
    if args.what == "scale":
        from ops.simulate import scale

        return scale.main(args)
    if args.scenario:
        return _one(Scenario.from_json(Path(args.scenario).read_text()), args)
    try:
        kinds = parse_kinds(args.faults)
    except ValueError as error:
        print(f"pageferry simulate: --faults: {error}", file=sys.stderr)
        return 2
    return _many(args, kinds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pageferry simulate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "what",
        nargs="?",
        default="faults",
        choices=("faults", "published", "autoscale", "scale"),
        help="default: faults",
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many random scenarios")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join(FaultKind)}")
    parser.add_argument("--scenario", help="run this scenario file instead")
    parser.add_argument("--save", default="scenarios", help="folder for the scenario files of failing seeds")
    parser.add_argument("--plot", help="folder for plots (PNG)")
    parser.add_argument("--replicas", type=int, default=1000, help="scale: decode replicas")
    parser.add_argument("--rate", type=float, default=2000.0, help="scale: requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="scale: simulated seconds that are measured")
    parser.add_argument("--repeats", type=int, default=3, help="autoscale: runs of every policy, with other arrivals")
    parser.add_argument("--record", help="autoscale: JSON lines of single runs; those found there are not run again")
    parser.add_argument("--markdown", help="also write the result as a table to this file")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def run_seeds(first: int, count: int, kinds: tuple[FaultKind, ...], folder: str | Path | None) -> dict[str, Any]:
    """Runs the scenarios of `count` seeds; a failing one is written to `folder`."""
    began = time.process_time()
    totals = {"violations": 0, "requests": 0, "lost": 0, "duplicated": 0, "leaked": 0}
    outcomes: dict[str, int] = {}
    messages = struck = events = 0
    failing: list[dict[str, Any]] = []
    for seed in range(first, first + count):
        scenario = random_scenario(seed, kinds)
        found, cluster = judge(scenario)
        told = found.to_dict()
        for name in totals:
            totals[name] += told[name]
        for name, number in found.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + number
        struck += len(scenario.faults)
        if cluster is not None:
            messages += cluster.net.counts["messages"]
            events += cluster.world.events
        if not found.clean:
            where = str(scenario.save(folder)) if folder is not None else ""
            failing.append({"seed": seed, "scenario": where, "violations": found.violations[:REPORTED]})
    return {
        "seeds": count,
        **totals,
        "first_seed": first,
        "faults": [str(kind) for kind in kinds],
        "faults_struck": struck,
        "outcomes": outcomes,
        "messages": messages,
        "events": events,
        "cpu_s": round(time.process_time() - began, 1),
        "failing": failing,
    }


def judge(scenario: Scenario) -> tuple[Verdicts, ClusterSim | None]:
    """Runs and checks one scenario; an exception inside is a violation like any other."""
    try:
        cluster = ClusterSim(scenario).run()
    except Exception as error:
        return Verdicts(violations=[f"{type(error).__name__}: {error}"]), None
    return check(cluster), cluster


def _many(args: argparse.Namespace, kinds: tuple[FaultKind, ...]) -> int:
    told = run_seeds(args.seed, args.seeds, kinds, args.save)
    if args.json:
        print_json(told)
    else:
        print(
            f"{told['seeds']} seeds from {args.seed}, {told['faults_struck']} faults of {len(kinds)} kinds, "
            f"{told['messages']:,} messages, {told['cpu_s']} s CPU"
        )
        ends = ", ".join(f"{number} {name}" for name, number in sorted(told["outcomes"].items()))
        print(f"requests {told['requests']}: {ends}")
        print(
            f"violations {told['violations']}, lost {told['lost']}, duplicated {told['duplicated']}, "
            f"leaked {told['leaked']}"
        )
        for failed in told["failing"][:REPORTED]:
            print(f"seed {failed['seed']} ({failed['scenario']}): {'; '.join(failed['violations'])}")
    if args.markdown:
        _write_markdown(Path(args.markdown), told)
    return 1 if told["failing"] else 0


def _write_markdown(path: Path, told: dict[str, Any]) -> None:
    rows = [
        ("seeds", f"{told['first_seed']} .. {told['first_seed'] + told['seeds'] - 1}"),
        ("fault kinds", ", ".join(told["faults"])),
        ("faults struck", f"{told['faults_struck']:,}"),
        ("requests", f"{told['requests']:,}"),
        *((f"requests {name}", f"{number:,}") for name, number in sorted(told["outcomes"].items())),
        ("messages", f"{told['messages']:,}"),
        *((name, str(told[name])) for name in ("violations", "lost", "duplicated", "leaked")),
        ("CPU seconds", str(told["cpu_s"])),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows) + "\n")


def _one(scenario: Scenario, args: argparse.Namespace) -> int:
    found, _ = judge(scenario)
    told = found.to_dict()
    if args.json:
        print_json(told)
    else:
        print("\n".join([*found.violations, str(told)]))
    if args.plot:
        from ops.simulate.plots import plot_run

        cluster = ClusterSim(scenario, sample_ns=250_000_000).run()
        print(plot_run(cluster, Path(args.plot) / f"scenario-{scenario.seed}.png"))
    return 0 if found.clean else 1
