"""Hand-overs a second of one node's transfer actor, without Ray: leases, seals, reads and ends over its real sockets.

    python -m ops.bench.transfer_host --out transfer-host.json

The actor runs in a process of its own; this one stands for a prefill and a decode replica with `--in-flight` hand-overs
of a few kB under way, so that what is counted is decisions and messages, not bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from actors.engine.transfer_client import TransferClient
from actors.messages import HandOver, Lease, Opened, Role, Seal, Verdict
from actors.transfer.actor import KVTransfer
from actors.transfer.channel import Hello, PagesOpened, PagesSealed
from actors.transfer.link import WorkerLink
from ops.bench.facts import gather
from ops.engine_pair import FakeController, LocalHandle

NUM_BYTES = 8192
NODE = "ab" * 16
APPLICATION = "transfer-host"


async def host() -> None:
    transfer = KVTransfer(NODE, 64 << 20, 60.0, APPLICATION)
    transfer._controller = LocalHandle(FakeController())
    print((await transfer.start())["socket"], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until its parent ends
    await transfer.close()


class Engines:
    """A prefill and a decode engine, and how their replicas ask."""

    def __init__(self, path: str) -> None:
        self.prefill = WorkerLink(path, Hello(engine="p#0", role=Role.PREFILL, pid=1))
        self.decode = WorkerLink(path, Hello(engine="d#0", role=Role.DECODE, pid=1))
        self.client = TransferClient(NODE, lambda: None, path)
        self._tickets = 0

    async def hand_over(self) -> float:
        """Seconds from asking for the lease to the right to read."""
        self._tickets += 1
        number, began = self._tickets, time.perf_counter()
        lease = await self.client.lease(number, 1, NUM_BYTES, ["p#0"], 30.0, 0.0)
        assert isinstance(lease, Lease)
        self.prefill.send(
            PagesSealed(
                ticket_id=number,
                attempt=1,
                shard=0,
                num_shards=1,
                first_page=0,
                digests=[1, 2],
                layout_fingerprint="f",
                num_tokens=64,
                last=True,
            )
        )
        seal = Seal(ticket_id=number, attempt=1, layout_fingerprint="f", num_tokens=64, digests=((1, 2),))
        over = HandOver(ticket_id=number, attempt=1, seal=seal, lease=lease, deadline_s=30.0)
        while not isinstance(await self.client.begin_read(over, ["d#0"], 30.0), Lease):
            await asyncio.sleep(0.0005)  # the seal is on its way, over another socket
        took = time.perf_counter() - began
        opened = Opened(
            ticket_id=number,
            attempt=1,
            replica_id="d",
            num_pages=2,
            num_bytes=NUM_BYTES,
            num_tokens=64,
            verdicts={Verdict.OK: 2},
            seconds=0.0,
        )
        self.decode.send(PagesOpened(opened=opened))
        return took

    def close(self) -> None:
        self.client.close()
        self.prefill.close()
        self.decode.close()


async def measure(path: str, pid: int, in_flight: int, seconds: float) -> dict[str, Any]:
    engines = Engines(path)
    await asyncio.sleep(1.0)
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def one_after_another() -> None:
        while time.perf_counter() < until:
            times.append(await engines.hand_over())

    before, began = _cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    took, cpu = time.perf_counter() - began, _cpu_s(pid) - before
    engines.close()
    times.sort()
    return {
        "in_flight": in_flight,
        "hand_overs": len(times),
        "per_s": len(times) / took,
        "cpu_us": cpu / len(times) * 1e6,
        "p50_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[len(times) * 99 // 100] * 1e3,
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make.add_argument("--out")
    make.add_argument("--in-flight", type=int, nargs="*", default=[1, 8, 64])
    make.add_argument("--seconds", type=float, default=5.0)
    make.add_argument("--host", action="store_true", help="be the actor's process")
    args = make.parse_args(argv)
    if args.host:
        asyncio.run(host())
        return 0
    facts = gather([]) | {"command": " ".join(["python -m ops.bench.transfer_host", *(argv or sys.argv[1:])])}
    rows = []
    command = [sys.executable, "-m", "ops.bench.transfer_host", "--host"]
    for in_flight in args.in_flight:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            path = process.stdout.readline().strip()
            rows.append(asyncio.run(measure(path, process.pid, in_flight, args.seconds)))
            print("  ".join(f"{name} {value:,.4g}" for name, value in rows[-1].items()), flush=True)
            process.stdin.close()
    if args.out:
        Path(args.out).write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
