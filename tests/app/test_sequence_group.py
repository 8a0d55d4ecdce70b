"""When a ticket gets its next attempt, neither siblings, nor streams, nor replicas stay with the old one."""

from __future__ import annotations

import asyncio

import pytest
from fake_cluster import FakeCluster, request, tokens_of, until
from vllm.v1.engine import FinishReason

from actors.messages import CommandKind, FrontendCommand, Outcome, Overloaded, Role
from app.api.errors import RequestErrorResponse
from app.request.core_client import FerryCoreClient
from app.rpc.ports import ReplicaGone

STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


async def add_family(client: FerryCoreClient, count: int) -> None:
    client.begin_group("r", count)
    try:
        for index in range(count):
            await client.add_request_async(request(f"{index}_r"))
    finally:
        client.end_group("r")


async def ended(client: FerryCoreClient) -> None:
    await until(lambda: not client.runs and not client.groups)
    client.shutdown()


async def test_followers_come_along_when_the_carriers_prefill_is_lost() -> None:
    """They must not go to decode under the old attempt: the controller has every engine drop that."""
    far = FakeCluster()
    far.prefill_gate.clear()
    far.prefill_fails = {"p1": ReplicaGone("p1", "it died")}
    far.lost_answers = [far.ticket(1, 2, prefill="p2", decode="d2")]
    client = far.client()
    await add_family(client, 3)
    await until(lambda: far.prefill_calls)
    far.prefill_gate.set()
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: d2.submitted)
    await asyncio.sleep(0.02)
    assert far.losses == [(Role.PREFILL, "p1", far.losses[0][2], 0)]
    assert not d1.submitted and len(d2.submitted) == 1, "the others wait for the prompt on its new replica"
    [leader] = d2.submitted
    assert d2.hand_overs[leader] is not None
    d2.emit(leader, 50, finish=STOP)
    await until(lambda: len(d2.submitted) == 3)
    for engine_id in set(d2.submitted) - {leader}:
        d2.emit(engine_id, 60, finish=STOP)
    await ended(client)
    assert far.ends == [(1, Outcome.DONE, 3)]


async def test_followers_end_when_there_is_no_other_place() -> None:
    far = FakeCluster()
    far.prefill_fails = {"p1": ReplicaGone("p1", "it died")}
    far.lost_answers = [Overloaded(reason="nothing is left", retry_after_s=1.0)]
    client = far.client()
    faults: dict[str, str] = {}
    client.on_fault = lambda request_id, fault: faults.setdefault(request_id, fault.message)
    await add_family(client, 2)
    await ended(client)
    assert len(far.losses) == 1 and set(faults) == {"0_r", "1_r"}
    assert all("nothing is left" in message for message in faults.values())


async def test_a_stream_that_its_replica_had_to_drop_goes_on_elsewhere() -> None:
    far = FakeCluster()
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request())
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    assert await tokens_of(client, "r", 1) == [50]
    d1.emit("r", finish=ABORT)
    await until(lambda: d2.submitted)
    [again] = d2.submitted
    assert list(d2.submitted[again].prompt_token_ids or ())[-1] == 50
    d2.emit(again, 51, finish=STOP)
    assert await tokens_of(client, "r", 1) == [51]
    await ended(client)
    assert far.ends == [(1, Outcome.DONE, 2)]


async def test_a_leaving_replica_keeps_its_stream_for_a_ticket_that_is_still_in_prefill() -> None:
    far = FakeCluster()
    far.prefill_gate.clear()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: far.prefill_calls and d1.streams)
    client.replica_leaving("d1")
    await asyncio.sleep(0.02)
    assert d1.streams == 1 and not d1.submitted
    far.prefill_gate.set()
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50, finish=STOP)
    await until(lambda: d1.streams == 0)
    await ended(client)


async def test_a_leaving_replica_is_let_go_when_its_ticket_moves() -> None:
    far = FakeCluster()
    far.prefill_gate.clear()
    far.prefill_fails = {"p1": ReplicaGone("p1", "it died")}
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request())
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: far.prefill_calls and d1.streams)
    client.replica_leaving("d1")
    far.prefill_gate.set()
    await until(lambda: d2.submitted and d1.streams == 0)
    d2.emit(next(iter(d2.submitted)), 50, finish=STOP)
    await ended(client)


async def test_a_sequence_that_joins_late_joins_the_current_attempt() -> None:
    """Its siblings have lost the first attempt meanwhile, or are asking for the next one."""
    far = FakeCluster()
    far.prefill_fails = {"p1": ReplicaGone("p1", "it died")}
    far.lost_answers = [far.ticket(1, 2, prefill="p2", decode="d2")]
    client = far.client()
    group = client.begin_group("r", 2)
    try:
        await client.add_request_async(request("0_r"))
        await until(lambda: group.ticket is not None and group.ticket.attempt == 2)
        await client.add_request_async(request("1_r"))
    finally:
        client.end_group("r")
    assert group.ticket is not None and group.ticket.attempt == 2
    (claim,) = client.claims()
    assert (claim.ticket.attempt, claim.ticket.decode) == (2, "d2")
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: d2.submitted)
    await asyncio.sleep(0.02)
    assert len(d2.submitted) == 1, "the second follows the first's prompt on its new replica"
    far.lost_answers = [far.ticket(1, 3, decode="d1")]
    client.obey(FrontendCommand(kind=CommandKind.LOST, ticket_id=1, attempt=2, replica_id="d2", reason="it died"))
    await until(lambda: d1.submitted)
    d1.emit(next(iter(d1.submitted)), 50, finish=STOP)
    await until(lambda: len(d1.submitted) == 2)
    d1.emit(list(d1.submitted)[1], 60, finish=STOP)
    await ended(client)
    assert far.ends == [(1, Outcome.DONE, 2)] and len(far.losses) == 2


async def test_a_sequence_that_joins_when_there_is_no_other_place_is_refused() -> None:
    far = FakeCluster()
    far.prefill_fails = {"p1": ReplicaGone("p1", "it died")}
    far.lost_answers = [Overloaded(reason="nothing is left", retry_after_s=1.0)]
    client = far.client()
    faults: dict[str, str] = {}
    client.on_fault = lambda request_id, fault: faults.setdefault(request_id, fault.message)
    client.begin_group("r", 2)
    try:
        await client.add_request_async(request("0_r"))
        await until(lambda: faults)
        with pytest.raises(RequestErrorResponse, match="nothing is left"):
            await client.add_request_async(request("1_r"))
    finally:
        client.end_group("r")
    await ended(client)
    assert not far.decodes["d1"].submitted and len(far.losses) == 1
