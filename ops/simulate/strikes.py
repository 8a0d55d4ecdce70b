"""How each fault is put into a running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.messages import Role
from ops.simulate.decode import DecodeSim
from ops.simulate.faults import NETWORK_FAULTS, Fault, FaultKind
from ops.simulate.network import NetworkFault
from ops.simulate.replica import ReplicaSim
from ops.simulate.world import MS, SECOND, Process

if TYPE_CHECKING:
    from ops.simulate.cluster import ClusterSim


def strike(cluster: ClusterSim, fault: Fault) -> None:
    kind = fault.kind
    if kind in NETWORK_FAULTS:
        _disturb_network(cluster, fault)
    elif kind is FaultKind.FULL_STAGING:
        node = cluster.nodes[fault.target % len(cluster.nodes)]
        if node.alive:
            node.occupy(0.5 + fault.amount / 2, fault.duration_ns)
    elif kind is FaultKind.CANCEL:
        live = [(frontend, record) for frontend in cluster.frontends for record in frontend.records.values()]
        if live:
            frontend, record = live[fault.target % len(live)]
            frontend.later(0, frontend.leave, record)
    elif kind is FaultKind.SCALE_DOWN:
        _scale_by_hand(cluster, fault)
    elif kind is FaultKind.REFUSE_SCALING:
        cluster.platform.refusing = True
        cluster.world.at(fault.duration_ns, setattr, cluster.platform, "refusing", False)
    elif kind is FaultKind.FORGET_SCALING:
        cluster.platform.forget()
    elif kind is FaultKind.PAGE_MISMATCH:
        _mismatch(cluster, fault)
    elif kind is FaultKind.BREAK_LINK:
        replicas = [*cluster.pool(Role.PREFILL), *cluster.pool(Role.DECODE)]
        if replicas:
            replica = replicas[fault.target % len(replicas)]
            replica.node.break_link(replica.engine)
    else:
        _hit(cluster, fault)


def _victims(cluster: ClusterSim, name: str) -> list[Process]:
    if name == "controller":
        return [cluster.controller] if cluster.controller.alive else []
    if name == "transfer":
        return [node for node in cluster.nodes if node.alive]
    if name == "frontend":
        return [frontend for frontend in cluster.frontends if frontend.alive]
    return list(cluster.pool(Role(name)))


def _hit(cluster: ClusterSim, fault: Fault) -> None:
    action, name = fault.kind.split("_")
    victims = _victims(cluster, name)
    if not victims:
        return
    victim = victims[fault.target % len(victims)]
    if action == "crash":
        cluster.end_process(victim)
        if not isinstance(victim, ReplicaSim):  # the platform replaces replicas by itself
            cluster.world.at(500 * MS + int(fault.amount * SECOND), _reborn, victim)
    elif action == "hang":
        victim.hung_until_ns = cluster.world.now_ns + fault.duration_ns
    elif action == "slow":
        victim.slow = fault.amount
        cluster.world.at(fault.duration_ns, setattr, victim, "slow", 1.0)


def _reborn(process: Process) -> None:
    if not process.alive:
        process.reborn()


def _disturb_network(cluster: ClusterSim, fault: Fault) -> None:
    only = frozenset(fault.only)
    disturbance = {
        FaultKind.DROP: NetworkFault(drop=fault.amount, only=only),
        FaultKind.DELAY: NetworkFault(delay=fault.amount, delay_ns=3 * SECOND, only=only),
        FaultKind.DUPLICATE: NetworkFault(duplicate=fault.amount, only=only),
        FaultKind.REORDER: NetworkFault(delay=fault.amount, delay_ns=80 * MS, only=only),
    }[fault.kind]
    cluster.net.faults.append(disturbance)

    def clear() -> None:
        if disturbance in cluster.net.faults:
            cluster.net.faults.remove(disturbance)

    cluster.world.at(fault.duration_ns, clear)


def _mismatch(cluster: ClusterSim, fault: Fault) -> None:
    """In a decode replica that has something running."""
    replicas = [r for r in cluster.pool(Role.DECODE) if isinstance(r, DecodeSim) and r.running and not r.hung]
    if replicas:
        engine_id = replicas[fault.target % len(replicas)].mismatch(fault.target >> 4)
        cluster.findings.mismatched.add(engine_id.split("~")[0])


def _scale_by_hand(cluster: ClusterSim, fault: Fault) -> None:
    """One replica fewer for a while, as in a rolling update."""
    role = Role.DECODE if fault.target % 2 else Role.PREFILL
    targets = cluster.platform.targets
    if targets[role] < 2 or cluster.spec.scaling.mode != "off":
        return
    cluster.platform.targets[role] -= 1

    def back() -> None:
        cluster.platform.targets[role] += 1

    cluster.world.at(fault.duration_ns + 2 * SECOND, back)
