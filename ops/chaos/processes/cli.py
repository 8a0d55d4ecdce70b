"""`pageferry chaos processes`: starts a service, hurts it again and again under load, and prints what it cost.

pageferry chaos processes --runs 30 --seed 1
pageferry chaos processes --runs 8 --kinds decode-kill decode-hang --append runs.jsonl --minutes 5
pageferry chaos processes --scale-downs 5 --hang-ups 4
pageferry chaos processes --storms 3 --poisons 1
pageferry chaos processes pools.decode.replicas=1 frontend.replicas=1 --rolling config model
pageferry chaos processes --table runs.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from app.commands.serve import Service
from cluster.fault_kinds import ProcessFault
from cluster.json_output import print_json
from cluster.spec import ClusterSpec, parse_overrides
from ops.chaos.processes import leaving, poison, report, scaling, storm
from ops.chaos.processes.campaign import Campaign, Result
from ops.chaos.processes.load import REQUEST_TIMEOUT_S, open_session

TOPOLOGY = Path(__file__).with_name("topology.yaml")


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry chaos processes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the topology, such as frontend.replicas=1")
    make.add_argument("--runs", type=int, default=0, help="runs that hurt something")
    make.add_argument("--scale-downs", type=int, default=0, help="runs in which the decode pool loses a replica")
    make.add_argument("--hang-ups", type=int, default=0, help="runs in which clients leave; every other one queued")
    make.add_argument("--storms", type=int, default=0, help="runs of a minute in which everything happens at once")
    make.add_argument("--poisons", type=int, default=0, help="runs with a request that ends each engine it is in")
    make.add_argument(
        "--rolling", nargs="*", choices=("config", "model"), default=[], help="runs that replace every replica"
    )
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--kinds", nargs="+", choices=sorted(ProcessFault), default=sorted(ProcessFault), metavar="KIND")
    make.add_argument("--minutes", type=float, default=60.0, help="no new run after this, service start included")
    make.add_argument("--append", type=Path, help="file of JSON lines that every result is added to")
    make.add_argument("--topology", default=str(TOPOLOGY))
    make.add_argument("--timeout", type=float, default=400.0, help="seconds to wait until the service is healthy")
    make.add_argument("--logs", type=Path, help="folder that Ray's and Serve's logs are copied to at the end")
    make.add_argument("--json", action="store_true")
    make.add_argument("--table", type=Path, help="only print the table of such a file")
    return make


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    if args.table is not None:
        print(report.table(report.read(args.table)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever ends this ends the service as well
    began = time.monotonic()
    overrides = {"frontend.port": _free_port(), **parse_overrides(args.overrides)}
    overrides.setdefault("pools.decode.min_replicas", 1)  # scale-downs move the pool between one and two replicas
    overrides.setdefault("pools.decode.max_replicas", max(2, int(overrides.get("pools.decode.replicas", 1))))
    service = Service(ClusterSpec.load(args.topology, overrides), None, _free_port())
    try:
        service.start()
        service.wait_healthy(args.timeout)
        results = asyncio.run(_all(service, args, began + 60.0 * args.minutes))
    finally:
        if args.logs is not None and service.folder is not None:
            shutil.copytree(service.folder / "session_latest" / "logs", args.logs, dirs_exist_ok=True, symlinks=True)
        service.stop()
    if args.json:
        print_json(results)
    else:
        print(report.table(results))
    return 0 if results and all(result["good"] for result in results) else 1


async def _all(service: Service, args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []

    def note(result: Result) -> None:
        results.append(result.to_dict())
        print(report.line(results[-1]), file=sys.stderr, flush=True)
        if args.append is not None:
            report.append(args.append, results[-1])

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    async with open_session(storm.ANSWER_S if args.storms or args.poisons else REQUEST_TIMEOUT_S) as session:
        campaign = Campaign(service, session, say)
        async for result in campaign.runs(args.kinds, args.runs, args.seed, until):
            note(result)
        for number in range(args.hang_ups):
            if time.monotonic() < until:
                note(await (leaving.hang_up_queued if number % 2 else leaving.hang_up)(campaign, args.seed + number))
        for number in range(args.scale_downs):
            if time.monotonic() < until:
                note(await scaling.scale_down(campaign, args.seed + number))
        for run, count in ((storm.storm, args.storms), (poison.poison, args.poisons)):
            for number in range(count):
                if time.monotonic() < until:
                    note(await run(campaign, args.seed + number))
        for what in args.rolling:
            if time.monotonic() < until:
                note(await scaling.rolling_update(campaign, args.seed, what))
    return results


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
