"""Two Ray nodes, a transfer actor on each: bytes of a lease on one are opened from a lease on the other."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.messages import HandOver, Lease, Seal, Verdict
from actors.transfer import actor
from actors.transfer.channel import Segments

APPLICATION = "two-nodes"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    assert not ray.is_initialized()
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield [node["NodeID"] for node in ray.nodes()]
        finally:
            ray.shutdown()
            cluster.shutdown()


async def test_bytes_cross_nodes(nodes: list[str]) -> None:
    there, here = (actor.get_or_create(node, 4 << 20, 30.0, APPLICATION) for node in nodes)
    segments = Segments(), Segments()
    try:
        await asyncio.gather(there.start.remote(), here.start.remote())
        lease: Lease = await there.lease.remote(1, 1, 100_000, ["p#0"], 1.0)
        payload = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
        view = segments[0].view(lease)
        assert view is not None
        view[:] = payload.tobytes()
        hand_over = over(lease)
        local: Lease = await here.begin_read.remote(hand_over, ["d#0"])
        assert isinstance(local, Lease) and local.node_id == nodes[1] and local.segment != lease.segment
        moved = segments[1].view(local)
        assert moved is not None and bytes(moved) == payload.tobytes()
        assert (await here.status.remote()).leases == 1
        await here.drop_reader.remote(1, 1, ["d#0"])
        assert (await here.status.remote()).bytes_held == 0
        # Once the source has given the bytes up, there is nothing to fetch.
        await there.drop_writer.remote(1, 1, ["p#0"])
        assert await here.begin_read.remote(hand_over, ["d#0"]) is Verdict.MISSING
        assert (await here.status.remote()).bytes_held == 0
    finally:
        await asyncio.gather(there.close.remote(), here.close.remote())
        for actor in (there, here):
            ray.kill(actor)


async def test_a_node_that_is_not_there_is_missing(nodes: list[str]) -> None:
    here: Any = actor.get_or_create(nodes[1], 4 << 20, 30.0, APPLICATION)
    try:
        await here.start.remote()
        ghost = Lease(ticket_id=2, attempt=1, node_id="f" * 56, segment="pageferry-f-1", offset=0, num_bytes=10)
        assert await here.begin_read.remote(over(ghost), ["d#0"]) is Verdict.MISSING
    finally:
        await here.close.remote()
        ray.kill(here)


def over(lease: Lease) -> HandOver:
    seal = Seal(ticket_id=lease.ticket_id, attempt=lease.attempt, layout_fingerprint="f", num_tokens=1, digests=((1,),))
    return HandOver(ticket_id=lease.ticket_id, attempt=lease.attempt, seal=seal, lease=lease, deadline_s=5.0)
