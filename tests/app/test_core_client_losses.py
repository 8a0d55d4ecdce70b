"""A request whose replica is lost, hangs or leaves: prefilled again, resumed, replayed, moved or failed.

`settled` checks the same invariants as in test_core_client.py."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fake_cluster import Decode, FakeCluster, cancel, request, settled, tokens_of, until
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from actors.messages import CommandKind, FrontendCommand, Outcome, Role, Verdict
from app.request.events import RequestError

STOP = FinishReason.STOP


def order(kind: CommandKind, reason: str) -> FrontendCommand:
    """Of the controller, about the decode replica of the first ticket's first attempt."""
    return FrontendCommand(kind=kind, ticket_id=1, attempt=1, role=Role.DECODE, replica_id="d1", reason=reason)


async def test_a_lost_prefill_is_prefilled_elsewhere() -> None:
    far = FakeCluster()
    far.prefill_fails["p1"] = RuntimeError("no staging room")
    far.lost_answers = [far.ticket(1, 2, prefill="p2")]
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    assert far.prefill_calls == [("p1", 1), ("p2", 2)]
    assert far.losses == [(Role.PREFILL, "p1", "it failed with RuntimeError", 0)]
    hand_over = d1.hand_overs["r"]
    assert hand_over is not None and hand_over.attempt == 2
    d1.emit("r", 5, finish=STOP)
    await tokens_of(client, "r", 1)
    await settled(client, far, {"r"})


async def test_a_prefill_that_hangs_is_given_up_at_the_deadline() -> None:
    far = FakeCluster()
    far.prefill_gate.clear()
    far.lost_answers = [far.ticket(1, 2)]
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted, 4.0)
    assert far.prefill_cancelled == 1 and "no answer within" in far.losses[0][2]
    assert d1.hand_overs["r"] is None
    await cancel(client, "r")
    await settled(client, far)


@pytest.mark.parametrize("verdict", [Verdict.MISMATCH, Verdict.STALE])
async def test_a_prompt_without_proof_is_computed_by_decode(verdict: Verdict) -> None:
    far = FakeCluster()
    far.hand_over_answer = verdict
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    assert d1.hand_overs["r"] is None
    d1.emit("r", 5, cached=0, finish=STOP)
    first = await client.get_output_async()
    assert first.outputs[0].prefill_stats is not None and first.outputs[0].prefill_stats.num_cached_tokens == 0
    await settled(client, far, {"r"})


async def test_a_lost_decode_is_resumed_from_the_tokens_so_far() -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request(max_tokens=8, min_tokens=4, repetition_penalty=1.2))
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    d1.emit("r", 51)
    assert await tokens_of(client, "r", 2) == [50, 51]
    d1.die()
    await until(lambda: "r~2" in d2.submitted)
    again = d2.submitted["r~2"]
    assert again.prompt_token_ids == [*range(10), 50, 51]
    assert again.sampling_params is not None
    assert (again.sampling_params.max_tokens, again.sampling_params.min_tokens) == (6, 2)
    assert [loss[:2] + loss[3:] for loss in far.losses] == [(Role.DECODE, "d1", 2)]
    d2.emit("r~2", 52, cached=12, finish=STOP)
    outputs = await client.get_output_async()
    assert outputs.outputs[0].new_token_ids == [52]
    assert outputs.outputs[0].prefill_stats is None, "usage is counted once"
    await settled(client, far, {"r~2"})
    assert far.ends == [(1, Outcome.DONE, 3)]


async def test_a_request_that_two_engines_died_with_asks_for_a_replica_to_itself() -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.decodes |= {"d3": Decode()}
    far.lost_answers = [
        far.ticket(1, 2, decode="d2"),
        msgspec.structs.replace(far.ticket(1, 3, decode="d3"), alone=True),
    ]
    client = far.client()
    await client.add_request_async(request())
    for number, name in enumerate(("d1", "d2", "d3"), 1):
        engine_id = "r" if number == 1 else f"r~{number}"
        await until(lambda name=name, engine_id=engine_id: engine_id in far.decodes[name].submitted)
        far.decodes[name].emit(engine_id, number)
        await tokens_of(client, "r", 1)
        far.decodes[name].die()
    faults: list[RequestError] = []
    client.on_fault = lambda request_id, fault: faults.append(fault)
    await settled(client, far)
    assert far.alone == [False, True]
    assert [(fault.status, fault.kind) for fault in faults] == [(500, "engine_death_error")]


async def test_a_connection_that_ends_is_no_death_of_the_engine() -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.decodes |= {"d3": Decode()}
    far.lost_answers = [far.ticket(1, 2, decode="d2"), far.ticket(1, 3, decode="d3"), far.ticket(1, 4, decode="d1")]
    client = far.client()
    await client.add_request_async(request())
    for number, name in enumerate(("d1", "d2", "d3"), 1):
        engine_id = "r" if number == 1 else f"r~{number}"
        await until(lambda name=name, engine_id=engine_id: engine_id in far.decodes[name].submitted)
        far.decodes[name].emit(engine_id, number)
        await tokens_of(client, "r", 1)
        far.decodes[name].lose_connection()
    await until(lambda: "r~4" in far.decodes["d1"].submitted)
    assert far.alone == [False, False, False]
    far.decodes["d1"].emit("r~4", 9, finish=STOP)
    await settled(client, far, {"r", "r~2", "r~3", "r~4"})


