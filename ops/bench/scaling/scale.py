"""What a decision of the controller costs, by the number of decode replicas: with room for all, and in a full cluster.

The machine is driven directly with everything it would hear: admissions with prefix hashes and sessions, seals,
hand-overs, openings, ends, a heartbeat a second from every replica, ticks. Each `step` is timed with this thread's
CPU clock, so that a busy machine does not count; engines are a formula (a request ends when its tokens at 25 ms each
are out).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.controller.events import Event, Reply, Tick
from actors.controller.gc_tuning import tune_gc
from actors.controller.machine import Machine
from actors.controller.status import audit
from actors.messages import (
    AdmitRequest,
    Announcement,
    Ended,
    FrontendHeartbeat,
    Join,
    Lease,
    Occupancy,
    Opened,
    OpenedAt,
    Outcome,
    ReplicaHeartbeat,
    Role,
    Seal,
    Sealed,
    StagingStatus,
    Ticket,
    TransferReport,
    Verdict,
    WaitForHandOver,
)
from cluster.json_output import print_json
from cluster.spec import ClusterSpec
from ops.bench import facts
from ops.simulate.announce import announcement
from ops.simulate.traces import Lengths, poisson
from ops.simulate.world import MS, SECOND

TOKEN_NS = 25 * MS
PREFILL_NS = 400 * MS
FRONTENDS = 16
WARM_SHARE = 0.5  # of the time: the cluster fills up, then is measured
LOADS = {"room": 2.0, "full": 5.0}  # requests a second and replica: less, and more, than a replica here can end


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of CPU time a step of one kind."""

    kind: str
    count: int
    mean: float
    p50: float
    p99: float
    worst: float


def spec_for(replicas: int, prefills: int) -> ClusterSpec:
    pool = {"min_replicas": 0}
    return ClusterSpec.parse(
        {
            "model": {"path": "simulated"},
            "pools": {
                "prefill": pool | {"replicas": prefills, "max_replicas": prefills},
                "decode": pool | {"replicas": replicas, "max_replicas": replicas},
            },
            "scaling": {"mode": "occupancy"},
        }
    )


