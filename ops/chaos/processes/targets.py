"""Finds the process that a kind is about, in a running service on this machine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from app.processes import marked
from cluster.fault_kinds import Target

TITLES = {
    Target.TRANSFER: "ray::KVTransferActor",
    Target.CONTROLLER: "ray::Controller",
    Target.FRONTEND: "ray::ServeReplica:pageferry:Frontend",
}


class NoTarget(Exception):
    """There is no such process now; it is still being made anew."""


def find(target: Target, status: dict[str, Any], mark: str, rng: random.Random) -> tuple[int, str]:
    """(process id, replica id or title) of one process of this kind."""
    if not target.pool:
        title = TITLES[target]
        pids = sorted(pid for pid in marked(mark) if _title(pid).startswith(title))
        if not pids:
            raise NoTarget(f"no process is called {title}")
        return rng.choice(pids), title
    ready = ready_replicas(status, target.pool)
    if not ready:
        raise NoTarget(f"no {target.pool} replica is ready")
    replica = rng.choice(sorted(ready, key=lambda each: str(each["replica_id"])))
    engine, name = replica["engine"], str(replica["replica_id"])
    replica_pid, worker_pid = int(engine["replica_pid"]), int(engine["worker_pid"])
    if target in (Target.PREFILL, Target.DECODE):
        return replica_pid, name
    if target in (Target.PREFILL_WORKER, Target.DECODE_WORKER):
        return worker_pid, name
    return _core(worker_pid, replica_pid), name


def core_of(status: dict[str, Any], replica_id: str) -> int:
    """The process id of a decode replica's engine core."""
    (engine,) = (r["engine"] for r in status["pools"]["decode"]["replicas"] if r["replica_id"] == replica_id)
    return _core(int(engine["worker_pid"]), int(engine["replica_pid"]))


def _core(worker_pid: int, replica_pid: int) -> int:
    core = worker_pid  # with the executor `uni` the engine core is the worker
    while (parent := _parent(core)) not in (replica_pid, 0, 1):
        core = parent
    return core


def ready_replicas(status: dict[str, Any], pool: str) -> list[dict[str, Any]]:
    return [replica for replica in status["pools"][pool]["replicas"] if replica["state"] == "ready"]


def count(target: Target, mark: str) -> int:
    return sum(_title(pid).startswith(TITLES[target]) for pid in marked(mark))


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
