"""What each channel between transfer actors carries, beside plain copying and `iperf3` on the same link.

    python -m ops.bench.channels --out channels.json

Two transfer actors in processes of their own, the second behind a veth pair in a network namespace; this process
stands for their engines. Timed is what decode waits for: `begin_read` over the node's socket, until all bytes of a
sealed lease are in its own staging and may be read. Every byte is compared then. `--objects` takes two raylets
instead, and the way that is left where no connection can be had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import ray

from actors import link
from actors.engine.transfer_client import TransferClient
from actors.messages import HandOver, Lease, Role, Seal
from actors.transfer import actor
from actors.transfer.channel import Hello, PagesSealed
from actors.transfer.fetch import Way
from actors.transfer.link import WorkerLink
from actors.transfer.ways import Ways
from cluster.frontend_spec import TracingSpec
from cluster.names import NAMESPACE, transfer_actor
from ops.bench.facts import gather
from ops.engine_pair import FakeController, LocalHandle
from ops.two_machines import Link, joined_link, raylets

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
SIZES = {"1 page": PAGE_BYTES, "16 pages": 16 * PAGE_BYTES, "256 pages": 256 * PAGE_BYTES, "1 GiB": 1 << 30}
STAGING_BYTES = (1 << 30) + 64 * MIB
NODES = ("aa" * 16, "bb" * 16)
INVITATIONS = 64
SEALED_S = 0.1  # for the seal to arrive
IPERF_S = 4


# -- transfer actors


class _Invitations:
    """Stands for the first machine's actor where its invitations have been fetched before."""

    def __init__(self, addresses: list[link.Address]) -> None:
        self._addresses = addresses

    async def invite(self) -> link.Address:
        return self._addresses.pop()


class _Host(actor.KVTransfer):
    peer: Any = None

    def _get_peer(self, node_id: str) -> Any:
        return LocalHandle(self.peer)


async def host(index: int, address: str) -> None:
    """One machine's transfer actor, until its standard input ends; there it gets the first one's invitations."""
    made = _Host(NODES[index], STAGING_BYTES, 600.0, "channels", host=address)
    made._controller = LocalHandle(FakeController())
    place = await made.start()
    invitations = [await made.invite() for _ in range(INVITATIONS)]
    print(json.dumps({"socket": place["socket"], "invitations": msgspec.to_builtins(invitations)}), flush=True)
    made.peer = _Invitations(
        msgspec.convert(json.loads(await asyncio.to_thread(sys.stdin.readline)), list[link.Address])
    )
    await asyncio.to_thread(sys.stdin.read)
    await made.close()


class _ObjectWay(Ways):
    def of(self, node_id: str) -> tuple[Way, Way]:
        _, objects = super().of(node_id)
        return objects, objects


class ObjectsOnly(actor.KVTransferActor):
    """As where no connection can be had."""

    async def start(
        self, staging_bytes_max: int = 0, lease_s: float = 0.0, tracing: TracingSpec | None = None
    ) -> dict[str, Any]:
        place = await super().start(staging_bytes_max, lease_s, tracing)
        self._ways = _ObjectWay(asyncio.get_running_loop(), self._get_peer)
        return place


# -- engines


class Engines:
    """A prefill engine on the first machine and a decode engine on the second, and how their replicas ask."""

    names = ("p#0", "d#0")

    def __init__(self, nodes: tuple[str, ...], sockets: list[str]) -> None:
        roles = (Role.PREFILL, Role.DECODE)
        self.links = [
            WorkerLink(path, Hello(engine=name, role=role, pid=1))
            for path, name, role in zip(sockets, self.names, roles)
        ]
        self.clients = [TransferClient(node, lambda: None, path) for node, path in zip(nodes, sockets)]
        self._tickets = 0

    async def sealed(self, payload: np.ndarray) -> Lease:
        self._tickets += 1
        lease = await self.clients[0].lease(self._tickets, 1, payload.nbytes, ["p#0"], 60.0, 0.0)
        assert lease is not None, "no room in staging"
        with self.links[0].staging.bytes_of(lease) as view:
            assert view is not None
            np.copyto(np.frombuffer(view, np.uint8), payload)
        self.links[0].send(
            PagesSealed(
                ticket_id=lease.ticket_id,
                attempt=1,
                shard=0,
                num_shards=1,
                first_page=0,
                digests=[1],
                layout_fingerprint="f",
                num_tokens=1,
                last=True,
            )
        )
        await asyncio.sleep(SEALED_S)
        return lease

    async def read(self, payload: np.ndarray, side: int) -> float:
        """Seconds until the engine on machine `side` may read; raises when a byte is not what was sealed."""
        lease = await self.sealed(payload)
        seal = Seal(ticket_id=lease.ticket_id, attempt=1, layout_fingerprint="f", num_tokens=1, digests=((1,),))
        over = HandOver(ticket_id=lease.ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=600.0)
        began = time.perf_counter()
        found = await self.clients[side].begin_read(over, [self.names[side]], 600.0)
        took = time.perf_counter() - began
        assert isinstance(found, Lease), found
        with self.links[side].staging.bytes_of(found) as view:
            assert view is not None and np.array_equal(np.frombuffer(view, np.uint8), payload), "bytes differ"
        for client, name in zip(self.clients, self.names):
            await client.drop_reader(lease.ticket_id, 1, [name])
        return took

    def close(self) -> None:
        for link_ in self.links:
            link_.close()
        for client in self.clients:
            client.close()


