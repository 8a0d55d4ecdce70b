"""What must hold after a run, whatever happened in it. The checkers know nothing of faults.

1. Every request whose frontend lives has ended, exactly once.
2. A request that ended as done showed its client every position once, in order, none missing.
3. No client saw a position twice or with a gap, however its request ended.
4. When all is quiet everything has been given back: tickets, waiting calls, queue, staging, KV blocks, engine jobs.
5. The controller's conservation laws held at every audit; so did the allocators', and those of the page ledger: free,
   held and quarantined pages are all pages, no page has two owners, none that is held is free, no tag has two lives.
6. Usage is counted once: the controllers' lives together counted no more ends than there were requests.
7. No request failed while the cluster had what it needed: `failed` is a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.messages import Role
from ops.simulate.cluster import ClusterSim
from ops.simulate.engines import DecodeSim, PrefillSim


@dataclass(slots=True)
class Verdicts:
    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    leaked: int = 0
    violations: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not (self.violations or self.lost or self.duplicated or self.leaked)

    def to_dict(self) -> dict[str, Any]:
        return {
            "violations": len(self.violations),
            "requests": self.requests,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "leaked": self.leaked,
            "outcomes": self.outcomes,
            "first_violations": self.violations[:10],
        }


def check(cluster: ClusterSim) -> Verdicts:
    found = Verdicts(requests=len(cluster.records))
    _requests(cluster, found)
    _leaks(cluster, found)
    found.violations += cluster.findings.violations
    found.violations += cluster.controller.breaches
    _usage(cluster, found)
    return found


def _requests(cluster: ClusterSim, found: Verdicts) -> None:
    for record in cluster.records:
        name = record.request_id
        found.outcomes[record.outcome or "open"] = found.outcomes.get(record.outcome or "open", 0) + 1
        if record.ends == 0:
            found.lost += 1
            found.violations.append(f"{name} never ended, at position {record.next_position}")
        elif record.ends > 1:
            found.violations.append(f"{name} ended {record.ends} times")
        if record.duplicated:
            found.duplicated += record.duplicated
            found.violations.append(f"{name}: {record.duplicated} positions came twice")
        if record.gaps:
            found.violations.append(f"{name}: {record.gaps} positions are missing")
        if record.outcome == "done" and record.next_position != record.output_tokens:
            found.violations.append(f"{name} is done with {record.next_position} of {record.output_tokens} tokens")
        if record.outcome == "failed":
            found.lost += 1
            found.violations.append(f"{name} failed: {record.detail}")


def _leaks(cluster: ClusterSim, found: Verdicts) -> None:
    machine = cluster.controller.machine
    leaks: list[str] = []
    leaks += [f"ticket {ticket_id} lives on as {live.state}" for ticket_id, live in machine.registry.tickets.items()]
    leaks += [f"call {waiting.call_id} still waits" for waiting in machine.room]
    for node in cluster.nodes:
        if node.staging.bytes_held:
            keys = [region.key for region in node.staging]
            leaks.append(f"{node.name} still holds {node.staging.bytes_held} staging bytes of {keys}")
    for replica in (*cluster.pool(Role.PREFILL), *cluster.pool(Role.DECODE)):
        if isinstance(replica, DecodeSim | PrefillSim) and replica.jobs:
            leaks.append(f"{replica.name} still works on {list(replica.jobs)}")
        if isinstance(replica, DecodeSim) and replica.free != replica.blocks_total:
            leaks.append(f"{replica.name} still holds {replica.blocks_total - replica.free} blocks")
        if isinstance(replica, DecodeSim):
            found.violations += replica.breaches()
    for record in machine.registry.replicas.values():
        if record.reserved or record.inflight_tokens:
            leaks.append(f"{record.id}: {record.reserved} blocks and {record.inflight_tokens} tokens stay reserved")
    for frontend in cluster.frontends:
        leaks += [f"{frontend.name} still tells of {request}" for request in frontend.stories]
    found.leaked += len(leaks)
    found.violations += leaks


def _usage(cluster: ClusterSim, found: Verdicts) -> None:
    totals = cluster.controller.totals()
    done = sum(record.outcome == "done" for record in cluster.records)
    if totals.get("done", 0) > done:
        found.violations.append(f"{totals['done']:.0f} requests were counted as done, {done} were")
