"""`pageferry simulate`: the shipped request, transfer and controller machines in a simulated cluster.

pageferry simulate --seeds 200 --seed 0 --faults all --json   random clusters, loads and faults, every law checked
pageferry simulate --seed 17 --story                          one of them as a story
pageferry simulate --scenario FILE --story                    a written-down one
pageferry simulate published                                  the published decode curve of Kimi K2.6 on H200
pageferry simulate autoscale                                  occupancy scaling against ongoing-request scaling
pageferry simulate held_out                                   the same on seeds that were not tuned on, at equal floors
pageferry simulate scale --replicas 10,100,1000               what a decision of the controller costs
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from ops.simulate.checkers import Verdicts, check, leaks
from ops.simulate.cluster import ClusterSim
from ops.simulate.faults import FaultKind, parse_kinds
from ops.simulate.scenario import Scenario, ScenarioError, load, random_scenario
from ops.simulate.story import missing, story

REPORTED = 10
STUDIES = ("published", "autoscale", "held_out", "scale")  # modules of ops.bench.scaling


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    logging.getLogger("pageferry").setLevel(logging.CRITICAL)  # faults are what it is about
    if args.what in STUDIES:
        gc.freeze()  # what is imported is not walked again in each full pass
        return int(importlib.import_module(f"ops.bench.scaling.{args.what}").main(args))
    try:
        kinds = parse_kinds(args.faults)
        if args.scenario:
            return _one(load(args.scenario), args)
    except (ValueError, ScenarioError) as error:
        print(f"pageferry simulate: {error}", file=sys.stderr)
        return 2
    if args.story:
        return _one(random_scenario(args.seed, kinds), args)
    return _many(args, kinds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pageferry simulate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", nargs="?", default="faults", choices=("faults", *STUDIES), help="default: faults")
    parser.add_argument("--seeds", type=int, default=200, help="how many random scenarios")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join(FaultKind)}")
    parser.add_argument("--scenario", help="run this scenario file instead")
    parser.add_argument("--story", action="store_true", help="one run, line by line")
    parser.add_argument("--plot", help="folder for plots (PNG)")
    parser.add_argument("--replicas", default="10,100,1000", help="scale: decode replicas, one or several numbers")
    parser.add_argument("--seconds", type=float, default=20.0, help="scale: simulated seconds that are measured")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="autoscale, held_out: runs of every policy, with other arrivals; held_out: 0 shows the record as it is",
    )
    parser.add_argument(
        "--record",
        help="autoscale, held_out: JSON lines of single runs; those there are not run again. scale: one JSON",
    )
    parser.add_argument("--markdown", help="also write the result as a table to this file")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def run_seeds(first: int, count: int, kinds: tuple[FaultKind, ...]) -> dict[str, Any]:
    """Runs and checks the scenarios of `count` seeds from `first` on; what it returns is the summary to print."""
    began = time.process_time()
    totals = {"violations": 0, "requests": 0, "lost": 0, "duplicated": 0, "leaked": 0}
    outcomes: dict[str, int] = {}
    seen: dict[str, float] = {}
    failing: list[dict[str, Any]] = []
    for seed in range(first, first + count):
        scenario = random_scenario(seed, kinds)
        found, cluster = judge(scenario)
        counted = found.to_dict()
        for name in totals:
            totals[name] += counted[name]
        for name, number in found.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + number
        for name, value in _seen(scenario, cluster).items():
            seen[name] = seen.get(name, 0) + value
        if not found.clean:
            failing.append({"seed": seed, "violations": found.violations[:REPORTED]})
    return {
        "seeds": count,
        **totals,
        "first_seed": first,
        "faults": [str(kind) for kind in kinds],
        "outcomes": outcomes,
        **{name: int(value) for name, value in seen.items()},
        "cpu_s": round(time.process_time() - began, 1),
        "failing": failing,
    }


def _seen(scenario: Scenario, cluster: ClusterSim) -> dict[str, float]:
    """What happened in a run, so that a campaign shows what it went through."""
    frontends = [frontend.counted for frontend in cluster.frontends]
    return {
        "faults_struck": len(scenario.faults),
        "sequences": sum(arrival.num_sequences for arrival in scenario.arrivals),
        "messages": cluster.net.counts["messages"],
        "events": cluster.world.events,
        "fetches": sum(node.fetches for node in cluster.nodes),
        "replicas_lost": sum(counted.get("pageferry_replicas_lost_total", 0) for counted in frontends),
        "resumed_or_replayed": sum(counted.get("pageferry_resumed_total", 0) for counted in frontends),
        "integrity_retries": sum(counted.get("pageferry_page_integrity_retries_total", 0) for counted in frontends),
        "leases_lost": cluster.controller.totals().get("leases_lost", 0),
    }


def judge(scenario: Scenario) -> tuple[Verdicts, ClusterSim]:
    """Runs and checks one scenario; an exception inside is a violation like any other."""
    cluster = ClusterSim(scenario)
    try:
        cluster.run(quiet=lambda cluster: not leaks(cluster))
        found = check(cluster)
    except Exception as error:
        found = Verdicts(violations=[f"{type(error).__name__}: {error}"])
    finally:
        cluster.close()
    return found, cluster


def _many(args: argparse.Namespace, kinds: tuple[FaultKind, ...]) -> int:
    summary = run_seeds(args.seed, args.seeds, kinds)
    if args.json:
        print_json(summary)
    else:
        print("\n".join(f"{name:20s} {value}" for name, value in _rows(summary)))
        for failed in summary["failing"][:REPORTED]:
            print(f"seed {failed['seed']}: {'; '.join(failed['violations'])}")
            print(f"  again: pageferry simulate --seed {failed['seed']} --faults {args.faults} --story")
    if args.markdown:
        table = "\n".join(f"| {name} | {value} |" for name, value in _rows(summary))
        Path(args.markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(args.markdown).write_text(f"| | |\n|---|---|\n{table}\n")
    return 1 if summary["failing"] else 0


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    numbers = ("faults_struck", "requests", "sequences", "messages", "fetches", "replicas_lost", "leases_lost")
    more = ("resumed_or_replayed", "integrity_retries", "violations", "lost", "duplicated", "leaked")
    last = summary["first_seed"] + summary["seeds"] - 1
    return [
        ("seeds", f"{summary['first_seed']} .. {last}"),
        ("fault kinds", ", ".join(summary["faults"]) or "none"),
        *((name.replace("_", " "), f"{summary.get(name, 0):,}") for name in (*numbers, *more)),
        *((f"requests {name}", f"{number:,}") for name, number in sorted(summary["outcomes"].items())),
        ("CPU seconds", str(summary["cpu_s"])),
    ]


def _one(scenario: Scenario, args: argparse.Namespace) -> int:
    found, cluster = judge(scenario)
    lines = story(cluster)
    found.violations += missing(lines, scenario.expect)
    summary = found.to_dict()
    if args.json:
        print_json(summary)
    else:
        print("\n".join([*(lines if args.story else ()), *found.violations, str(summary)]))
    if args.plot:
        from ops.bench.scaling.plots import plot_run

        with closing(ClusterSim(scenario, sample_ns=250_000_000)) as sampled:
            sampled.run()
        print(plot_run(sampled, Path(args.plot) / f"scenario-{scenario.seed}.png"))
    return 0 if found.clean else 1
