"""What the real controller actor sustains: hand-overs a second, CPU a hand-over, memory a ticket.

python -m ops.bench.controller [--clients 2] [--seconds 10] [--record FILE --page FILE] [--json]

One controller actor on Ray, as the service makes it, and client processes that say to it what frontends, transfer
actors and replicas say for a hand-over: admit (with the hashes of the prompt's pages), wait for the seal, `Sealed` and
`OpenedAt` in batched transfer reports, prefill and decode starts in batched heartbeats, the end. Every ticket goes
through all its states. No engine runs, so this is the most that one controller can do with these clients; CPU is that
of the whole actor process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from actors.controller.actor import Controller
from actors.controller.events import Event
from actors.messages import (
    AdmitRequest,
    Announcement,
    Ended,
    Fingerprint,
    FrontendHeartbeat,
    HandOver,
    Join,
    Lease,
    Occupancy,
    Opened,
    OpenedAt,
    Outcome,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaHeartbeat,
    Role,
    Seal,
    Sealed,
    StagingStatus,
    Ticket,
    TransferEvent,
    TransferReport,
    Verdict,
    WaitForHandOver,
)
from app.rpc.batching import BatchingHandle
from cluster.json_output import print_json
from cluster.json_output import run as run_json
from cluster.spec import ClusterSpec
from ops.bench import facts
from ops.bench.pages import page
from ops.simulate.announce import LAYOUT

PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 2_048, 64, 32
PREFILLS, DECODES, NODES = 2, 4, 2
BLOCKS = 1 << 22  # never full: the queue is not what is measured
REPORT_S, BEAT_S = 0.01, 0.25
WARM_S = 2.0
OPEN_TICKETS, BATCH = 5_000, 100
TITLE = "The real controller actor on Ray"
INTRO = (
    "One actor as the service makes it, client processes with 32 hand-overs in flight each that send as frontends "
    "do; every ticket goes through all its states (admit with 64 page hashes, wait, `Sealed`, `OpenedAt`, end); "
    "no engines. `decision p99`: CPU of a step of the machine with its effects, all kinds of messages. Bytes: "
    "resident memory of 5,000 tickets that stay open. Before frontends batched their messages it was 312 "
    "hand-overs a second at 2.8 ms of CPU each (366d167): a call of a Ray actor costs it about 0.45 ms here, the "
    "machine's steps of one hand-over 0.2 ms."
)


class Measured(Controller):
    """The controller, and what it costs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps: list[int] = []  # CPU nanoseconds of each decision and what it brought about

    def _run(self, event: Event, call_id: int = 0) -> None:
        began = time.thread_time_ns()
        super()._run(event, call_id)
        self._steps.append(time.thread_time_ns() - began)

    async def steps(self) -> list[int]:
        """Of every step since the last call."""
        taken, self._steps = self._steps, []
        return taken

    async def usage(self) -> tuple[float, int]:
        """CPU seconds of this process, all threads; bytes resident now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return time.process_time(), pages * resource.getpagesize()

    async def profile(self, path: str) -> None:
        """Empty: begin; else write what was found to this file."""
        import cProfile

        if not path:
            self._profile = cProfile.Profile()
            self._profile.enable()
        else:
            self._profile.disable()
            self._profile.dump_stats(path)


@dataclass(frozen=True, slots=True)
class Figures:
    clients: int
    in_flight: int
    seconds: float
    hand_overs: int
    per_second: float
    cpu_share: float  # of one core, the controller's process
    cpu_us: float  # a hand-over
    p50_ms: float  # from admit to the answer of the end, with no work in between
    p99_ms: float
    decision_p99_us: float  # CPU of a step, of all kinds
    alone: int  # sent to decode alone, where prefill's turn would take longer
    failed: int
    ticket_bytes: int  # resident memory a live ticket


class Client:
    """A process that plays a frontend, and the transfer actors and replicas for its own tickets."""

    def __init__(self, name: str, controller: Any) -> None:
        self.name, self.controller = name, controller
        self.requests = BatchingHandle(controller, name)
        self.events: dict[str, list[TransferEvent]] = {}
        self.started: dict[str, list[ReplicaEvent]] = {}
        self.live: set[int] = set()
        self.taken: list[float] = []
        self.failed = self.alone = self.number = self.stamp = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, in_flight: int) -> None:
        loops = [self._report(), self._beat(), self._frontend(), *(self._load() for _ in range(in_flight))]
        self.tasks = [asyncio.create_task(loop) for loop in loops]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        found = await asyncio.gather(*self.tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error

    async def take(self) -> tuple[list[float], int, int]:
        """Seconds of every hand-over since the last call; how many failed, and went to decode alone, ever."""
        taken, self.taken = self.taken, []
        return taken, self.failed, self.alone

    async def keep(self, count: int) -> int:
        """Opens tickets and leaves them open; heartbeats go on, or the controller takes itself for an orphan."""
        given = 0
        for _ in range(0, count, BATCH):
            answers = await asyncio.gather(*(self.requests.call.remote(self._request(False)) for _ in range(BATCH)))
            given += sum(isinstance(answer, Ticket) for answer in answers)
            await self._heartbeat("d0", [])
        return given

    def _request(self, disaggregate: bool = True) -> AdmitRequest:
        """`disaggregate` False: it gets its ticket at once, however busy prefill is."""
        self.number += 1
        base = hash((self.name, self.number)) & (1 << 60) - 1
        return AdmitRequest(
            request_id=f"{self.name}-{self.number}",
            frontend_id=self.name,
            num_prompt_tokens=PROMPT_TOKENS,
            max_tokens=OUTPUT_TOKENS,
            disaggregate=disaggregate,
            prefix_hashes=tuple(base + page for page in range(PROMPT_TOKENS // BLOCK_TOKENS)),
        )

    async def _load(self) -> None:
        while True:
            began = time.perf_counter()
            ticket = await self.requests.call.remote(self._request())
            if not isinstance(ticket, Ticket):
                self.failed += 1
                continue
            if ticket.prefill is None:
                self.alone += 1
                await self.requests.call.remote(Ended(ticket.ticket_id, Outcome.DONE, OUTPUT_TOKENS))
                continue
            self.live.add(ticket.ticket_id)
            wanted = self.requests.call.remote(WaitForHandOver(ticket.ticket_id, ticket.attempt, 10.0))
            self._start(ticket.prefill, ReplicaEventKind.PREFILL_STARTED, ticket)
            self._tell(ticket.prefill_node, self._seal(ticket))
            found = await wanted
            if isinstance(found, HandOver):
                self._tell(ticket.decode_node, self._opened(ticket))
                self._start(ticket.decode, ReplicaEventKind.DECODE_STARTED, ticket)
            self.failed += not isinstance(found, HandOver)
            self.live.discard(ticket.ticket_id)
            await self.requests.call.remote(Ended(ticket.ticket_id, Outcome.DONE, OUTPUT_TOKENS))
            self.taken.append(time.perf_counter() - began)

    def _start(self, replica: str, kind: ReplicaEventKind, ticket: Ticket) -> None:
        self.started.setdefault(replica, []).append(ReplicaEvent(kind=kind, ticket_id=ticket.ticket_id))

    def _tell(self, node: str | None, event: TransferEvent) -> None:
        self.events.setdefault(node or "", []).append(event)

    @staticmethod
    def _seal(ticket: Ticket) -> Sealed:
        key: dict[str, Any] = {"ticket_id": ticket.ticket_id, "attempt": ticket.attempt}
        digests = (tuple((ticket.ticket_id * 31 + page) & (1 << 63) - 1 for page in range(64)),)
        seal = Seal(**key, layout_fingerprint="l", num_tokens=PROMPT_TOKENS, digests=digests)
        return Sealed(
            seal=seal, lease=Lease(**key, node_id=ticket.prefill_node or "", segment="s", offset=0, num_bytes=1)
        )

    @staticmethod
    def _opened(ticket: Ticket) -> OpenedAt:
        pages = PROMPT_TOKENS // BLOCK_TOKENS
        return OpenedAt(
            opened=Opened(
                ticket_id=ticket.ticket_id,
                attempt=ticket.attempt,
                replica_id=ticket.decode,
                num_pages=pages,
                num_bytes=1,
                num_tokens=PROMPT_TOKENS,
                verdicts={Verdict.OK: pages},
                seconds=0.001,
            )
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            events, self.events = self.events, {}
            for node, reported in events.items():
                status = StagingStatus(node_id=node, incarnation=1, bytes_held=0, bytes_max=1 << 30, leases=0)
                await self.controller.call.remote(TransferReport(status, tuple(reported)))

    async def _beat(self) -> None:
        while True:
            started, self.started = self.started, {}
            for name in (f"p{n}" for n in range(PREFILLS)):
                await self._heartbeat(name, started.get(name, []))
            for name in (f"d{n}" for n in range(DECODES)):
                await self._heartbeat(name, started.get(name, []))
            await asyncio.sleep(BEAT_S)

    async def _heartbeat(self, name: str, events: list[ReplicaEvent]) -> None:
        seen = Occupancy(blocks_total=BLOCKS, blocks_free=BLOCKS, blocks_held=0)
        beat = ReplicaHeartbeat(replica_id=name, incarnation=1, occupancy=seen, events=tuple(events))
        await self.controller.call.remote(beat)

    async def _frontend(self) -> None:
        while True:
            reply = await self.controller.call.remote(FrontendHeartbeat(self.name, tuple(self.live), self.stamp))
            self.stamp = reply.stamp
            await asyncio.sleep(1.0)


def announcement(name: str, role: Role, node: int) -> Announcement:
    return Announcement(
        replica_id=name,
        role=role,
        node_id=f"n{node}",
        incarnation=1,
        fingerprint=Fingerprint(geometry={"layers": 2}, tokenizer="t"),
        layout=LAYOUT | {"dtype": "bfloat16" if role is Role.PREFILL else "float8_e4m3fn"},
        block_tokens=BLOCK_TOKENS,
        blocks_total=BLOCKS,
        max_model_len=1 << 17,
    )


def spec() -> ClusterSpec:
    return ClusterSpec.parse(
        {
            "model": {"path": "none"},
            "pools": {"prefill": {"replicas": PREFILLS}, "decode": {"replicas": DECODES}},
            "admission": {"local_prefill_max_tokens": 0, "stale_after_s": 60.0, "fence_after_s": 120.0},
        }
    )


def measure(clients: int, in_flight: int, seconds: float, profile: str = "") -> Figures:
    """Starts a small Ray of its own and ends it."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 lets everything else go first
    ray.init(num_cpus=clients + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        make = ray.remote(Measured).options(max_concurrency=100_000, num_cpus=0)
        controller = make.remote("bench", spec().model_dump_json(), 0)
        for number in range(PREFILLS):
            ray.get(controller.call.remote(Join(announcement(f"p{number}", Role.PREFILL, number % NODES))))
        for number in range(DECODES):
            ray.get(controller.call.remote(Join(announcement(f"d{number}", Role.DECODE, number % NODES))))
        remote = ray.remote(Client).options(num_cpus=0, max_concurrency=1_000)
        load = [remote.remote(f"f{number}", controller) for number in range(clients)]
        ray.get([client.begin.remote(in_flight) for client in load])
        time.sleep(WARM_S)
        ray.get([client.take.remote() for client in load])
        ray.get(controller.steps.remote())
        if profile:
            ray.get(controller.profile.remote(""))
        cpu, _ = ray.get(controller.usage.remote())
        began = time.perf_counter()
        time.sleep(seconds)
        taken = ray.get([client.take.remote() for client in load])
        lasted = time.perf_counter() - began
        used = ray.get(controller.usage.remote())[0] - cpu
        steps = sorted(ray.get(controller.steps.remote()))
        if profile:
            ray.get(controller.profile.remote(os.path.abspath(profile)))
        ray.get([client.end.remote() for client in load])
        times = sorted(one for times, _, _ in taken for one in times)
        before = ray.get(controller.usage.remote())[1]
        kept = ray.get(load[0].keep.remote(OPEN_TICKETS))
        after = ray.get(controller.usage.remote())[1]
    finally:
        ray.shutdown()
    assert kept == OPEN_TICKETS, f"{kept} of {OPEN_TICKETS} tickets were given"
    if not times:
        raise RuntimeError("no hand-over was finished")
    return Figures(
        clients=clients,
        in_flight=clients * in_flight,
        seconds=round(lasted, 2),
        hand_overs=len(times),
        per_second=round(len(times) / lasted, 1),
        cpu_share=round(used / lasted, 3),
        cpu_us=round(used / len(times) * 1e6, 1),
        p50_ms=round(times[len(times) // 2] * 1e3, 2),
        p99_ms=round(times[int(0.99 * len(times))] * 1e3, 2),
        decision_p99_us=round(steps[int(0.99 * len(steps))] / 1e3, 1),
        alone=sum(alone for _, _, alone in taken),
        failed=sum(failed for _, failed, _ in taken),
        ticket_bytes=(after - before) // OPEN_TICKETS,
    )


def table(rows: Sequence[Figures]) -> str:
    lines = [
        "| clients | in flight | hand-overs/s | controller CPU, cores | CPU us a hand-over | p50 ms | p99 ms "
        "| decision p99 us | alone | failed | bytes a ticket |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.clients} | {r.in_flight} | {r.per_second:,.0f} | {r.cpu_share:.2f} | {r.cpu_us:,.0f} | {r.p50_ms:.1f} | "
        f"{r.p99_ms:.1f} | {r.decision_p99_us:,.0f} | {r.alone} | {r.failed} | {r.ticket_bytes:,} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(prog="python -m ops.bench.controller", description=__doc__.split("\n\n")[0])
    make.add_argument("--clients", default="1,2", help="client processes; several counts with commas are several runs")
    make.add_argument("--in-flight", type=int, default=32, help="hand-overs at once, a client")
    make.add_argument("--seconds", type=float, default=10.0, help="measured; as many runs as counts of clients")
    make.add_argument("--profile", default="", help="also write a cProfile of the controller's loop there (slows it)")
    make.add_argument("--record", type=Path, help="also write machine and rows to this file, as JSON")
    make.add_argument("--markdown", type=Path, help="also write the table to this file")
    make.add_argument("--page", type=Path, help="with --record: also write the results page to this file")
    make.add_argument("--json", action="store_true")
    args = make.parse_args(argv)
    counts = [int(text) for text in args.clients.split(",")]
    load = round(os.getloadavg()[0], 2)
    rows = [measure(count, args.in_flight, args.seconds, args.profile) for count in counts]
    context = f"{facts.cpu_model()}, {os.cpu_count()} CPUs, load before {load}, commit {facts.commit()}"
    record = {"machine": context, "commit": facts.commit(), "load": load, "rows": [asdict(row) for row in rows]}
    text = f"`python -m ops.bench.controller --clients {args.clients} --seconds {args.seconds:g}`, {context}\n\n"
    if args.json:
        print_json(record)
    else:
        print(text + table(rows))
    if args.record:
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text + table(rows))
    if args.record and args.page:
        options = f"--clients {args.clients} --seconds {args.seconds:g} --record FILE --page FILE"
        command = f"python -m ops.bench.controller {options}"
        args.page.write_text(page(TITLE, command, [record], args.record, INTRO, table(rows)))
    return 0 if not any(row.failed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(run_json(main, sys.argv[1:]))
