"""`pageferry kernels`: compile ahead of time, benchmark on the CPU, check and write the test vectors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cluster.json_output import print_json


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry kernels", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--aot", action="store_true", help="compile every Triton kernel; fails on spilled registers")
    what.add_argument("--bench", action="store_true", help="figures of the CPU kernels against a memory copy")
    what.add_argument("--vectors", action="store_true", help="run the test vectors through every CPU backend")
    what.add_argument("--write-vectors", action="store_true", help="make the vector files anew from the reference")
    parser.add_argument("--arch", action="append", choices=["sm_90", "sm_100"], help="with --aot; default: both")
    parser.add_argument("--only", default="", help="with --aot: kernels and configurations whose name contains this")
    parser.add_argument("--quick", action="store_true", help="with --bench: few repetitions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.aot:
        return _aot(args)
    if args.bench:
        return _bench(args)
    return _vectors(args)


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


def _bench(args: argparse.Namespace) -> int:
    from ops.kernels import bench

    figures = bench.run(quick=args.quick)
    if args.json:
        print_json(figures)
    else:
        print(bench.report(figures))
    return 0


def _vectors(args: argparse.Namespace) -> int:
    from kernels import dispatch
    from ops.kernels import vectors

    if args.write_vectors:
        for path in vectors.write():
            print(path)
        return 0
    backends = ["reference"] if dispatch.backend_name("cpu") == "reference" else ["reference", "numba"]
    wrong = [line for backend in backends for line in vectors.verify(backend)]
    if args.json:
        print_json({"backends": backends, "wrong": wrong})
    else:
        print("\n".join(wrong) or "vectors: all equal")
    return 1 if wrong else 0