@contextlib.asynccontextmanager
async def direct_engines(joined: Link) -> AsyncIterator[Engines]:
    command = [sys.executable, "-m", "ops.bench.channels", "--host"]
    with (
        subprocess.Popen(
            [*command, "0", joined.near], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as first,
        subprocess.Popen(
            [*joined.inside(), *command, "1", joined.far], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as second,
    ):
        places = []
        for each in (first, second):
            assert each.stdout is not None and each.stdin is not None
            places.append(json.loads(each.stdout.readline()))
        for each in (first, second):
            assert each.stdin is not None
            print(json.dumps(places[0]["invitations"]), file=each.stdin, flush=True)
        engines = Engines(NODES, [place["socket"] for place in places])
        try:
            yield engines
        finally:
            engines.close()
            for each in (first, second):
                assert each.stdin is not None
                each.stdin.close()


@contextlib.asynccontextmanager
async def object_engines(joined: Link) -> AsyncIterator[Engines]:
    by_address = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    nodes = (by_address[joined.near], by_address[joined.far])
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    actors: list[Any] = [
        ray.remote(ObjectsOnly)
        .options(
            name=transfer_actor("channels", node),
            namespace=NAMESPACE,
            max_concurrency=1000,
            num_cpus=0,
            scheduling_strategy=strategy(node, soft=False),
        )
        .remote(node, STAGING_BYTES, 600.0, "channels")
        for node in nodes
    ]
    places = [await each.start.remote() for each in actors]
    engines = Engines(nodes, [place["socket"] for place in places])
    try:
        yield engines
    finally:
        engines.close()
        for each in actors:
            await each.close.remote()
            ray.kill(each)


# -- measuring


def copy_s(payload: np.ndarray, rounds: int) -> list[float]:
    target, found = np.ones_like(payload), []
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, payload)
        found.append(time.perf_counter() - began)
    return found


def iperf_bytes_per_s(joined: Link) -> float:
    """One TCP stream out of the first machine, as pages go."""
    server = subprocess.Popen([*joined.inside(), "iperf3", "-s", "-1", "-p", "5399"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        command = ["iperf3", "-c", joined.far, "-p", "5399", "-t", str(IPERF_S), "-J"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return float(found["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()


async def measure(engines: Engines, joined: Link, args: argparse.Namespace, report: dict[str, Any]) -> None:
    between = "objects" if args.objects else "direct"
    for limit in args.limits:
        joined.limit(limit)
        plain = iperf_bytes_per_s(joined)
        for size, num_bytes in SIZES.items():
            if num_bytes > args.most_mib * MIB or (limit and num_bytes > 256 * PAGE_BYTES):
                continue
            payload = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
            for way, side in ((between, 1),) if args.objects or limit else (("memory", 0), (between, 1)):
                took = [await engines.read(payload, side) for _ in range(args.rounds)]
                report["rows"].append(row(way, limit, size, num_bytes, took, copy_s(payload, args.rounds), plain))
                print(shown(report["rows"][-1]), flush=True)
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


def row(
    way: str, limit: int, size: str, num_bytes: int, took: list[float], copied: list[float], plain: float
) -> dict[str, Any]:
    rate, copying = num_bytes / median(took), num_bytes / median(copied)
    return {
        "channel": way,
        "limit_mbit": limit,
        "size": size,
        "bytes": num_bytes,
        "seconds": took,
        "copy_seconds": copied,
        "iperf3_bytes_per_s": plain,
        "bytes_per_s": rate,
        "share_of_copy": rate / copying,
        "share_of_iperf3": rate / plain,
    }


def shown(each: dict[str, Any]) -> str:
    limit = f"{each['limit_mbit']} Mbit/s" if each["limit_mbit"] else "no limit"
    return (
        f"| {each['channel']} | {limit} | {each['size']} | {median(each['seconds']) * 1e3:,.1f} | "
        f"{each['bytes_per_s'] / 1e6:,.0f} | {each['share_of_copy']:.2f} | {each['share_of_iperf3']:.2f} |"
    )


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make.add_argument("--out", default="channels.json", help="JSON file with every round; default: %(default)s")
    make.add_argument("--rounds", type=int, default=5)
    make.add_argument("--limits", type=int, nargs="*", default=[0, 1000], help="Mbit/s of the link; 0: none")
    make.add_argument("--most-mib", type=int, default=1024)
    make.add_argument("--objects", action="store_true")
    make.add_argument("--host", nargs=2, metavar=("INDEX", "ADDRESS"), help=argparse.SUPPRESS)
    args = make.parse_args(argv)
    if args.host:
        asyncio.run(host(int(args.host[0]), args.host[1]))
        return 0
    command = " ".join(["python -m ops.bench.channels", *(sys.argv[1:] if argv is None else argv)])
    report: dict[str, Any] = {"facts": gather([]) | {"command": command}, "rows": []}
    if args.objects:
        with raylets() as made:
            ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
            try:
                asyncio.run(run(object_engines(made.link), made.link, args, report))
            finally:
                ray.shutdown()
    else:
        with joined_link() as joined:
            asyncio.run(run(direct_engines(joined), joined, args, report))
    return 0


async def run(
    made: contextlib.AbstractAsyncContextManager[Engines],
    joined: Link,
    args: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    async with made as engines:
        await asyncio.sleep(1.0)  # for both to have mapped the memory
        await measure(engines, joined, args, report)


if __name__ == "__main__":
    sys.exit(main())
