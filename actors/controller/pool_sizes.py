"""How many replicas the platform holds of each pool, what it was asked for, and which replicas are on their way. Pure.

The platform (Ray Serve) asks once a second and says with each question what it holds: that is the truth here,
whatever set it. A wish is answered until the platform holds it; one that it does not take counts as refused. A replica
announces itself before it loads its engine, so one without room on any node differs from one that starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.controller.journal import Tracked, TrackedDict, TrackedList
from actors.messages import ReplicaId, Role

SECOND = 1_000_000_000
UNKNOWN_NS = 10 * SECOND  # the platform silent for longer: what it holds is not known
TAKEN_NS = 8 * SECOND  # a wish not taken after this has been refused
RETRY_NS = 5 * SECOND  # no new wish for this long after a refusal
UNPLACED_NS = 8 * SECOND  # ordered, and no process announced itself: there is no room for it
SILENT_NS = 15 * SECOND  # a starting replica says so every few seconds


@dataclass(slots=True)
class _Starting(Tracked):
    ordered_ns: int
    heard_ns: int


@dataclass(slots=True)
class Wish(Tracked):
    target: int
    asked_ns: int = 0  # when the platform was first answered so; 0: not yet


@dataclass(slots=True)
class _Pool(Tracked):
    target: int | None = None
    current: int = 0  # running, as the platform sees them
    heard_ns: int = 0
    wish: Wish | None = None
    refused: str = ""
    refused_until_ns: int = 0
    placed: int = 0
    changed_ns: int = 0  # of `target` or `placed`
    unplaced: int = 0
    ordered: TrackedList[int] = field(
        default_factory=TrackedList
    )  # when replicas that have not announced themselves were ordered
    starting: TrackedDict[ReplicaId, _Starting] = field(default_factory=TrackedDict)
    start_up_ns: int = 0  # from order to joined, as seen; 0: none yet


class PoolSizes(Tracked):
    """`first`: sizes to ask for once, of an application that starts; none after a restart of the controller."""

    def __init__(self, first: dict[Role, int] | None = None) -> None:
        self._pools = {role: _Pool() for role in Role}
        for role, target in (first or {}).items():
            self.want(role, target)

    # -- the platform

    def hear(self, role: Role, current: int, target: int, now_ns: int) -> tuple[int | None, str]:
        """The platform says what it holds. Returns what it should hold (None: as it is), and what there is to log."""
        pool = self._pools[role]
        before = current if pool.target is None else pool.target
        if target != pool.target:
            pool.changed_ns = now_ns
            for _ in range(target - before):
                pool.ordered.append(now_ns)
            while len(pool.ordered) > max(0, target - current):
                pool.ordered.pop()
        if pool.heard_ns and now_ns - pool.heard_ns > UNKNOWN_NS:
            pool.wish = None  # decided from what it held before it was silent
        pool.target, pool.current, pool.heard_ns = target, current, now_ns
        wish = pool.wish
        if wish is None:
            return None, ""
        if target == wish.target:
            pool.wish, pool.refused = None, ""
            return None, ""
        wish.asked_ns = wish.asked_ns or now_ns
        if now_ns - wish.asked_ns <= TAKEN_NS:
            return wish.target, ""
        pool.wish, pool.refused_until_ns = None, now_ns + RETRY_NS
        pool.refused = f"the platform holds {target} and did not take {wish.target} within {TAKEN_NS // SECOND} s"
        return None, f"{role}: {pool.refused}"

    def want(self, role: Role, target: int) -> None:
        self._pools[role].wish = Wish(target)

    def target(self, role: Role, now_ns: int) -> int | None:
        """What the platform holds; None while that is not known."""
        pool = self._pools[role]
        return None if pool.target is None or now_ns - pool.heard_ns > UNKNOWN_NS else pool.target

    def current(self, role: Role) -> int:
        return self._pools[role].current

    def wanted(self, role: Role) -> int | None:
        """What the platform was asked for and has not taken yet."""
        wish = self._pools[role].wish
        return None if wish is None else wish.target

    def refused(self, role: Role, now_ns: int) -> str:
        pool = self._pools[role]
        return pool.refused if now_ns < pool.refused_until_ns else ""

    # -- replicas

    def starting(self, role: Role, replica_id: ReplicaId, now_ns: int) -> None:
        """A replica's process is there and loads its engine."""
        pool = self._pools[role]
        if (known := pool.starting.get(replica_id)) is not None:
            known.heard_ns = now_ns
            return
        pool.starting[replica_id] = _Starting(pool.ordered.pop(0) if pool.ordered else now_ns, now_ns)

    def joined(self, role: Role, replica_id: ReplicaId, now_ns: int) -> None:
        pool = self._pools[role]
        if (began := pool.starting.pop(replica_id, None)) is not None:
            took = now_ns - began.ordered_ns
            # A longer one counts at once, a shorter one by and by: who waits for a replica shall not wait too short.
            pool.start_up_ns = max(took, pool.start_up_ns - (pool.start_up_ns - took) // 4)

    def start_up_ns(self, role: Role) -> int:
        """From the order of a replica to its first ticket, as it was seen; 0: not seen yet."""
        return self._pools[role].start_up_ns

    def num_starting(self, role: Role) -> int:
        return len(self._pools[role].starting)

    def unplaced(self, role: Role) -> int:
        """Replicas that the platform holds on paper and found no room for."""
        return self._pools[role].unplaced

    def arriving(self, role: Role, now_ns: int, else_ns: int) -> list[int]:
        """When each replica on its way should join, soonest first. `else_ns`: start-up time while none was seen."""
        pool = self._pools[role]
        took = pool.start_up_ns or else_ns
        placed = [began.ordered_ns for began in pool.starting.values()]
        ordered = [] if pool.unplaced else list(pool.ordered)
        return sorted(max(now_ns, when + took) for when in (*placed, *ordered))

    def shift(self, gap_ns: int) -> None:
        """This process was away for so long and received nothing."""
        for pool in self._pools.values():
            pool.changed_ns += gap_ns
            for began in pool.starting.values():
                began.heard_ns += gap_ns

    def look(self, members: Iterable[tuple[Role, bool]], now_ns: int) -> list[str]:
        """`members`: pool and whether it stays, of all joined replicas. Returns what there is to log."""
        joined = dict.fromkeys(Role, 0)
        for role, stays in members:
            joined[role] += stays
        lines = []
        for role, pool in self._pools.items():
            for replica_id in [r for r, each in pool.starting.items() if now_ns - each.heard_ns > SILENT_NS]:
                del pool.starting[replica_id]
            placed = joined[role] + len(pool.starting)
            if placed != pool.placed:
                pool.placed, pool.changed_ns = placed, now_ns
            if (target := self.target(role, now_ns)) is None:
                continue
            missing = max(0, target - placed)
            unplaced = missing if now_ns - pool.changed_ns > UNPLACED_NS else min(pool.unplaced, missing)
            if unplaced > pool.unplaced:
                lines.append(f"{role}: {self.unplaced_text(role, unplaced)}")
            elif pool.unplaced and not unplaced:
                lines.append(f"{role}: all {target} replicas have found room")
            pool.unplaced = unplaced
        return lines

    def unplaced_text(self, role: Role, count: int | None = None) -> str:
        pool = self._pools[role]
        count = pool.unplaced if count is None else count
        return f"{count} of {pool.target} replicas found no room on any node (CPUs, GPUs or custom resources are short)"