class Load:
    """The world round the machine, as a heap of things to say to it."""

    def __init__(self, replicas: int, rate: float, seconds: float, seed: int) -> None:
        self.dice = random.Random(seed)
        prefills = max(1, replicas // 4)
        self.machine = Machine(spec_for(replicas, prefills), 1, 0)
        self.taken: dict[str, list[int]] = {}
        self.measuring = False
        self.now_ns = 0
        self.busy = 0
        self._heap: list[tuple[int, int, Any, tuple[Any, ...]]] = []
        self._number = self._calls = 0
        self._wishes: dict[int, tuple[AdmitRequest, int]] = {}
        self._blocks = 2_000
        self._held: dict[str, int] = {}
        for index in range(prefills):
            self._join(f"p{index}", Role.PREFILL)
        for index in range(replicas):
            self._join(f"d{index}", Role.DECODE)
        lengths = Lengths(prompt_median=1_500, output_median=250, prompt_max=32_000)
        for number, arrival in enumerate(poisson(self.dice, rate, seconds, lengths)):
            request = AdmitRequest(
                request_id=f"r{number}",
                frontend_id=f"f{number % FRONTENDS}",
                num_prompt_tokens=arrival.prompt_tokens,
                max_tokens=arrival.max_tokens,
                prefix_hashes=arrival.prefix_hashes,
                session=arrival.session,
                tenant=arrival.tenant,
            )
            self._at(arrival.at_ns, self._admit, request, arrival.output_tokens)
        for index in range(FRONTENDS):
            self._at(index * MS, self._frontend, f"f{index}")
        self._at(0, self._tick)
        self.end_ns = int(seconds * SECOND)

    def _at(self, when_ns: int, action: Any, *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_ns, self._number, action, args))

    def run(self) -> None:
        while self._heap and self._heap[0][0] <= self.end_ns:
            self.now_ns, _, action, args = heapq.heappop(self._heap)
            self.measuring = self.now_ns >= self.end_ns * WARM_SHARE
            action(*args)

    def say(self, event: Event, call_id: int = 0) -> None:
        began = time.thread_time_ns()
        effects = self.machine.step(event, self.now_ns, call_id)
        took = time.thread_time_ns() - began
        if self.measuring:
            self.taken.setdefault(type(event).__name__, []).append(took)
        for effect in effects:
            if isinstance(effect, Reply) and (wish := self._wishes.pop(effect.call_id, None)) is not None:
                self._granted(effect.value, *wish)

    def _call(self) -> int:
        self._calls += 1
        return self._calls

    def _join(self, name: str, role: Role) -> None:
        place = f"n{len(self._held) % 125}"
        self.say(Join(announcement(name, role, place, self._blocks)), self._call())
        self._held[name] = 0
        self._at(self.dice.randrange(SECOND), self._beat, name)

    def _beat(self, name: str) -> None:
        held = min(self._held[name], self._blocks)
        seen = Occupancy(blocks_total=self._blocks, blocks_free=self._blocks - held, blocks_held=held)
        self.say(ReplicaHeartbeat(replica_id=name, incarnation=1, occupancy=seen), self._call())
        self._at(self.now_ns + SECOND, self._beat, name)

    def _tick(self) -> None:
        self.say(Tick())
        self._at(self.now_ns + SECOND // 10, self._tick)

    def _frontend(self, name: str) -> None:
        live = tuple(self.machine.registry.by_frontend.get(name, ()))
        self.say(FrontendHeartbeat(name, live), self._call())
        self._at(self.now_ns + SECOND, self._frontend, name)

    def _admit(self, request: AdmitRequest, output: int) -> None:
        call = self._call()
        self._wishes[call] = (request, output)
        self.say(request, call)

    def _granted(self, answer: Any, request: AdmitRequest, output: int) -> None:
        if isinstance(answer, Ticket):
            self._at(self.now_ns + PREFILL_NS, self._sealed, answer, request, output)
        else:
            self.busy += 1

    def _sealed(self, ticket: Ticket, request: AdmitRequest, output: int) -> None:
        blocks = (request.num_prompt_tokens + output) // 32 + 1
        self._held[ticket.decode] += blocks
        key = {"ticket_id": ticket.ticket_id, "attempt": 1}
        if ticket.prefill is not None:
            digests = (tuple(range(request.num_prompt_tokens // 32 + 1)),)
            seal = Seal(**key, layout_fingerprint="x", num_tokens=request.num_prompt_tokens, digests=digests)
            lease = Lease(**key, node_id=ticket.prefill_node, segment="s", offset=0, num_bytes=4096)
            self.say(WaitForHandOver(ticket.ticket_id, 1, 1.0), self._call())
            self.say(TransferReport(self._status(ticket.prefill_node), (Sealed(seal=seal, lease=lease),)), self._call())
            opened = Opened(
                **key,
                replica_id=ticket.decode,
                num_pages=len(digests[0]),
                num_bytes=4096,
                num_tokens=request.num_prompt_tokens,
                verdicts={Verdict.OK: len(digests[0])},
                seconds=0.002,
            )
            self.say(TransferReport(self._status(ticket.decode_node), (OpenedAt(opened=opened),)), self._call())
        self._at(self.now_ns + output * TOKEN_NS, self._ended, ticket, output, blocks)

    @staticmethod
    def _status(node: str) -> StagingStatus:
        return StagingStatus(node_id=node, incarnation=1, bytes_held=0, bytes_max=1 << 30, leases=0)

    def _ended(self, ticket: Ticket, output: int, blocks: int) -> None:
        self._held[ticket.decode] -= blocks
        self.say(Ended(ticket.ticket_id, Outcome.DONE, output))


def measure(replicas: int, rate: float, seconds: float, seed: int = 0) -> dict[str, Any]:
    load = Load(replicas, rate, seconds, seed)
    tune_gc()
    load.run()
    rows = []
    for kind, taken in sorted(load.taken.items()):
        taken.sort()
        rows.append(
            Times(
                kind,
                len(taken),
                round(sum(taken) / len(taken) / 1e3, 1),
                round(taken[len(taken) // 2] / 1e3, 1),
                round(taken[int(len(taken) * 0.99)] / 1e3, 1),
                round(taken[-1] / 1e3, 1),
            )
        )
    measured_s = seconds * (1 - WARM_SHARE)
    busy_s = sum(sum(taken) for taken in load.taken.values()) / SECOND
    found = audit(load.machine)
    return {
        "replicas": replicas,
        "rate_per_s": rate,
        "seconds": seconds,
        "live_tickets": len(load.machine.registry.tickets),
        "waiting": len(load.machine.queue),
        "busy_answers": load.busy,
        "share_of_one_core": round(busy_s / measured_s, 3),
        "audit_clean": found["clean"],
        "breaches": found["breaches"][:5],
        "steps": [{name: getattr(row, name) for name in Times.__slots__} for row in rows],
    }


def measure_all(sizes: list[int], seconds: float, seed: int = 0) -> dict[str, Any]:
    """Every size with every load."""
    runs = [
        {"load": load, **measure(replicas, rate * replicas, seconds, seed)}
        for load, rate in LOADS.items()
        for replicas in sizes
    ]
    numbers = ",".join(str(size) for size in sizes)
    command = f"pageferry simulate scale --replicas {numbers} --seconds {seconds:g} --seed {seed}"
    return {**facts.gather([]), "command": command, "bytes_a_ticket": memory_a_ticket(), "runs": runs}


def memory_a_ticket(count: int = 500) -> int:
    """Bytes that one more live ticket with 64 prefix hashes takes in the controller (traced allocations)."""
    import tracemalloc

    machine = Load(100, 1.0, 0.0, 0).machine
    for replica in machine.registry.replicas.values():
        object.__setattr__(replica, "announcement", _vast(replica.announcement))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        hashes = tuple(hash((number, page)) for page in range(64))
        request = AdmitRequest(
            request_id=f"m{number}",
            frontend_id="f",
            num_prompt_tokens=2_048,
            max_tokens=256,
            prefix_hashes=hashes,
            disaggregate=False,  # prefill takes as many prompts at once as it computes soon
        )
        machine.step(request, 0, number + 1)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(machine.registry.tickets) == count, "every request found room"
    return used // count


def _vast(announcement: Announcement) -> Announcement:
    import msgspec

    return msgspec.structs.replace(announcement, blocks_total=1 << 30, max_num_seqs=1 << 20)


def table(record: dict[str, Any]) -> str:
    lines = [
        "| load | decode replicas | live tickets | of one core | step | count | mean us | p50 us | p99 us | worst us |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for run in record["runs"]:
        head = f"| {run['load']} | {run['replicas']:,} | {run['live_tickets']:,} | {run['share_of_one_core']:.0%} "
        for row in run["steps"]:
            times = f"{row['mean']} | {row['p50']} | {row['p99']} | {row['worst']}"
            lines.append(f"{head}| {row['kind']} | {row['count']:,} | {times} |")
    return "\n".join(lines) + "\n"


def main(args: argparse.Namespace) -> int:
    record = measure_all([int(size) for size in str(args.replicas).split(",")], args.seconds, args.seed)
    if args.json:
        print_json(record)
    else:
        print(table(record))
    for path, text in ((args.markdown, table(record)), (args.record, json.dumps(record, indent=1) + "\n")):
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
    if args.plot:
        from ops.bench.scaling.plots import plot_decisions

        plot_decisions(record["runs"], Path(args.plot) / "controller-decisions.png")
    return 0 if all(run["audit_clean"] for run in record["runs"]) else 1
