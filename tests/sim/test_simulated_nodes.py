"""Pages between two simulated nodes while the network and both transfer actors fail: every law holds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ops.simulate import cli
from ops.simulate.faults import Fault, FaultKind
from ops.simulate.scenario import SPEC, Scenario, random_scenario
from ops.simulate.world import MS

FETCHES = ("fetch", "fetch_reply", "fetch_cancel")


def between_nodes(seed: int, faults: tuple[Fault, ...]) -> Scenario:
    """One prefill and one decode replica, on two nodes: every page crosses."""
    base = random_scenario(seed, ())
    spec = json.loads(json.dumps(SPEC))
    for pool in spec["pools"].values():
        pool |= {"replicas": 1, "min_replicas": 1, "max_replicas": 1}
    spec["admission"]["local_prefill_max_tokens"] = 0
    shape = replace(base.shape, nodes=2, frontends=1, staging_bytes=256 * 4096)
    return replace(base, spec=spec, shape=shape, faults=faults)


def faults_of(kind: FaultKind, seed: int) -> tuple[Fault, ...]:
    """One every 700 ms, at another phase with each seed, on both sides in turn."""
    found = []
    for number in range(8):
        at_ns = number * 700 * MS + seed * 90 * MS
        if kind in (FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE):
            found.append(Fault(kind, at_ns, 0, 400 * MS, 0.6, FETCHES))
        else:
            found.append(Fault(kind, at_ns, number, (300 + 900 * (number % 2)) * MS, 0.2))
    return tuple(found)


@pytest.mark.parametrize(
    "kind",
    [FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.HANG_TRANSFER, FaultKind.CRASH_TRANSFER],
)
def test_a_link_or_a_transfer_actor_that_fails_in_every_phase(kind: FaultKind) -> None:
    fetches = again = failed = 0
    for seed in range(6):
        found, cluster = cli.judge(between_nodes(seed, faults_of(kind, seed)))
        assert found.clean, (seed, found.violations)
        links = [link for node in cluster.nodes for link in node.machine.status().links]
        fetches += sum(node.fetches for node in cluster.nodes)
        again += sum(link.chunks_again for link in links)
        failed += sum(link.failed for link in links)
    assert fetches > 60
    if kind is FaultKind.DROP:
        assert again > 20, "no stream broke"


def test_without_faults_no_chunk_is_asked_twice_and_decode_computes_no_prompt_again() -> None:
    found, cluster = cli.judge(between_nodes(3, ()))
    assert found.clean and sum(node.fetches for node in cluster.nodes) > 5
    links = [link for node in cluster.nodes for link in node.machine.status().links]
    assert links and not any(link.chunks_again or link.failed for link in links)
