"""What must hold after a run, whatever happened in it. The checkers know no faults but the page mismatches planted.

1. Every request whose frontend lives has ended, exactly once.
2. A request that ended as done showed its client every token of every sequence once, in order, and no other.
3. No client saw a token twice, a gap or a wrong token, however its request ended.
4. When all is quiet everything has been given back: tickets, waiting calls, queue, staging, KV blocks, engine jobs.
5. The controller's and the transfer machines' laws held at every audit; so did those of the page ledger: free, held and
   quarantined pages are all pages, no page has two owners, none that is held is free, no tag has two lives.
6. Usage is counted once: the controllers' lives together counted no more ends than there were requests, and all of
   them where no controller and no frontend died.
7. No request failed while the cluster had what it needed. Allowed are: `page_integrity` where a mismatch was planted,
   `not_resumable` for random sampling that had put out tokens, and `engine_death` where three engines have died.
8. No page that was opened held other bytes than its seal says, and no exception was left unhandled.
9. No process wrote or read staging bytes that were not its ticket's then, no seal of one attempt was used for
   another, and no request gave up a decode replica that was well. These are seen as they happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.messages import Role, Verdict
from ops.simulate.clients import Record
from ops.simulate.cluster import ClusterSim
from ops.simulate.decode import DecodeSim
from ops.simulate.prefill import PrefillSim


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
    for record in cluster.records:
        _request(cluster, record, found)
    leaked = leaks(cluster)
    found.leaked = len(leaked)
    found.violations += leaked
    found.violations += cluster.findings.violations
    found.violations += cluster.controller.violations
    found.violations += cluster.world.violations
    for replica in cluster.pool(Role.DECODE):
        if isinstance(replica, DecodeSim):
            found.violations += replica.violations()
    if wrong := cluster.findings.verdicts.get(Verdict.MISMATCH):
        found.violations.append(f"{wrong} times a page held other bytes than its seal when it was opened")
    _usage(cluster, found)
    return found


def _request(cluster: ClusterSim, record: Record, found: Verdicts) -> None:
    name = record.request_id
    found.outcomes[record.outcome or "open"] = found.outcomes.get(record.outcome or "open", 0) + 1
    if record.ends == 0:
        found.lost += 1
        found.violations.append(f"{name} never ended, at position {record.position}")
    elif record.ends > 1:
        found.violations.append(f"{name} ended {record.ends} times")
    for sequence in record.sequences:
        if sequence.duplicated:
            found.duplicated += sequence.duplicated
            found.violations.append(f"{sequence.request_id}: {sequence.duplicated} tokens came twice")
        if sequence.missing:
            found.violations.append(f"{sequence.request_id}: {sequence.missing} tokens are missing")
        if sequence.wrong:
            found.violations.append(f"{sequence.request_id}: {sequence.wrong} tokens are wrong")
        if record.outcome == "done" and sequence.position != sequence.last:
            place = f"{sequence.position} of {sequence.last} tokens"
            found.violations.append(f"{sequence.request_id} is done with {place}")
    planted = any(sequence.request_id in cluster.findings.mismatched for sequence in record.sequences)
    without_cause = (record.outcome == "page_integrity" and not planted) or (
        record.outcome == "engine_death" and cluster.engine_deaths < 3
    )
    if record.outcome == "failed" or without_cause:
        found.lost += 1
        found.violations.append(f"{name} failed: {record.detail}")


def leaks(cluster: ClusterSim) -> list[str]:
    """What has not been given back."""
    machine = cluster.controller.machine
    leaks = [f"ticket {ticket_id} lives on as {live.state}" for ticket_id, live in machine.registry.tickets.items()]
    leaks += [f"call {waiting.call_id} still waits" for waiting in machine.queue]
    for node in cluster.nodes:
        staging = node.machine.staging
        if staging.bytes_held:
            keys = [region.key for region in staging]
            leaks.append(f"{node.name} still holds {staging.bytes_held} staging bytes of {keys}")
    for replica in (*cluster.pool(Role.PREFILL), *cluster.pool(Role.DECODE)):
        if isinstance(replica, DecodeSim | PrefillSim) and replica.jobs:
            leaks.append(f"{replica.name} still works on {list(replica.jobs)}")
        if isinstance(replica, DecodeSim) and replica.free != replica.blocks_total:
            leaks.append(f"{replica.name} still holds {replica.blocks_total - replica.free} blocks")
    for record in machine.registry.replicas.values():
        if record.reserved or record.inflight_tokens:
            leaks.append(f"{record.id}: {record.reserved} blocks and {record.inflight_tokens} tokens stay reserved")
    for frontend in cluster.frontends:
        leaks += [f"{frontend.name} still has {request}" for request in frontend.records]
        if (client := frontend.client) is not None:
            leaks += [f"{frontend.name} still drives {request}" for request in client.runs]
            leaks += [f"{frontend.name} still holds ticket {ticket_id}" for ticket_id in client.groups]
    return leaks


def _usage(cluster: ClusterSim, found: Verdicts) -> None:
    totals = cluster.controller.totals()
    done = sum(record.outcome == "done" for record in cluster.records)
    counted = totals.get("done", 0)
    whole = cluster.controller.life == 1 and all(frontend.life == 1 for frontend in cluster.frontends)
    if counted > done or (whole and counted < done):
        found.violations.append(f"{counted:.0f} requests were counted as done, {done} were")
