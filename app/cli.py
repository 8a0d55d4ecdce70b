"""The `pageferry` command: one lazily imported module a subcommand, so that `--help` costs no engine import.

A command module has `def main(argv: list[str]) -> int` and parses its own arguments with argparse under
the program name `pageferry NAME`.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from cluster import json_output


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "serve": Command("app.commands.serve", "start the service from a topology file"),
    "status": Command("app.commands.status", "pools, replicas, tickets and bytes of a running service"),
    "scale": Command("app.commands.scale", "set the size of a pool of a running service by hand"),
    "dashboards": Command("ops.grafana.cli", "put the dashboards into a Grafana, or write its provisioning files"),
    "chaos": Command("ops.chaos.cli", "inject faults and show that every one is caught"),
    "kernels": Command("ops.kernels.cli", "compile kernels ahead of time, benchmark them"),
    "simulate": Command("ops.simulate.cli", "run the real controller in a simulated cluster, with faults"),
    "plan": Command("cluster.plan.cli", "what fits: weights, KV tokens, requests, cost"),
    "compress": Command("ops.compress.cli", "turn a BF16 or FP8 checkpoint into INT4"),
    "bench": Command("ops.bench.cli", "paired benchmark against plain vLLM and ray.serve.llm"),
    "eval": Command("ops.accuracy.cli", "accuracy of the hand-over against a single engine"),
}


def usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "usage: pageferry COMMAND [options]\n\ncommands:\n" + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    command = COMMANDS.get(args[0])
    if command is None:
        print(f"pageferry: no command {args[0]!r}\n\n{usage()}", file=sys.stderr, end="")
        return 2
    module = command.module
    return json_output.run(lambda rest: int(importlib.import_module(module).main(rest)), args[1:])


if __name__ == "__main__":
    sys.exit(main())
