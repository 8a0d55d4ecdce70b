"""A whole cluster in virtual time: processes, a platform that starts, stops and replaces replicas, and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.messages import PlatformSize, ReplicaLeft, Role, Verdict
from ops.simulate.control import ControllerSim
from ops.simulate.engines import Costs, DecodeSim, LinearCosts, PrefillSim, ReplicaSim, TransferSim
from ops.simulate.faults import Fault, FaultKind
from ops.simulate.frontend import FrontendSim, Record
from ops.simulate.scenario import Scenario
from ops.simulate.traces import Arrival
from ops.simulate.world import MS, SECOND, Net, Process, Weather, World

AUDIT_NS = SECOND
LOOK_NS = SECOND // 2  # how often the platform looks at its replicas
ASK_NS = SECOND // 4  # how often it asks for the pools' sizes


class Platform:
    """What Ray Serve does for us: holds pools at their targets, replaces what died, drains what must go."""

    STOP_AFTER_NS = 60 * SECOND  # a draining replica that is never empty is stopped (Serve's graceful shutdown)

    def __init__(self, cluster: ClusterSim) -> None:
        self.cluster = cluster
        self.process = Process(cluster.world, "platform")
        pools = cluster.spec.pools
        self.targets = {Role.PREFILL: pools.prefill.replicas, Role.DECODE: pools.decode.replicas}
        self.members: dict[Role, list[ReplicaSim]] = {Role.PREFILL: [], Role.DECODE: []}
        self.coming: dict[Role, list[int]] = {Role.PREFILL: [], Role.DECODE: []}  # orders on their way, oldest first
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
        self._number += 1
        name = f"{role}-{self._number}"
        node = self.cluster.nodes[self._number % len(self.cluster.nodes)]
        make = PrefillSim if role is Role.PREFILL else DecodeSim
        shape = self.cluster.scenario.shape
        blocks = shape.prefill_blocks if role is Role.PREFILL else shape.decode_blocks
        facts = {"blocks_total": blocks, "block_tokens": shape.block_tokens, "max_seqs": shape.max_seqs}
        replica = make(self.cluster.world, self.cluster.net, name, node, self.cluster.costs[role], facts)
        replica.on_fenced = self._replace
        if isinstance(replica, DecodeSim):
            replica.node_of = self.cluster.node  # type: ignore[method-assign]
            replica.on_verdict = self.cluster.saw_verdict  # type: ignore[method-assign]
            replica.quantum = self.cluster.quantum
            if shape.ledger:
                replica.keep_pages()
        self.members[role].append(replica)
        self.cluster.replicas[name] = replica
        replica.start(self.cluster.controller)

    def _replace(self, replica: ReplicaSim) -> None:
        """A health check failed."""
        if replica.alive:
            replica.die()

    def _ask(self) -> None:
        """As Serve's autoscaling policy does: says what it holds, and takes what it is told."""
        for role, members in self.members.items():
            running = sum(member.alive and not member.leaving for member in members)

            def done(wanted: int | None, role: Role = role) -> None:
                if wanted is not None and not self.refusing:
                    self.targets[role] = wanted

            self.cluster.controller.call(self.process, PlatformSize(role, running, self.targets[role]), done)
        self.cluster.world.at(ASK_NS, self._ask)

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
            late = now_ns - since_ns > self.STOP_AFTER_NS
            if replica.alive and not replica.hung and (late or (replica.empty and now_ns - since_ns > 2 * SECOND)):
                self.leaving.remove((replica, since_ns))
                self.cluster.controller.call(replica, ReplicaLeft(replica.name, replica.life))
                self.cluster.world.at(10 * MS, replica.die)
        self.cluster.world.at(LOOK_NS, self._look)

    def _arrive(self, role: Role, order: int) -> None:
        if order in self.coming[role]:
            self.coming[role].remove(order)
            self._start(role)

    def _drain(self, replica: ReplicaSim) -> None:
        replica.leaving = True
        self.leaving.append((replica, self.cluster.world.now_ns))
        for frontend in self.cluster.frontends:
            if frontend.alive:
                frontend.later(20 * MS, frontend.replica_leaving, replica.name)


@dataclass(slots=True)
class Sample:
    """One moment of a run, for plots."""

    at_s: float
    occupancy: float
    decode_replicas: int
    decode_target: int
    prefill_replicas: int
    queue: int
    in_flight: int
    staging: float


