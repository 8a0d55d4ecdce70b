"""What Ray Serve does for us: holds pools at their targets, replaces what died, drains what must go."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from actors.messages import PlatformSize, ReplicaLeft, Role
from ops.simulate.decode import DecodeSim
from ops.simulate.prefill import PrefillSim
from ops.simulate.replica import ReplicaSim
from ops.simulate.world import MS, SECOND, Process

if TYPE_CHECKING:
    from ops.simulate.cluster import ClusterSim

LOOK_NS = SECOND // 2  # how often it looks at its replicas
ASK_NS = SECOND // 4  # how often it asks for the pools' sizes
STOP_AFTER_NS = 60 * SECOND  # a draining replica that is never empty is stopped (Serve's graceful shutdown)


class Platform:
    def __init__(self, cluster: ClusterSim) -> None:
        self.cluster = cluster
        self.process = Process(cluster.world, "platform")
        pools = cluster.spec.pools
        self.targets = {Role.PREFILL: pools.prefill.replicas, Role.DECODE: pools.decode.replicas}
        self.members: dict[Role, list[ReplicaSim]] = {Role.PREFILL: [], Role.DECODE: []}
        self.coming: dict[Role, list[int]] = {Role.PREFILL: [], Role.DECODE: []}  # being started, oldest first
        self._orders = 0
        self.leaving: list[tuple[ReplicaSim, int]] = []
        self.refusing = False
        self.replica_ns = {Role.PREFILL: 0, Role.DECODE: 0}  # paid for: from the order on, until it is gone
        self._number = 0
        self._last_ns = 0

    def begin(self) -> None:
        for role, count in self.targets.items():
            for _ in range(count):
                self._start(role)
        self.cluster.world.at(LOOK_NS, self._look)
        self._ask()

    def _start(self, role: Role) -> None:
        cluster, shape = self.cluster, self.cluster.scenario.shape
        self._number += 1
        name = f"{role}-{self._number}"
        node = cluster.nodes[self._number % len(cluster.nodes)]
        blocks = shape.prefill_blocks if role is Role.PREFILL else shape.decode_blocks
        facts = {"blocks_total": blocks, "block_tokens": shape.block_tokens, "max_seqs": shape.max_seqs}
        make = PrefillSim if role is Role.PREFILL else DecodeSim
        replica = make(cluster.world, cluster.net, name, node, cluster.model, cluster.costs[role], facts)
        replica.on_fenced = self._replace
        if isinstance(replica, DecodeSim):
            replica.quantum = cluster.quantum
            replica.open_page_ns = shape.open_page_ns
            replica.verdicts = cluster.findings.verdicts
            if shape.ledger:
                replica.keep_pages()
        self.members[role].append(replica)
        cluster.replicas[name] = replica
        replica.start(cluster.controller)

    def _replace(self, replica: ReplicaSim) -> None:
        """A health check failed."""
        if replica.alive:
            self.cluster.end_process(replica)

    def replace(self, kind: str, name: str) -> None:
        """By the controller's wish: that process hangs."""
        if kind == "replica" and (replica := self.cluster.replicas.get(name)) is not None:
            self.cluster.world.at(20 * MS, self._replace, replica)
        elif kind == "transfer" and (node := self.cluster.peers.get(name)) is not None and node.alive:
            node.die()
            self.cluster.world.at(500 * MS, node.reborn)

    def _ask(self) -> None:
        """As Serve's autoscaling policy does: says what each pool has, and takes what it is asked for."""
        for role, members in self.members.items():
            running = sum(member.alive and not member.leaving for member in members)
            message = PlatformSize(role, running, self.targets[role])
            self.cluster.controller.call(self.process, message, partial(self._take, role))
        self.cluster.world.at(ASK_NS, self._ask)

    def _take(self, role: Role, wanted: int | None) -> None:
        if wanted is not None and not self.refusing:
            self.targets[role] = wanted

    def forget(self) -> None:
        """As after a new deployment: every pool is back at its configured size, whatever was asked for since."""
        pools = self.cluster.spec.pools
        self.targets = {Role.PREFILL: pools.prefill.replicas, Role.DECODE: pools.decode.replicas}

    def _look(self) -> None:
        now_ns = self.cluster.world.now_ns
        start_ns = int(self.cluster.scenario.shape.start_s * SECOND)
        for role, members in self.members.items():
            self.replica_ns[role] += (len(members) + len(self.coming[role])) * (now_ns - self._last_ns)
            for replica in [member for member in members if not member.alive]:
                members.remove(replica)
                del self.cluster.replicas[replica.name]
                self.leaving = [(r, since) for r, since in self.leaving if r is not replica]
            staying = [member for member in members if not member.leaving]
            coming = self.coming[role]
            missing = self.targets[role] - len(staying) - len(coming)
            for _ in range(missing):
                self._orders += 1
                coming.append(self._orders)
                self.cluster.world.at(start_ns, self._arrive, role, self._orders)
            for _ in range(-missing):  # what has not started yet goes first, as with Serve
                if coming:
                    coming.pop()
                elif staying:
                    self._drain(staying.pop())
        self._last_ns = now_ns
        for replica, since_ns in list(self.leaving):
            late = now_ns - since_ns > STOP_AFTER_NS
            if replica.alive and not replica.hung and (late or (replica.empty and now_ns - since_ns > 2 * SECOND)):
                self.leaving.remove((replica, since_ns))
                self.cluster.controller.call(replica, ReplicaLeft(replica.name, replica.life))
                self.cluster.world.at(10 * MS, self._stop, replica)
        self.cluster.world.at(LOOK_NS, self._look)

    def _stop(self, replica: ReplicaSim) -> None:
        if replica.alive:
            replica.die()

    def _arrive(self, role: Role, order: int) -> None:
        if order in self.coming[role]:
            self.coming[role].remove(order)
            self._start(role)

    def _drain(self, replica: ReplicaSim) -> None:
        replica.leaving = True
        self.leaving.append((replica, self.cluster.world.now_ns))
        for frontend in self.cluster.frontends:
            if frontend.alive:
                frontend.later(20 * MS, frontend.replicas_left, [replica.name])
