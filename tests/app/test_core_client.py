"""One request's way through the engine core client, with every wire in the test's hands.

Invariants, checked at the end of every test by `settled`:
1. Every ticket that was granted is ended exactly once.
2. A decode replica that lives and has an unfinished request of ours was asked to abort it.
3. Nothing of a request is left in the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest
from fake_cluster import FakeCluster, cancel, request, settled, tokens_of, until
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import FinishReason

from actors.messages import CommandKind, FrontendCommand, Outcome, Overloaded, Role, Verdict
from app.api.errors import RequestErrorResponse
from app.request import context
from app.request.events import RequestError

STOP = FinishReason.STOP


async def test_tokens_arrive_once_and_in_order() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    assert far.prefill_calls == [("p1", 1)]
    assert d1.hand_overs["r"] is not None
    d1.emit("r", 5, cached=9)
    first = await client.get_output_async()
    # What a single engine would report: the prompt's tokens found in prefill's own prefix cache.
    assert first.outputs[0].prefill_stats is not None and first.outputs[0].prefill_stats.num_cached_tokens == 3
    d1.emit("r", 6, 7)
    d1.emit("r", 8, finish=STOP)
    assert await tokens_of(client, "r", 3) == [6, 7, 8]
    await settled(client, far, {"r"})
    assert far.ends == [(1, Outcome.DONE, 4)]


async def test_prefill_gets_a_plain_request_and_decode_the_clients_own() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request(max_tokens=5, presence_penalty=0.5, seed=3, temperature=0.7, logprobs=2))
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    params = d1.submitted["r"].sampling_params
    assert params is not None
    assert (params.max_tokens, params.presence_penalty, params.seed, params.logprobs) == (5, 0.5, 3, 2)
    await cancel(client, "r")
    await settled(client, far)


async def test_the_first_token_is_out_before_the_pages_have_moved() -> None:
    far = FakeCluster()
    far.prefill_token = 5
    far.submit_gate.clear()
    client = far.client()
    await client.add_request_async(request(max_tokens=8, min_tokens=3, logit_bias={4: 1.0}))
    first = await asyncio.wait_for(client.get_output_async(), 5.0)
    [output] = first.outputs
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("r", [5], None)
    assert output.prefill_stats is not None and output.prefill_stats.num_cached_tokens == 3
    [asked] = [each.sampling_params for each in far.prefilled]
    assert asked is not None
    assert (asked.max_tokens, asked.min_tokens, asked.logit_bias) == (1, 1, {4: 1.0}), "sampled as the client wants it"
    d1 = far.decodes["d1"]
    assert not d1.submitted
    far.submit_gate.set()
    await until(lambda: "r" in d1.submitted)
    following = d1.submitted["r"]
    assert following.prompt_token_ids == [*range(10), 5] and d1.hand_overs["r"] is not None
    assert following.sampling_params is not None
    assert (following.sampling_params.max_tokens, following.sampling_params.min_tokens) == (7, 2)
    d1.emit("r", 6, cached=10)
    d1.emit("r", 7, finish=STOP)
    second = await client.get_output_async()
    assert second.outputs[0].new_token_ids == [6] and second.outputs[0].prefill_stats is None, "usage is counted once"
    assert await tokens_of(client, "r", 1) == [7]
    await settled(client, far, {"r"})
    assert far.ends == [(1, Outcome.DONE, 3)]


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 1},  # prefill ends no request
        {"presence_penalty": 0.5},  # decode's engine has to remember the token as its own output
        {"temperature": 1.0, "seed": 4},
        {"bad_words": ["a b"]},
    ],
)
async def test_decode_samples_the_first_token_of_what_it_could_not_continue(params: dict[str, Any]) -> None:
    far = FakeCluster()
    far.prefill_token = 5
    client = far.client()
    await client.add_request_async(request(**params))
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    [asked] = [each.sampling_params for each in far.prefilled]
    assert asked is not None and asked.max_tokens == 1 and asked.ignore_eos and asked.temperature == 0.0
    assert d1.submitted["r"].prompt_token_ids == [*range(10)]
    d1.emit("r", 8, finish=STOP)
    assert await tokens_of(client, "r", 1) == [8]
    await settled(client, far, {"r"})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_end_that_prefill_samples_is_the_end(temperature: float) -> None:
    """Drawn once: decode asked again would make an end as rare as its probability squared."""
    far = FakeCluster()
    far.prefill_token, far.prefill_finish = 2, STOP
    far.submit_gate.clear()
    client = far.client()
    await client.add_request_async(request(temperature=temperature))
    [output] = (await asyncio.wait_for(client.get_output_async(), 5.0)).outputs
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("r", [2], STOP)
    await settled(client, far)
    assert far.ends == [(1, Outcome.DONE, 1)] and not far.decodes["d1"].submitted


async def test_a_stop_string_in_the_first_token_ends_it_before_decode_has_it() -> None:
    far = FakeCluster()
    far.prefill_token = 5
    far.submit_gate.clear()
    client = far.client()
    await client.add_request_async(request(stop=["x"]))
    assert await tokens_of(client, "r", 1) == [5]
    await client.abort_requests_async(["r"])  # vLLM's output processor has seen the string
    far.submit_gate.set()
    await settled(client, far)
    assert far.ends == [(1, Outcome.DONE, 1)]


async def test_a_prefill_whose_seal_does_not_come_is_run_again_after_its_token() -> None:
    far = FakeCluster()
    far.prefill_token, far.hand_over_answer = 5, Verdict.MISSING
    far.lost_answers = [far.ticket(1, 2, prefill="p2"), far.ticket(1, 3)]
    client = far.client()
    await client.add_request_async(request(max_tokens=8))
    assert await tokens_of(client, "r", 2) == [5, 5], "one of each prefill"
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    assert [each.prompt_token_ids for each in far.prefilled] == [[*range(10)], [*range(10), 5]]
    assert d1.submitted["r"].prompt_token_ids == [*range(10), 5, 5] and d1.hand_overs["r"] is None
    assert [loss[0] for loss in far.losses] == [Role.PREFILL, Role.PREFILL]
    d1.emit("r", 7, finish=STOP)
    assert await tokens_of(client, "r", 1) == [7]
    await settled(client, far, {"r"})
    assert far.ends == [(1, Outcome.DONE, 3)]


async def test_the_controller_hears_how_long_the_client_waits() -> None:
    far = FakeCluster()
    client = far.client()
    token = context.CALLER.set(context.Caller(patience_s=2.5))
    try:
        await client.add_request_async(request())
    finally:
        context.CALLER.reset(token)
    await cancel(client, "r")
    await settled(client, far)
    assert far.admits[0].patience_s == 2.5


async def test_no_room_raises_429_before_anything_is_sent() -> None:
    far = FakeCluster()
    far.admit_answer = Overloaded(reason="decode is full", retry_after_s=3.0)
    client = far.client()
    with pytest.raises(GracefulHTTPError, match="decode is full") as caught:
        await client.add_request_async(request())
    assert caught.value.http_status == 429
    await settled(client, far)
    assert not far.prefill_calls and not far.ends


async def test_internal_fields_never_reach_an_engine() -> None:
    client = FakeCluster().client()
    with pytest.raises(VLLMValidationError, match="kv_transfer_params"):
        await client.add_request_async(request(extra_args={"kv_transfer_params": {"pageferry": {}}}))
    assert not client.runs


@pytest.mark.parametrize("phase", ["admit", "prefill", "submit", "stream"])
async def test_a_client_that_leaves_is_heard_in_every_phase(phase: str) -> None:
    far = FakeCluster()
    gate = {"admit": far.admit_gate, "prefill": far.prefill_gate, "submit": far.submit_gate}.get(phase)
    if gate is not None:
        gate.clear()
    client = far.client()
    adding = asyncio.ensure_future(client.add_request_async(request()))
    d1 = far.decodes["d1"]
    if phase == "admit":
        await asyncio.sleep(0.01)
        adding.cancel()
        await until(lambda: far.withdrawn == 1)
        await settled(client, far)
        return
    await adding
    if phase == "prefill":
        await until(lambda: far.prefill_calls)
    elif phase == "submit":
        await until(lambda: d1.streams)
        await asyncio.sleep(0.01)
    else:
        await until(lambda: "r" in d1.submitted)
        d1.emit("r", 5)
        await tokens_of(client, "r", 1)
    await cancel(client, "r")
    if phase == "prefill":
        await until(lambda: far.prefill_cancelled == 1)
    if phase == "submit":
        await asyncio.sleep(0.01)
        assert not far.ends, "the call to decode is under way: the abort must come after it"
        far.submit_gate.set()
    await settled(client, far)
    assert [outcome for _, outcome, _ in far.ends] == [Outcome.CANCELLED]


async def test_a_stop_string_ends_it_as_done_and_in_decode() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 5)
    await tokens_of(client, "r", 1)
    await client.abort_requests_async(["r"])  # as AsyncLLM's output handler does when it finds a stop string
    await settled(client, far)
    assert far.ends == [(1, Outcome.DONE, 1)] and d1.aborted == ["r"]


async def test_an_engine_error_is_passed_on_and_ends_as_failed() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", finish=FinishReason.ERROR)
    outputs = await client.get_output_async()
    assert outputs.outputs[0].finish_reason is FinishReason.ERROR
    await settled(client, far, {"r"})
    assert far.ends == [(1, Outcome.FAILED, 0)]


async def test_the_controller_can_give_a_ticket_up() -> None:
    far = FakeCluster()
    client = far.client()
    faults: list[tuple[str, RequestError]] = []
    client.on_fault = lambda request_id, fault: faults.append((request_id, fault))
    await client.add_request_async(request())
    await until(lambda: "r" in far.decodes["d1"].submitted)
    client.obey(FrontendCommand(kind=CommandKind.CANCELLED, ticket_id=1, attempt=0, reason="of another attempt"))
    client.obey(
        FrontendCommand(kind=CommandKind.LOST, ticket_id=1, attempt=2, replica_id="d1", reason="of another attempt")
    )
    await asyncio.sleep(0.01)
    assert not faults and not far.losses
    client.obey(FrontendCommand(kind=CommandKind.CANCELLED, ticket_id=1, attempt=1_000, reason="drained by hand"))
    await until(lambda: faults)
    assert faults[0][1].status == 503 and "drained by hand" in faults[0][1].message
    await settled(client, far)


async def test_claims_say_what_a_new_controller_must_know() -> None:
    far = FakeCluster()
    client = far.client()
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 50)
    await tokens_of(client, "r", 1)
    [claim] = client.claims()
    assert (claim.ticket.ticket_id, claim.request.request_id, claim.num_output_tokens, claim.decoding) == (
        1,
        "r",
        1,
        True,
    )
    assert client.live_tickets() == (1,)
    await cancel(client, "r")
    await settled(client, far)
    assert not client.claims()


async def test_what_other_requests_live_on_does_not_run_on_behalf_of_one() -> None:
    """Serve cancels every call made in the context of a request whose client is gone."""
    of_a_request: ContextVar[str] = ContextVar("of_a_request", default="")
    seen: list[tuple[str, str]] = []

    class Spy(FakeCluster):
        async def admit(self, request: Any) -> Any:
            seen.append(("admit", of_a_request.get()))
            return await super().admit(request)

        async def prefill(self, *args: Any) -> Any:
            seen.append(("prefill", of_a_request.get()))
            return await super().prefill(*args)

        async def submit(self, *args: Any) -> None:
            seen.append(("submit", of_a_request.get()))
            await super().submit(*args)

        async def outputs(self, replica_id: str) -> AsyncIterator[list[bytes]]:
            seen.append(("outputs", of_a_request.get()))
            async for frames in super().outputs(replica_id):
                yield frames

        async def ended(self, *args: Any) -> None:
            seen.append(("ended", of_a_request.get()))
            await super().ended(*args)

    far = Spy()
    client = far.client()
    of_a_request.set("r")
    await client.add_request_async(request())
    d1 = far.decodes["d1"]
    await until(lambda: "r" in d1.submitted)
    d1.emit("r", 5, finish=STOP)
    await settled(client, far, {"r"})
    assert sorted(seen) == [(call, "") for call in ("admit", "ended", "outputs", "prefill", "submit")]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"top_k": 10**26, "temperature": 1.0}, "top_k"),
        ({"stop": ["\udfff"]}, "stop"),
        ({"extra_args": {"a": "\ud800"}}, "extra_args"),
    ],
)
async def test_what_no_message_to_an_engine_can_hold_is_400_before_there_is_a_ticket(
    params: dict[str, Any], field: str
) -> None:
    far = FakeCluster()
    client = far.client()
    with pytest.raises(VLLMValidationError, match=field) as caught:
        await client.add_request_async(request(**params))
    assert caught.value.parameter == field
    assert not far.admits and not client.runs
    client.shutdown()


SECRET = "/opt/service.py pid=77 ip=10.0.0.7"


@pytest.mark.parametrize("where", ["prefill", "submit", "stream", "admit"])
async def test_no_word_of_an_error_inside_reaches_the_client(where: str) -> None:
    far = FakeCluster()
    error = RuntimeError(SECRET)
    far.lost_answers = [Overloaded(reason="nothing is left", retry_after_s=1.0)] * 9
    client = far.client()
    faults: list[RequestError] = []
    client.on_fault = lambda request_id, fault: faults.append(fault)
    if where == "prefill":
        far.prefill_fails["p1"] = error

    async def fails(*args: Any) -> Any:
        raise error

    async def stream(replica_id: str) -> Any:
        yield []
        raise error

    if where == "submit":
        far.submit = fails  # type: ignore[method-assign]
    elif where == "stream":
        far.outputs = stream  # type: ignore[method-assign]
    elif where == "admit":
        far.admit = fails  # type: ignore[method-assign]
    try:
        await client.add_request_async(request())
    except RequestErrorResponse as refused:
        faults.append(refused.fault)
    await until(lambda: faults)
    assert faults[0].status in (500, 503)
    texts = [fault.message for fault in faults] + [loss[2] for loss in far.losses]
    assert not any(word in text for text in texts for word in ("/opt", "pid", "10.0.0.7"))
    client.shutdown()
