"""Faults into a running service, for tests and `pageferry chaos`: only where `faults.kinds` names kinds.

`POST /faults` with `{"kind": ..., "victim": ..., "trial": 0, "more": 0}`. `victim` is a part of a request's id (as its
answer has it, or as `X-Request-Id` set it) while the request is under way. Kinds: `cluster.fault_kinds.PageFault`;
those of the tables and of the pool happen at once, those of the transfer when the request's ticket passes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from actors.messages import ReplicaId
from app.request.core_client import FerryCoreClient
from cluster.fault_kinds import Guard, Side, page_fault

AT_ONCE = (Guard.TAGS, Guard.LEDGER, Guard.PROOFS)  # their victim is a request in an engine; others have a ticket

Plant = Callable[[bool, ReplicaId, str, int, "str | int", float], Awaitable[dict[str, Any]]]


class NoVictim(LookupError):
    """No request of that name is under way here."""


async def plant(client: FerryCoreClient, send: Plant, kind: str, victim: str, trial: int, more: float) -> Any:
    """What was done, from the engine; `send(to_prefill, replica_id, kind, trial, target, more)` reaches one.

    Raises `NoVictim`, and `FaultError` for a kind that is unknown or not allowed.
    """
    fault = page_fault(kind)
    run = next((run for name, run in client.runs.items() if victim in name and run.place is not None), None)
    if run is None or run.place is None:
        raise NoVictim(f"no request {victim!r} is under way on this frontend")
    ticket, engine_id = run.place
    to_prefill = fault.side is Side.PREFILL
    replica = ticket.prefill if to_prefill else ticket.decode
    if replica is None:
        raise NoVictim(f"request {victim!r} has no prefill replica")
    target: str | int = engine_id if fault.guard in AT_ONCE else ticket.ticket_id
    return await send(to_prefill, replica, kind, trial, target, more)
