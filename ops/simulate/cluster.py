"""A simulated cluster: shipped machines in simulated processes, one scenario's load and faults, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.controller.events import FrontendGone
from actors.messages import ReplicaLeft, Role, Verdict
from ops.simulate.clients import Record
from ops.simulate.controller import ControllerSim
from ops.simulate.costs import LinearCosts
from ops.simulate.decode import DecodeSim
from ops.simulate.frontend import FrontendSim
from ops.simulate.model import Model
from ops.simulate.network import Net
from ops.simulate.node import NodeSim
from ops.simulate.platform import Platform
from ops.simulate.replica import Costs, ReplicaSim
from ops.simulate.scenario import Scenario
from ops.simulate.strikes import strike
from ops.simulate.traces import Arrival
from ops.simulate.world import MS, SECOND, Process, World

AUDIT_NS = SECOND
LATE_NS = 4 * SECOND  # the latest message has come by then
BEGIN_NS = 3 * SECOND // 2  # replicas have joined by then


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
    mismatched: set[str] = field(default_factory=set)  # engine ids that a page mismatch was planted in
    samples: list[Sample] = field(default_factory=list)


class ClusterSim:
    def __init__(
        self, scenario: Scenario, costs: dict[Role, Costs] | None = None, quantum: int = 4, sample_ns: int = 0
    ) -> None:
        self.scenario = scenario
        self.spec = scenario.cluster_spec()
        self.world = World(scenario.seed)
        self.net = Net(self.world)
        self.model = Model()
        self.costs: dict[Role, Costs] = costs or dict.fromkeys(Role, LinearCosts(scenario.shape.prefill_token_ns))
        self.quantum = quantum
        self.findings = Findings()
        shape = scenario.shape
        lease_ns = int(self.spec.transfer.lease_s * SECOND)
        self.nodes = [
            NodeSim(self.world, self.net, f"node-{index}", shape.staging_bytes, lease_ns)
            for index in range(shape.nodes)
        ]
        self.peers = {node.name: node for node in self.nodes}
        self.replicas: dict[str, ReplicaSim] = {}
        self.controller = ControllerSim(self.world, self.net, self.spec)
        self.platform = Platform(self)
        self.controller.platform_replace = self.platform.replace
        self.frontends = [
            FrontendSim(
                self.world, self.net, f"frontend-{n}", self.spec, self.controller, self.model, self.replicas.get
            )
            for n in range(shape.frontends)
        ]
        self.records: list[Record] = []
        self.engine_deaths = 0
        self._sample_ns = sample_ns
        self._unarrived = len(scenario.arrivals)

    def pool(self, role: Role) -> list[ReplicaSim]:
        return [replica for replica in self.platform.members[role] if replica.alive]

    def end_process(self, process: Process) -> None:
        """A process dies. Where the scenario says so the controller hears of it from the platform, not by silence."""
        process.die()
        event: ReplicaLeft | FrontendGone | None = None
        if isinstance(process, ReplicaSim):
            self.engine_deaths += 1
            event = ReplicaLeft(process.name, process.life, "has died", "died")
        elif isinstance(process, FrontendSim):
            event = FrontendGone(process.name)
            for replica in self.pool(Role.DECODE):
                if isinstance(replica, DecodeSim) and (stream := replica.streams.get(process.name)) is not None:
                    replica.later(10 * MS, replica.stream_closed, stream)
        if event is not None and self.scenario.shape.watched and self.controller.alive:
            self.world.at(self.world.random.randrange(SECOND), self.controller.process_died, event)

    # -- the run

    def run(
        self, stop: Callable[[], bool] | None = None, quiet: Callable[[ClusterSim], bool] | None = None
    ) -> ClusterSim:
        """Until every request has ended (or `stop` says so), and then for the time to settle, or till it is `quiet`."""
        scenario = self.scenario
        for node in self.nodes:
            node.peers = self.peers
            node.start(self.controller)
        self.platform.begin()
        for number, arrival in enumerate(scenario.arrivals):
            self.world.at(BEGIN_NS + arrival.at_ns, self._arrive, number, arrival)
        for fault in scenario.faults:
            self.world.at(BEGIN_NS + fault.at_ns, strike, self, fault)
        self.world.at(AUDIT_NS, self._audit)
        if self._sample_ns:
            self.world.at(self._sample_ns, self._sample)
        last_ns = max([arrival.at_ns for arrival in scenario.arrivals], default=0)
        self.world.run(last_ns + int(scenario.limit_s * SECOND), stop=stop or self._all_ended)
        self.net.faults.clear()
        ended_ns = self.world.now_ns

        def settled() -> bool:
            return quiet is not None and self.world.now_ns - ended_ns > LATE_NS and quiet(self)

        self.world.run(ended_ns + int(scenario.settle_s * SECOND), settled)
        return self

    def close(self) -> None:
        """Unwinds what asyncio still has of the frontends."""
        for frontend in self.frontends:
            frontend.alive = False
            frontend.loop.end()

    def _all_ended(self) -> bool:
        return not self._unarrived and all(record.ends for record in self.records)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._unarrived -= 1
        record = Record(
            request_id=f"r{number}",
            arrival_ns=self.world.now_ns,
            prompt_tokens=arrival.prompt_tokens,
            recovery=arrival.recovery,
            num_sequences=arrival.num_sequences,
        )
        self.records.append(record)
        alive = [frontend for frontend in self.frontends if frontend.alive and not frontend.hung]
        if alive:
            alive[number % len(alive)].accept(record, arrival)
        else:
            record.end("client_gone", "no frontend", self.world.now_ns)

    def _audit(self) -> None:
        self.controller.audit()
        for node in self.nodes:
            if node.alive:
                self.findings.violations += [f"{node.name}: {text}" for text in node.machine.violations()]
        for replica in self.replicas.values():
            if isinstance(replica, DecodeSim):
                self.findings.violations += replica.violations()
        self.world.at(AUDIT_NS, self._audit)

    def _sample(self) -> None:
        decode = [r for r in self.pool(Role.DECODE) if isinstance(r, DecodeSim)]
        total = sum(r.blocks_total for r in decode)
        held = sum(r.blocks_total - r.free for r in decode)
        staging = sum(n.machine.staging.bytes_held for n in self.nodes) / sum(n.bytes_max for n in self.nodes)
        self.findings.samples.append(
            Sample(
                at_s=self.world.now_ns / SECOND,
                occupancy=held / total if total else 0.0,
                decode_replicas=len(decode),
                decode_target=self.platform.targets[Role.DECODE],
                prefill_replicas=len(self.pool(Role.PREFILL)),
                queue=len(self.controller.machine.queue),
                in_flight=sum(len(frontend.records) for frontend in self.frontends),
                staging=staging,
            )
        )
        self.world.at(self._sample_ns, self._sample)


def counts(cluster: ClusterSim) -> dict[str, Any]:
    """Totals of a run for tables."""
    return {"messages": cluster.net.counts, "events": cluster.world.events, "controller": cluster.controller.totals()}