@dataclass(slots=True)
class Findings:
    """What the run itself notices; the checkers add theirs."""

    violations: list[str] = field(default_factory=list)
    verdicts: dict[Verdict, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class ClusterSim:
    def __init__(
        self, scenario: Scenario, costs: dict[Role, Costs] | None = None, quantum: int = 4, sample_ns: int = 0
    ) -> None:
        self.scenario = scenario
        self.spec = scenario.cluster_spec()
        self.world = World(scenario.seed)
        self.net = Net(self.world)
        self.costs: dict[Role, Costs] = costs or {Role.PREFILL: LinearCosts(), Role.DECODE: LinearCosts()}
        self.quantum = quantum
        self.findings = Findings()
        shape = scenario.shape
        lease_ns = int(self.spec.transfer.lease_s * SECOND)
        self.nodes = [
            TransferSim(self.world, self.net, f"node-{index}", shape.staging_bytes, lease_ns)
            for index in range(shape.nodes)
        ]
        self.replicas: dict[str, ReplicaSim] = {}
        self.controller = ControllerSim(self.world, self.net, self.spec)
        self.platform = Platform(self)
        self.frontends = [
            FrontendSim(self.world, self.net, f"frontend-{index}", self.controller, self.replicas.get)
            for index in range(shape.frontends)
        ]
        self.records: list[Record] = []
        self._sample_ns = sample_ns
        self._unarrived = len(scenario.arrivals)

    def node(self, node_id: str) -> TransferSim | None:
        return next((node for node in self.nodes if node.name == node_id), None)

    def saw_verdict(self, verdict: Verdict) -> None:
        self.findings.verdicts[verdict] = self.findings.verdicts.get(verdict, 0) + 1
        if verdict is Verdict.MISMATCH:
            self.findings.violations.append("a page held bytes of another ticket when it was opened")

    def pool(self, role: Role) -> list[ReplicaSim]:
        return [replica for replica in self.platform.members[role] if replica.alive]

    # -- the run

    def run(self, stop: Callable[[], bool] | None = None) -> ClusterSim:
        """Until every request has ended (or `stop` says so), and then for the time to settle."""
        scenario = self.scenario
        for node in self.nodes:
            node.start(self.controller)
        self.platform.begin()
        for number, arrival in enumerate(scenario.arrivals):
            self.world.at(3 * SECOND // 2 + arrival.at_ns, self._arrive, number, arrival)
        for fault in scenario.faults:
            self.world.at(3 * SECOND // 2 + fault.at_ns, self._strike, fault)
        self.world.at(AUDIT_NS, self._audit)
        if self._sample_ns:
            self.world.at(self._sample_ns, self._sample)
        last_ns = max([arrival.at_ns for arrival in scenario.arrivals], default=0)
        self.world.run(last_ns + int(scenario.limit_s * SECOND), stop=stop or self._all_ended)
        self.net.weather.clear()
        self.world.run(self.world.now_ns + int(scenario.settle_s * SECOND))
        return self

    def _all_ended(self) -> bool:
        return not self._unarrived and all(record.ends for record in self.records)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._unarrived -= 1
        record = Record(
            request_id=f"r{number}",
            arrival_ns=self.world.now_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            max_tokens=arrival.max_tokens,
            session=arrival.session,
            tenant=arrival.tenant,
            prefix_hashes=arrival.prefix_hashes,
        )
        self.records.append(record)
        alive = [frontend for frontend in self.frontends if frontend.alive and not frontend.hung]
        if alive:
            alive[number % len(alive)].accept(record)
        else:
            record.end("client_gone", "no frontend", self.world.now_ns)

    def _audit(self) -> None:
        self.controller.audit()
        for node in self.nodes:
            self.findings.violations += node.staging.breaches()
        for replica in self.replicas.values():
            if isinstance(replica, DecodeSim):
                self.findings.violations += replica.breaches()
        self.world.at(AUDIT_NS, self._audit)

    def _sample(self) -> None:
        decode = [r for r in self.pool(Role.DECODE) if isinstance(r, DecodeSim)]
        total = sum(r.blocks_total for r in decode)
        held = sum(r.blocks_total - r.free for r in decode)
        self.findings.samples.append(
            Sample(
                at_s=self.world.now_ns / SECOND,
                occupancy=held / total if total else 0.0,
                decode_replicas=len(decode),
                decode_target=self.platform.targets[Role.DECODE],
                prefill_replicas=len(self.pool(Role.PREFILL)),
                queue=len(self.controller.machine.room),
                in_flight=sum(len(frontend.stories) for frontend in self.frontends),
                staging=sum(n.staging.bytes_held for n in self.nodes) / sum(n.bytes_max for n in self.nodes),
            )
        )
        self.world.at(self._sample_ns, self._sample)

    # -- faults

    def _strike(self, fault: Fault) -> None:
        kind = fault.kind
        if kind in _WEATHER:
            self._storm(fault)
        elif kind is FaultKind.FULL_STAGING:
            self._fill_staging(fault)
        elif kind is FaultKind.CANCEL:
            stories = [story for frontend in self.frontends for story in frontend.stories.values()]
            if stories:
                stories[fault.target % len(stories)].cancel()
        elif kind is FaultKind.SCALE_DOWN:
            self._scale_by_hand(fault)
        elif kind is FaultKind.REFUSE_SCALING:
            self.platform.refusing = True
            self.world.at(fault.duration_ns, setattr, self.platform, "refusing", False)
        else:
            self._hit(fault)

    def _victims(self, name: str) -> list[Process]:
        if name == "controller":
            return [self.controller] if self.controller.alive else []
        if name == "transfer":
            return [node for node in self.nodes if node.alive]
        if name == "frontend":
            return [frontend for frontend in self.frontends if frontend.alive]
        return list(self.pool(Role(name)))

    def _hit(self, fault: Fault) -> None:
        action, name = fault.kind.split("_")
        victims = self._victims(name)
        if not victims:
            return
        victim = victims[fault.target % len(victims)]
        if action == "crash":
            victim.die()
            if name not in (Role.PREFILL, Role.DECODE):  # the platform replaces replicas by itself
                self.world.at(500 * MS + int(fault.amount * SECOND), victim.reborn)
        elif action == "hang":
            victim.hung_until_ns = self.world.now_ns + fault.duration_ns
        elif action == "slow":
            victim.slow = fault.amount
            self.world.at(fault.duration_ns, setattr, victim, "slow", 1.0)

    def _storm(self, fault: Fault) -> None:
        only = frozenset(fault.only)
        weather = {
            FaultKind.DROP: Weather(drop=fault.amount, only=only),
            FaultKind.DELAY: Weather(delay=fault.amount, delay_ns=3 * SECOND, only=only),
            FaultKind.DUPLICATE: Weather(duplicate=fault.amount, only=only),
            FaultKind.REORDER: Weather(delay=fault.amount, delay_ns=80 * MS, only=only),
        }[fault.kind]
        self.net.weather.append(weather)

        def clear() -> None:
            if weather in self.net.weather:
                self.net.weather.remove(weather)

        self.world.at(fault.duration_ns, clear)

    def _fill_staging(self, fault: Fault) -> None:
        node = self.nodes[fault.target % len(self.nodes)]
        if not node.alive or node.taken_by_fault is not None:
            return
        key = (-1, node.life)
        for tenth in range(10, 0, -1):
            if node.staging.grant(key, max(1, node.bytes_max * tenth // 10), 1 << 62) is not None:
                node.taken_by_fault = key
                break

        def free() -> None:
            if node.taken_by_fault == key:
                node.taken_by_fault = None
                node.release([key])

        self.world.at(fault.duration_ns, free)

    def _scale_by_hand(self, fault: Fault) -> None:
        """One replica fewer for a while, as in a rolling update."""
        role = Role.DECODE if fault.target % 2 else Role.PREFILL
        if self.platform.targets[role] < 2 or self.spec.scaling.mode != "off":
            return
        self.platform.targets[role] -= 1

        def back() -> None:
            self.platform.targets[role] += 1

        self.world.at(fault.duration_ns + 2 * SECOND, back)


_WEATHER = (FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.REORDER)


def counts(cluster: ClusterSim) -> dict[str, Any]:
    """Totals of a run for tables."""
    return {"messages": cluster.net.counts, "events": cluster.world.events, "controller": cluster.controller.totals()}
