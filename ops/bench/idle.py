"""What an idle service costs, by process, beside what Ray and an empty Serve application cost by themselves.

    python -m ops.bench.idle --out ops/results/idle.json [KEY=VALUE ...]

CPU time (user and system) of every process over a minute without requests, in thousandths of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.spec import ClusterSpec
from ops.bench import facts
from ops.bench.systems import Running, SystemSpec, engine_environment, ours

NAMES = (  # the first that is found in the command line
    (r"^ray::ServeController", "Serve controller"),
    (r"^ray::(ProxyActor|HAProxyManager)", "Serve proxy actor"),
    (r"^ray::ServeReplica:\w+:(\w+)", r"replica \1"),
    (r"^ray::Controller", "our controller"),
    (r"^ray::KVTransfer", "our transfer actor"),
    (r"^ray::(\S+)", r"ray worker \1"),
    (r"haproxy", "HAProxy"),
    (r"gcs_server", "Ray GCS"),
    (r"raylet/raylet", "raylet"),
    (r"dashboard/agent\.py", "Ray dashboard agent"),
    (r"runtime_env/agent/main\.py", "Ray runtime env agent"),
    (r"dashboard/dashboard\.py", "Ray dashboard"),
    (r"Dashboard\w*", "Ray dashboard modules"),
    (r"log_monitor\.py", "Ray log monitor"),
    (r"autoscaler/", "Ray autoscaler monitor"),
    (r"VLLM::(Engine\w*)", r"vLLM \1"),
    (r"VLLM::(\w+)", r"vLLM \1"),
    (r"resource_tracker", "Python resource trackers"),
    (r"app\.cli|empty_serve", "the command"),
)
OURS = ("our controller", "our transfer actor", "replica Frontend", "replica Prefill", "replica Decode", "the command")


def name_of(command_line: str) -> str:
    for pattern, name in NAMES:
        if found := re.search(pattern, command_line):
            return found.expand(name)
    return command_line[:40]


def empty(spec: ClusterSpec, port: int) -> SystemSpec:
    return SystemSpec(
        name="empty",
        title="Ray and an empty Serve application",
        argv=[sys.executable, "-m", "ops.bench.empty_serve", str(port)],
        environment=engine_environment(spec.pools.decode, 1),
        port=port,
        model="empty",
    )


async def measure(system: SystemSpec, settle_s: float, seconds: float, log: Path) -> dict[str, Any]:
    async with Running(system, print, log) as running:
        await asyncio.sleep(settle_s)
        before, began = running.usage(), time.monotonic()
        await asyncio.sleep(seconds)
        after, took = running.usage(), time.monotonic() - began
    rows = []
    for pid, use in after.items():
        earlier = before.get(pid)
        if earlier is None:
            continue
        rows.append(
            {
                "process": name_of(use.command),
                "millicores": 1e3 * (use.cpu_s - earlier.cpu_s) / took,
                "wakes_per_s": (use.switches - earlier.switches) / took,
            }
        )
    return {"system": system.name, "seconds": took, "processes": rows}


def by_name(made: dict[str, Any]) -> dict[str, tuple[int, float, float]]:
    """Number of processes, thousandths of a core and wakes a second, by the process's name."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row in made["processes"]:
        for at, value in enumerate((1, row["millicores"], row["wakes_per_s"])):
            sums[row["process"]][at] += value
    return {name: (int(n), cores, wakes) for name, (n, cores, wakes) in sums.items()}


def table(mades: Sequence[dict[str, Any]]) -> str:
    lines = []
    for made in mades:
        total = sum(row["millicores"] for row in made["processes"])
        lines += [f"{made['system']}: {total:.0f} thousandths of a core over {made['seconds']:.0f} s", ""]
        lines += ["| process | number | 1/1000 core | wakes/s |", "|---|---:|---:|---:|"]
        for name, (number, cores, wakes) in sorted(by_name(made).items(), key=lambda item: -item[1][1]):
            lines.append(f"| {name} | {number} | {cores:.1f} | {wakes:.0f} |")
        lines.append("")
    return "\n".join(lines)


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config", default="local-cpu")
    parser.add_argument("--systems", default="empty,pageferry")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds between ready and the measurement")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8290)
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args(argv)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends the running service too
    spec = ClusterSpec.load(args.config)
    made = []
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        print(f"log of the services: {log.name}")
        for name in args.systems.split(","):
            system = (
                empty(spec, args.port) if name == "empty" else ours(spec, args.config, args.overrides, args.port, 1)
            )
            made.append(await measure(system, args.settle, args.seconds, Path(log.name)))
            print(table(made[-1:]), flush=True)
    if args.out:
        command = {"command": f"python -m ops.bench.idle {' '.join(argv or sys.argv[1:])}"}
        known = facts.gather([])
        args.out.write_text(json.dumps(known | command | {"systems": made}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(f"# `{command['command']}`\n\n{facts.one_line(known)}\n\n{table(made)}")


if __name__ == "__main__":
    asyncio.run(main())
