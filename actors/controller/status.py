"""What the controller knows, as JSON-ready values, for `pageferry status`, `GET /status` and the metrics. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.controller.forecast import SECOND
from actors.controller.machine import Machine
from actors.controller.registry import Replica
from actors.controller.ticket_state import LIVE
from actors.messages import Role
from cluster.metrics import ENGINE_LOSSES

FAULTS_SHOWN = 10


def replica_state(replica: Replica) -> str:
    if replica.fenced:
        return "fenced"
    if replica.draining_since_ns:
        return "draining"
    return "stale" if replica.stale else "ready" if replica.ready_ns else "starting"


def _replica(replica: Replica, now_ns: int) -> dict[str, Any]:
    facts, seen = replica.announcement, replica.occupancy
    return {
        "replica_id": replica.id,
        "state": replica_state(replica),
        "node_id": facts.node_id,
        "incarnation": facts.incarnation,
        "generation": facts.generation,
        "tokenizer": facts.fingerprint.tokenizer,
        "blocks_total": seen.blocks_total,
        "blocks_free": seen.blocks_free,
        "blocks_held": seen.blocks_held,
        "blocks_quarantined": seen.blocks_quarantined,
        "blocks_reserved": replica.reserved,
        "block_tokens": facts.block_tokens,
        "running": seen.running,
        "waiting": seen.waiting,
        "waiting_prompt_tokens": seen.waiting_prompt_tokens,
        "inflight_prompt_tokens": replica.inflight_tokens,
        "tokens_per_s": seen.tokens_per_s,
        "tickets": len(replica.tickets),
        "heard_s_ago": round((now_ns - replica.heard_ns) / SECOND, 3),
        "max_model_len": facts.max_model_len,
        "layout": facts.layout,
        "engine": facts.engine,
        "counters": dict(replica.counters),
    }


def _total(machine: Machine, counter: str) -> float:
    return sum(replica.counters.get(counter, 0) for replica in machine.registry.replicas.values())


def status(machine: Machine, now_ns: int) -> dict[str, Any]:
    registry, scaler = machine.registry, machine.autoscaler
    pools: dict[str, Any] = {}
    for role in Role:
        members = sorted((r for r in registry.replicas.values() if r.role is role), key=lambda r: r.id)
        spec = machine.spec.pools.decode if role is Role.DECODE else machine.spec.pools.prefill
        sizes = scaler.sizes
        pools[str(role)] = {
            "target": sizes.target(role, now_ns),  # None: the platform has not said it
            "wanted": sizes.wanted(role),
            "running": sizes.current(role),
            "starting": sizes.num_starting(role),
            "unplaced": sizes.unplaced(role),
            "start_up_s": round(sizes.start_up_ns(role) / SECOND, 1),
            "bounds": list(spec.bounds),
            "scaling": scaler.reason(role),
            "replicas": [_replica(replica, now_ns) for replica in members],
        }
    nodes = registry.nodes.values()
    there = [node for node in nodes if not node.stale]  # the shared memory of a node that is gone is gone
    return {
        "epoch": machine.epoch,
        "uptime_s": round((now_ns - machine.started_ns) / SECOND, 3),
        "model": machine.spec.model.served_name,
        "pools": pools,
        "tickets": {
            "in_flight": len(registry.tickets),
            "by_state": {str(state): registry.by_state[state] for state in sorted(LIVE)},
            "ended": {name: int(machine.counters.get(name, 0)) for name in ("done", "cancelled", "failed")},
        },
        "queue": {
            "waiting": len(machine.queue),
            "max": machine.spec.admission.queue_max,
            "expected_wait_s": machine.expected_wait_s(now_ns),
            "oldest_s": round(max(((now_ns - w.since_ns) / SECOND for w in machine.queue), default=0.0), 3),
        },
        "staging": {
            "bytes_held": sum(node.status.bytes_held for node in there),
            "bytes_max": sum(node.status.bytes_max for node in there),
            "leases": sum(node.status.leases for node in there),
            "breaches": [breach for node in there for breach in node.status.breaches],
            "nodes": {
                node_id: {"bytes_held": node.status.bytes_held, "bytes_max": node.status.bytes_max, "stale": node.stale}
                for node_id, node in sorted(registry.nodes.items())
            },
        },
        "links": [
            {"to": node_id, **msgspec.structs.asdict(link)}
            for node_id, node in sorted(registry.nodes.items())
            if not node.stale
            for link in node.status.links
        ],
        "local_prefill_max_tokens": _local_prefill(machine),
        "ferry": {
            "bytes_moved": sum(node.bytes_moved_before + node.status.bytes_moved for node in nodes),
            "tokens_moved": sum(node.tokens_moved_before + node.status.tokens_moved for node in nodes),
            "tokens_recomputed": int(machine.counters.get("recomputed_tokens", 0)),
        },
        "stalls_s": {name: round(machine.stalls.of(name, now_ns), 3) for name in sorted(machine.frontends)},
        "engines_lost": {
            str(role): {cause: int(machine.counters.get(f"engines_{cause}_{role}", 0)) for cause in ENGINE_LOSSES}
            for role in Role
        },
        "frontends": {name: round((now_ns - heard) / SECOND, 3) for name, heard in sorted(machine.frontends.items())},
        "scaling": {
            "mode": machine.spec.scaling.mode,
            "decided": [
                {"pool": str(pool), "direction": direction, "cause": cause, "times": times}
                for (pool, direction, cause), times in scaler.decided.items()
            ],
            "decisions": [
                {
                    "s_ago": round((now_ns - when) / SECOND, 1),
                    "pool": str(decision.pool),
                    "current": decision.current,
                    "target": decision.target,
                    "reason": decision.reason,
                }
                for when, decision in scaler.decisions
            ],
        },
        "page_faults": _page_faults(machine),
        "counters": dict(sorted(machine.counters.items())),
    }


def _local_prefill(machine: Machine) -> int:
    """Prompts up to this length go to a decode replica without other requests."""
    limit = machine.spec.admission.local_prefill_max_tokens
    return machine.forecast.local_prefill_tokens(0) if limit is None else limit


def _page_faults(machine: Machine) -> list[dict[str, Any]]:
    """The latest requests that were ended because a page was not their own, oldest first."""
    return [
        {
            "uptime_s": round((each.when_ns - machine.started_ns) / SECOND, 1),
            "pool": str(each.role),
            "replica_id": each.replica,
            "request_id": each.request_id,
            "detail": each.detail,
        }
        for each in list(machine.mismatches)[-FAULTS_SHOWN:]
    ]


def audit(machine: Machine) -> dict[str, Any]:
    """Every conservation law, checked now. `clean` is what tests and `pageferry status --audit` look at."""
    registry = machine.registry
    breaches = registry.breaches()
    breaches += [
        f"{replica.id} is {replica_state(replica)} and {'missing from' if replica.usable else 'still in'} the index"
        for replica in registry.replicas.values()
        if replica.usable != machine.selector.indexed(replica)
    ]
    counts = machine.counters
    opened = counts.get("admitted", 0) + counts.get("claimed", 0)
    ended = sum(counts.get(name, 0) for name in ("done", "cancelled", "failed"))
    if opened != ended + len(registry.tickets):
        breaches.append(f"{opened:.0f} tickets opened, {ended:.0f} ended and {len(registry.tickets)} live")
    breaches += [breach for node in registry.nodes.values() for breach in node.status.breaches]
    return {
        "clean": not breaches,
        "breaches": breaches,
        "tickets_live": len(registry.tickets),
        "tickets_issued": int(counts.get("admitted", 0)),
        "tickets_ended": int(ended),
        "queue": len(machine.queue),
        "replicas": {
            replica.id: {
                "pool": str(replica.role),
                "state": replica_state(replica),
                "laws_broken": [
                    breach for breach in breaches if breach.startswith((f"{replica.id}: ", f"{replica.id} "))
                ],
                "tickets": sorted(replica.tickets),
                "blocks_reserved": replica.reserved,
                "blocks_held": replica.occupancy.blocks_held,
                "blocks_total": replica.occupancy.blocks_total,
                "blocks_free": replica.occupancy.blocks_free,
                "blocks_quarantined": replica.occupancy.blocks_quarantined,
                "pages_known": len(replica.book.pages),
                "page_owners_known": len(replica.book.owners),
                "pages_taken_while_owned": replica.book.suspicions,
            }
            for replica in registry.replicas.values()
        },
        "tag_mismatches": [
            {
                "uptime_s": round((each.when_ns - machine.started_ns) / SECOND, 1),
                "pool": str(each.role),
                "replica_id": each.replica,
                "request_id": each.request_id,
                "ticket_id": each.ticket_id,
                "detail": each.detail,
                "page_known": each.known and each.known[0],
                "tag_known": each.known and f"{each.known[1]:#x}",
            }
            for each in machine.mismatches
        ],
        "staging": {
            node_id: {"leases": node.status.leases, "bytes_held": node.status.bytes_held}
            for node_id, node in sorted(registry.nodes.items())
        },
    }


def pages(machine: Machine) -> dict[str, Any]:
    """Every replica's pages by owner, as the engines have reported them."""
    tickets = machine.registry.tickets
    return {
        replica.id: {
            "pool": str(replica.role),
            "state": replica_state(replica),
            "blocks_total": replica.occupancy.blocks_total,
            "blocks_free": replica.occupancy.blocks_free,
            "blocks_held": replica.occupancy.blocks_held,
            "blocks_quarantined": replica.occupancy.blocks_quarantined,
            "shared": sorted(page for page, known in replica.book.pages.items() if known.owners > 1),
            "owners": [
                {
                    "request_id": request_id,
                    "ticket_id": (ticket_id := replica.book.tickets.get(request_id, 0)),
                    "ticket_state": str(tickets[ticket_id].state) if ticket_id in tickets else "ended",
                    "pages": list(owned),
                }
                for request_id, owned in replica.book.owners.items()
            ],
        }
        for replica in sorted(machine.registry.replicas.values(), key=lambda each: (each.role, each.id))
    }
