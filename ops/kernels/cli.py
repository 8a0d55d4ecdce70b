"""`pageferry kernels --aot`: compile every Triton kernel without a GPU and print what it takes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cluster.json_output import print_json


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry kernels", description=__doc__)
    parser.add_argument(
        "--aot", action="store_true", required=True, help="compile every Triton kernel; fails on spilled registers"
    )
    parser.add_argument("--arch", action="append", choices=["sm_90", "sm_100"], help="default: both")
    parser.add_argument("--only", default="", help="kernels and configurations whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    return _aot(args)


def _aot(args: argparse.Namespace) -> int:
    from ops.kernels import aot

    rows: list[dict[str, Any]] = []
    if not args.json:
        print(
            f"{'kernel':14s}{'arch':8s}{'config':32s}{'registers':>10s}{'spills':>8s}{'shared':>8s}{'ld':>4s}{'st':>4s}"
        )
    for usage in aot.compile_all(args.arch or list(aot.ARCHS), args.only):
        rows.append(usage.to_dict())
        if not args.json:
            print(
                f"{usage.kernel:14s}{usage.arch:8s}{usage.config:32s}{usage.registers:10d}{usage.spills:8d}"
                f"{usage.shared_bytes:8d}{usage.load_bytes:4d}{usage.store_bytes:4d}",
                flush=True,
            )
    spilled = [f"{row['kernel']} {row['config']} on {row['arch']}" for row in rows if row["spills"]]
    if args.json:
        print_json({"kernels": rows, "spilled": spilled})
    elif rows:
        print(f"{len(rows)} compiled, {len(spilled)} with spills{': ' if spilled else ''}{', '.join(spilled)}")
    if not rows:
        print(f"no kernel or configuration contains {args.only!r}", file=sys.stderr)
    return 1 if spilled or not rows else 0