async def test_late_tokens_of_a_replica_that_was_given_up_are_dropped() -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request())
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    client.obey(order(CommandKind.LOST, "silent"))
    await until(lambda: "r~2" in d2.submitted)
    d1.emit("r", 666)  # it lives after all
    d2.emit("r~2", 50, finish=STOP)
    assert await tokens_of(client, "r", 1) == [50]
    await settled(client, far, {"r", "r~2"})


async def test_a_deterministic_request_with_memory_is_replayed_and_compared() -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request(presence_penalty=0.5))
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    d1.emit("r", 51)
    await tokens_of(client, "r", 2)
    d1.die()
    await until(lambda: "r~2" in d2.submitted)
    assert d2.submitted["r~2"].prompt_token_ids == [*range(10)]
    d2.emit("r~2", 50, cached=0)
    d2.emit("r~2", 51, 52)  # one step may hold more than one token
    d2.emit("r~2", 53, finish=STOP)
    assert await tokens_of(client, "r", 2) == [52, 53]
    await settled(client, far, {"r~2"})
    assert far.ends == [(1, Outcome.DONE, 4)]


@pytest.mark.parametrize("differently", ["token", "end"])
async def test_a_replay_that_goes_another_way_fails_clearly(differently: str) -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    faults: list[tuple[str, RequestError]] = []
    client.on_fault = lambda request_id, fault: faults.append((request_id, fault))
    await client.add_request_async(request(presence_penalty=0.5))
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    d1.emit("r", 51)
    await tokens_of(client, "r", 2)
    d1.die()
    await until(lambda: "r~2" in d2.submitted)
    if differently == "token":
        d2.emit("r~2", 99)
    else:
        d2.emit("r~2", 50, finish=STOP)
    await until(lambda: faults)
    assert "did not reproduce" in faults[0][1].message
    await settled(client, far, {"r~2"} if differently == "end" else set())
    assert far.ends == [(1, Outcome.FAILED, 2)]


async def test_what_cannot_be_continued_exactly_fails_and_says_so() -> None:
    far = FakeCluster()
    far.use_prefill = False
    client = far.client()
    faults: list[tuple[str, RequestError]] = []
    client.on_fault = lambda request_id, fault: faults.append((request_id, fault))
    await client.add_request_async(request(temperature=1.0, presence_penalty=0.5))
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    await tokens_of(client, "r", 1)
    d1.die()
    await until(lambda: faults)
    assert faults[0][0] == "r" and faults[0][1].status == 503
    assert "cannot be continued exactly" in faults[0][1].message
    await settled(client, far)


async def test_a_leaving_replica_keeps_its_stream_until_its_last_request_has_ended() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    client.replica_leaving("d1")
    d1.emit("r", 50)
    assert await tokens_of(client, "r", 1) == [50]
    assert d1.streams == 1
    d1.emit("r", 51, finish=STOP)
    await until(lambda: d1.streams == 0)
    await settled(client, far, {"r"})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_request_moves_from_a_leaving_replica_only_if_that_is_exact(temperature: float) -> None:
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request(presence_penalty=0.5, temperature=temperature))
    d1, d2 = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    await tokens_of(client, "r", 1)
    client.obey(order(CommandKind.MOVE, "it is leaving"))
    if temperature:
        await asyncio.sleep(0.01)
        d1.emit("r", 51, finish=STOP)
        assert await tokens_of(client, "r", 1) == [51]
    else:
        await until(lambda: "r~2" in d2.submitted)
        d2.emit("r~2", 50, 51, finish=STOP)
        assert await tokens_of(client, "r", 1) == [51]
    await settled(client, far, {"r", "r~2"})


async def test_a_token_that_comes_after_the_order_to_move_is_dropped() -> None:
    """The order counts the tokens that are out; one that arrives before it is carried out would be computed twice."""
    far = FakeCluster()
    far.use_prefill = False
    far.lost_answers = [far.ticket(1, 2, decode="d2")]
    client = far.client()
    await client.add_request_async(request(temperature=1.0, presence_penalty=0.5, max_tokens=2))
    first, second = far.decodes["d1"], far.decodes["d2"]
    await until(lambda: "r" in first.submitted)
    await asyncio.sleep(0.05)
    first.emit("r", 50)  # in the stream; the link has not run yet
    client.obey(order(CommandKind.MOVE, "leaving"))
    await until(lambda: bool(second.submitted))
    [again] = second.submitted
    second.emit(again, 60)
    second.emit(again, 61, finish=FinishReason.STOP)
    await until(lambda: not client.runs)
    got: list[int] = []
    while not client._outputs.empty():
        got += [token for output in client._outputs.get_nowait().outputs for token in output.new_token_ids]
    client.shutdown()
    assert got == [60, 61]


async def test_a_grammar_that_allows_no_token_is_the_clients_fault() -> None:
    """`root ::= root` passes every parser; decode ends it at its first token, for vLLM's frontend a 500."""
    far = FakeCluster()
    client = far.client()
    faults: list[RequestError] = []
    client.on_fault = lambda request_id, fault: faults.append(fault)
    await client.add_request_async(request(structured_outputs=StructuredOutputsParams(grammar="root ::= root")))
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", finish=FinishReason.ERROR)
    await until(lambda: not client.runs)
    assert [fault.status for fault in faults] == [400] and "after 0 tokens" in faults[0].message
    await settled(client, far, {"r"})
    assert far.ends == [(1, Outcome.CANCELLED, 0)]
