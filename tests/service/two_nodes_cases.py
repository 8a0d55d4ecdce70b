"""Two Ray nodes, a transfer actor on each: bytes of a lease on one are opened from a lease on the other."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.messages import HandOver, Lease, Role, Seal, Verdict
from actors.transfer import actor
from actors.transfer.channel import Hello, PagesSealed
from actors.transfer.chunks import CHUNK_BYTES
from actors.transfer.link import WorkerLink
from cluster.names import NAMESPACE

APPLICATION = "two-nodes"
SEALED = PagesSealed(
    ticket_id=1,
    attempt=1,
    shard=0,
    num_shards=1,
    first_page=0,
    digests=[1],
    layout_fingerprint="f",
    num_tokens=1,
    last=True,
)


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
    """More than one piece; the engines are this process, linked to both actors as engines are."""
    there, here = (actor.get_or_create(node, 64 << 20, 30.0, APPLICATION) for node in nodes)
    num_bytes = 2 * CHUNK_BYTES + 12_345
    places = await asyncio.gather(there.start.remote(), here.start.remote())
    prefill, decode = (
        WorkerLink(place["socket"], Hello(engine=engine, role=role, pid=1))
        for place, engine, role in zip(places, ("p#0", "d#0"), (Role.PREFILL, Role.DECODE))
    )
    try:
        lease: Lease = await there.lease.remote(1, 1, num_bytes, ["p#0"], 10.0)
        payload = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        with prefill.staging.bytes_of(lease) as view:
            assert view is not None
            view[:] = payload.tobytes()
        prefill.send(SEALED)
        hand_over = over(lease)
        while (await there.read.remote(lease, 0, 1)) is None:
            await asyncio.sleep(0.05)  # the seal is on its way
        local: Lease = await here.begin_read.remote(hand_over, ["d#0"])
        assert isinstance(local, Lease) and local.node_id == nodes[1] and local.segment != lease.segment
        with decode.staging.bytes_of(local) as view:
            assert view is not None and bytes(view) == payload.tobytes()
        status = await here.status.remote()
        assert status.leases == 1 and [(link.node_id, link.way) for link in status.links] == [(nodes[0], "direct")]
        await here.drop_reader.remote(1, 1, ["d#0"])
        assert (await here.status.remote()).bytes_held == 0
        assert await here.begin_read.remote(hand_over, ["d#0"]) is Verdict.STALE
        # Once the source has given the bytes up, there is nothing to fetch.
        await there.release.remote([(1, 1)])
        assert await there.read.remote(lease, 0, 1) is None
    finally:
        for link in (prefill, decode):
            link.close()
        await asyncio.gather(there.close.remote(), here.close.remote())
        for each in (there, here):
            ray.kill(each)


async def test_a_node_that_is_not_there_is_missing(nodes: list[str]) -> None:
    here: Any = actor.get_or_create(nodes[1], 4 << 20, 30.0, APPLICATION)
    place = await here.start.remote()
    link = WorkerLink(place["socket"], Hello(engine="d#0", role=Role.DECODE, pid=1))
    try:
        ghost = Lease(ticket_id=2, attempt=1, node_id="f" * 56, segment="s", offset=0, num_bytes=10)
        assert await here.begin_read.remote(over(ghost), ["d#0"]) is Verdict.MISSING
    finally:
        link.close()
        await here.close.remote()
        ray.kill(here)


async def test_an_actor_that_is_there_already_takes_the_new_settings(nodes: list[str]) -> None:
    first: Any = actor.get_or_create(nodes[0], 4 << 20, 30.0, APPLICATION)
    again: Any = actor.get_or_create(nodes[0], 8 << 20, 30.0, APPLICATION)
    try:
        await again.start.remote(8 << 20, 30.0)
        while (await first.status.remote()).bytes_max != 8 << 20:
            await asyncio.sleep(0.05)
    finally:
        await first.close.remote()
        ray.kill(first)


async def test_memory_goes_with_the_last_process_that_has_it(nodes: list[str]) -> None:
    """An actor that is killed and comes back: its engines drop the old memory, and map the new one."""
    here: Any = actor.get_or_create(nodes[0], 4 << 20, 30.0, APPLICATION)
    place = await here.start.remote()
    link = WorkerLink(place["socket"], Hello(engine="p#0", role=Role.PREFILL, pid=1))
    try:
        first: Lease = await here.lease.remote(1, 1, 10, ["p#0"], 10.0)
        os.kill(await here.pid.remote(), signal.SIGKILL)
        second: Lease = await here.lease.remote(2, 1, 10, ["p#0"], 60.0)
        assert second.segment != first.segment
        with link.staging.bytes_of(first) as old, link.staging.bytes_of(second) as new:
            assert old is None and new is not None
        assert Path("/proc/self/maps").read_text().count("memfd:pageferry-staging") == 1
    finally:
        link.close()
        await here.close.remote()
        ray.kill(here)


def test_an_actor_without_controller_and_engines_ends_for_good(nodes: list[str]) -> None:
    class Impatient(actor.KVTransferActor):  # local: the actor's process cannot import this file
        async def __init__(self, *args: Any) -> None:
            actor.ORPHAN_S = 1.0
            await super().__init__(*args)

    options = {"name": "orphan", "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    orphan: Any = ray.remote(Impatient).options(**options).remote(nodes[0], 4 << 20, 30.0, "ended")
    ray.get(orphan.pid.remote())
    until = time.monotonic() + 60
    while "orphan" in [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]:
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.2)


def over(lease: Lease) -> HandOver:
    seal = Seal(ticket_id=lease.ticket_id, attempt=lease.attempt, layout_fingerprint="f", num_tokens=1, digests=((1,),))
    return HandOver(ticket_id=lease.ticket_id, attempt=lease.attempt, seal=seal, lease=lease, deadline_s=5.0)
