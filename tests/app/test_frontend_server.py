"""vLLM's own server code and AsyncLLM on the engine core client, over ASGI calls; only the engines are scripted."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from fake_cluster import FakeCluster, until
from fastapi import FastAPI
from frontend_server import WORDS, Echoing, Server

from actors.messages import Outcome, Overloaded, Role
from app.api.fault_injection import NoVictim
from app.api.server import _add_faults
from app.client import asgi
from app.request import context
from ops.chaos.fuzz import Fuzz, problem

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    made.llm.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def server(started: Server) -> AsyncIterator[Server]:
    """Nothing of a test's requests is left in vLLM or in the client."""
    Echoing.__init__(started.far)  # as new, and still the ports that the client has
    started.missing = ""
    yield started
    await until(lambda: not started.client.runs and not started.client.groups)
    await until(lambda: not started.llm.output_processor.request_states)
    assert not started.llm.output_processor.parent_requests
    assert not started.client._open_groups
    started.client.streams.close("the test is over")
    await until(lambda: not list(started.client.streams))


async def test_an_answer_in_vllms_own_words(server: Server) -> None:
    status, _, body = await server.complete()
    assert status == 200 and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


async def test_a_stream(server: Server) -> None:
    status, headers, text = await server.complete(stream=True)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert text.rstrip().endswith("data: [DONE]")


async def test_n_sequences_are_one_ticket(server: Server) -> None:
    _, _, body = await server.complete(n=3, temperature=1.0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.num_sequences for request in server.far.admits] == [3]
    await until(lambda: server.far.ends)
    assert server.far.ends == [(1, Outcome.DONE, 12)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_no_room_is_429(server: Server, stream: bool, n: int) -> None:
    server.far.admit_answer = Overloaded(reason="decode is full", retry_after_s=7.2)
    status, headers, body = await server.complete(stream=stream, n=n, temperature=1.0)
    assert (status, headers["retry-after"]) == (429, "8")
    assert "decode is full" in body["error"]["message"] and body["error"]["code"] == 429


async def test_a_stop_string_stops_decode(server: Server) -> None:
    text = server.llm.get_tokenizer().decode(WORDS[:3])
    _, _, body = await server.complete(stop=[text[-1]], max_tokens=500)
    assert body["choices"][0]["finish_reason"] == "stop"
    await until(lambda: server.far.decodes["d1"].aborted)
    await until(lambda: server.far.ends)
    assert server.far.ends[0][1] is Outcome.DONE


async def test_a_decode_that_dies_is_not_noticed(server: Server) -> None:
    server.far.after = 2
    server.far.use_prefill = False
    server.far.lost_answers = [server.far.ticket(1, 2, decode="d2")]
    whole = asyncio.ensure_future(server.complete(stream=True, max_tokens=4, temperature=0))
    d1 = server.far.decodes["d1"]
    await until(lambda: any(run.tokens for run in server.client.runs.values()))
    await until(lambda: all(len(run.tokens) == 2 for run in server.client.runs.values()))
    d1.die()
    _, _, text = await whole
    choices = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert choices[-1]["finish_reason"] == "length"
    # d2 starts its own count: two tokens of d1, then two of d2, and not one of them twice.
    expected = server.llm.get_tokenizer().decode([*WORDS[:2], *WORDS[:2]])
    assert "".join(choice["text"] for choice in choices) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_go_on_is_a_clear_error(server: Server, stream: bool) -> None:
    server.far.after = 2
    server.far.use_prefill = False
    body = {"stream": stream, "temperature": 1.0, "presence_penalty": 0.5, "max_tokens": 4}
    whole = asyncio.ensure_future(server.complete(**body))
    await until(lambda: server.client.runs and all(len(run.tokens) == 2 for run in server.client.runs.values()))
    server.far.decodes["d1"].die()
    status, _, answer = await whole
    if stream:  # its first tokens are out under status 200
        [error] = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith('data: {"error"')]
        assert error["error"]["code"] == 503
    else:
        assert status == 503 and "cannot be continued exactly" in answer["error"]["message"]


FORMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello there", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hello there", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4},
}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]


async def mismatch(server: Server, path: str, tokens: int, **body: Any) -> tuple[int, dict[str, str], bytes]:
    """Asks; after `tokens` tokens decode finds that a page is not the request's own."""
    server.far.after, server.far.use_prefill = tokens, False
    whole = asyncio.ensure_future(server.ask(path, {**FORMS[path], "temperature": 0, **body}))
    d1 = server.far.decodes["d1"]
    await until(lambda: d1.submitted and all(len(run.tokens) == tokens for run in server.client.runs.values()))
    d1.page_mismatch(next(iter(d1.submitted)))
    return await asyncio.wait_for(whole, 10.0)


@pytest.mark.parametrize("path", FORMS)
async def test_a_page_mismatch_is_500_with_a_type_of_its_own(server: Server, path: str) -> None:
    status, headers, raw = await mismatch(server, path, 2)
    error = json.loads(raw)["error"]
    assert (status, error["type"]) == (500, "page_integrity_error")
    assert int(headers["content-length"]) == len(raw) and headers["content-type"] == "application/json"
    assert error["message"].startswith("request ") and "after 2 tokens" in error["message"]
    assert "send it again" in error["message"]
    await until(lambda: server.far.ends)
    assert [outcome for _, outcome, _ in server.far.ends] == [Outcome.FAILED]
    assert not server.far.decodes["d1"].aborted, "the engine has ended it by itself"


@pytest.mark.parametrize("path", [path for path in FORMS if path != "/v1/responses"])
async def test_before_the_first_token_a_stream_is_500_too(server: Server, path: str) -> None:
    status, _, raw = await mismatch(server, path, 0, stream=True)
    assert (status, json.loads(raw)["error"]["type"]) == (500, "page_integrity_error")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_page_mismatch_ends_a_stream_with_the_error(server: Server, path: str) -> None:
    status, _, raw = await mismatch(server, path, 2, stream=True)
    *events, last = events_of(raw)
    assert status == 200 and raw.rstrip().endswith(b"data: [DONE]")
    assert (last["error"]["type"], last["error"]["code"]) == ("page_integrity_error", 500)
    [choice] = last["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "error")
    assert (last["id"], last["object"]) == (events[0]["id"], events[0]["object"])
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
    assert text == server.llm.get_tokenizer().decode(WORDS[:2]), "every token before the faulty step, none of it"
    assert all(choice["finish_reason"] is None for choice in choices)


async def test_a_responses_stream_ends_with_error_and_failed(server: Server) -> None:
    status, _, raw = await mismatch(server, "/v1/responses", 2, stream=True)
    events = events_of(raw)
    error, failed = events[-2:]
    assert status == 200 and events[0]["type"] == "response.created"
    assert (error["type"], error["code"]) == ("error", "page_integrity_error")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "page_integrity_error"
    assert failed["response"]["id"] == events[0]["response"]["id"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_messages_stream_ends_with_the_error(server: Server) -> None:
    status, _, raw = await mismatch(server, "/v1/messages", 2, stream=True)
    last = events_of(raw)[-1]
    assert status == 200 and (last["type"], last["error"]["type"]) == ("error", "page_integrity_error")


async def test_one_of_n_sequences_ends_the_whole_request(server: Server) -> None:
    server.far.after, server.far.use_prefill = 2, False
    whole = asyncio.ensure_future(server.complete(n=2, temperature=1.0))
    d1 = server.far.decodes["d1"]
    await until(lambda: len(d1.submitted) == 2 and all(len(run.tokens) == 2 for run in server.client.runs.values()))
    victim, other = d1.submitted
    d1.page_mismatch(victim)
    status, _, body = await whole
    assert (status, body["error"]["type"]) == (500, "page_integrity_error")
    await until(lambda: server.far.ends)
    assert d1.aborted == [other]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(server: Server, stream: bool) -> None:
    server.far.after = 2
    call = asgi.call(
        server.app,
        "POST",
        "/v1/completions",
        {"content-type": "application/json", "authorization": "Bearer sk-red"},
        json.dumps({"model": "smollm2", "prompt": "Hi", "max_tokens": 9, "stream": stream}).encode(),
    )
    reading = asyncio.ensure_future(anext(call))
    await until(lambda: server.client.runs and all(len(run.tokens) == 2 for run in server.client.runs.values()))
    if stream:
        await reading
    else:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await call.aclose()
    await until(lambda: server.far.ends)
    assert server.far.ends == [(1, Outcome.CANCELLED, 2)]
    assert server.far.decodes["d1"].aborted == list(server.far.decodes["d1"].submitted)


async def test_tenants_have_salts_of_their_own_on_every_route(server: Server) -> None:
    for key in ("sk-red", "sk-blue"):
        assert (await server.ask("/v1/completions", {"prompt": "x " * 80, "max_tokens": 1}, key))[0] == 200
    salts = [request.cache_salt for request in server.far.decodes["d1"].submitted.values()]
    assert salts == [context.cache_salt("red"), context.cache_salt("blue")]
    red, blue = server.far.admits
    assert (red.tenant, blue.tenant) == ("red", "blue")
    assert red.prefix_hashes and not set(red.prefix_hashes) & set(blue.prefix_hashes)
    assert (await server.ask("/v1/models", key="sk-none"))[0] == 401


async def test_health_says_what_is_missing(server: Server) -> None:
    assert (await server.ask("/health"))[0] == 200
    server.missing = "no decode replica has joined"
    status, _, raw = await server.ask("/health")
    assert status == 503 and json.loads(raw)["error"]["message"] == "no decode replica has joined"


async def test_status_and_audit(server: Server) -> None:
    assert json.loads((await server.ask("/status"))[2]) == {"pools": {}}
    assert json.loads((await server.ask("/status/audit"))[2]) == {"breaches": []}
    assert json.loads((await server.ask("/status?audit=1"))[2]) == {"pools": {}, "audit": {"breaches": []}}
    assert json.loads((await server.ask("/status?audit=0"))[2]) == {"pools": {}}


async def test_faults_have_a_route_only_where_they_are_configured(server: Server) -> None:
    assert (await server.ask("/faults", {"kind": "bit_flip", "victim": "x"}))[0] == 404

    async def fault(kind: str, victim: str, trial: int, more: float) -> Any:
        if victim == "unknown":
            raise NoVictim("no request 'unknown'")
        return {"fired": (kind, victim, trial, more)}

    routes = FastAPI()
    _add_faults(routes, fault)

    async def ask(body: dict[str, Any]) -> tuple[int, Any]:
        reply, *chunks = [item async for item in asgi.call(routes, "POST", "/faults", {}, json.dumps(body).encode())]
        return reply[0], json.loads(b"".join(chunks))

    done = await ask({"kind": "bit_flip", "victim": "x", "trial": 3})
    assert done == (200, {"fired": ["bit_flip", "x", 3, 0.0]})
    assert (await ask({"kind": "bit_flip", "victim": "unknown"}))[0] == 404
    status, body = await ask({"victim": "x"})
    assert status == 400 and "kind" in body["error"]["message"]


async def test_forms_that_are_not_offered_say_so(server: Server) -> None:
    with pytest.raises(NotImplementedError, match="pause_scheduler"):
        await server.llm.pause_generation()


async def test_retry_after_survives() -> None:
    from app.api.errors import to_exception
    from app.request.events import RequestError

    fault = RequestError(429, "no room", 2.0)
    assert to_exception(fault).fault == replace(fault)


async def test_a_pools_size_is_set_and_what_is_wrong_with_one_is_said(server: Server) -> None:
    status, _, body = await server.ask("/admin/scale", {"pool": "decode", "replicas": 2})
    assert (status, server.sizes) == (400, []) and b"model" in body, "an unknown field"
    for size, code, word in (
        ({"pool": "decode", "replicas": 2, "hold_s": 90}, 200, "decode"),
        ({"pool": "decode", "replicas": 9}, 409, "outside its bounds"),
        ({"pool": "cache", "replicas": 2}, 400, "pool"),
        ({"pool": "decode", "replicas": -1}, 400, "replicas"),
        ({"pool": "decode", "replicas": 1, "hold_s": "x"}, 400, "hold_s"),
    ):
        headers = {"content-type": "application/json", "authorization": "Bearer sk-red"}
        reply, *chunks = [
            item async for item in asgi.call(server.app, "POST", "/admin/scale", headers, json.dumps(size).encode())
        ]
        assert reply[0] == code and word.encode() in b"".join(chunks)
    assert server.sizes == [(Role.DECODE, 2, 90.0), (Role.DECODE, 9, 600.0)]


async def test_a_server_starts_without_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asleep(self: FakeCluster, method: str, args: list[Any]) -> list[Any]:
        raise AssertionError(f"{method} was asked of an engine")

    monkeypatch.setattr(FakeCluster, "utility", asleep)
    made = Server()
    await asyncio.wait_for(made.start(), 60)
    try:
        assert made.client.supported_tasks == ("generate",)
        assert (await made.ask("/v1/models"))[0] == 200
    finally:
        made.llm.shutdown()


async def test_anything_a_client_sends_ends_in_an_answer_or_a_4xx(server: Server) -> None:
    """Lone surrogates, huge integers, NaN, deep nesting and wrong types in the fields of every client route."""
    key = {"content-type": "application/json", "authorization": "Bearer sk-red"}
    peer = ("10.0.0.9", 5000)
    _, *chunks = [item async for item in asgi.call(server.app, "GET", "/openapi.json", key, None, peer)]
    fuzz = Fuzz(json.loads(b"".join(chunks)), seed=1)
    problems = []
    for _ in range(400):
        case = fuzz.case()
        reply, *chunks = [item async for item in asgi.call(server.app, "POST", case.path, key, case.body, peer)]
        problems += [wrong] if (wrong := problem(case, reply[0], b"".join(chunks).decode())) else []
    assert not problems, "\n".join(problems[:20])
    await until(lambda: len(server.far.ends) == len(server.far.admits))
    assert all(outcome is not Outcome.FAILED for _, outcome, _ in server.far.ends)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/v1/completions", "structured_outputs", -1), ("/v1/chat/completions", "structured_outputs", [1])],
)
async def test_a_type_that_a_validator_of_vllms_breaks_on_is_400(
    server: Server, path: str, field: str, value: Any
) -> None:
    status, _, raw = await server.ask(path, {**FORMS[path], field: value})
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (400, field) and field in error["message"]
    assert not server.far.admits


async def test_unknown_routes_and_wrong_methods_are_said_in_the_apis_form(server: Server) -> None:
    status, _, raw = await server.ask("/v1/nothing")
    error = json.loads(raw)["error"]
    assert (status, error["code"], error["type"]) == (404, 404, "NotFoundError") and "/v1/nothing" in error["message"]
    status, headers, raw = await server.ask("/v1/completions")
    error = json.loads(raw)["error"]
    assert (status, error["code"], headers["allow"]) == (405, 405, "POST") and "it takes POST" in error["message"]


async def test_the_api_document_is_pageferrys(server: Server) -> None:
    _, _, raw = await server.ask("/openapi.json")
    assert json.loads(raw)["info"] == {"title": "pageferry", "version": importlib.metadata.version("pageferry")}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_is_not_counted_as_answered(server: Server, stream: bool) -> None:
    async def counted(status: str) -> float:
        text = (await server.ask("/metrics"))[2].decode()
        found = re.findall(rf'http_requests_total{{[^}}]*"/v1/completions"[^}}]*status="{status}"}} (\S+)', text)
        return sum(map(float, found))

    before = {status: await counted(status) for status in ("2xx", "4xx")}
    server.far.after = 2
    body = {"model": "smollm2", "prompt": "Hello there", "max_tokens": 9, "stream": stream}
    headers = {"content-type": "application/json", "authorization": "Bearer sk-red"}
    answer = asgi.call(server.app, "POST", "/v1/completions", headers, json.dumps(body).encode())
    if stream:
        assert (await anext(answer))[0] == 200 and await anext(answer)
    else:
        waiting = asyncio.ensure_future(anext(answer))
        await until(lambda: any(len(run.tokens) == 2 for run in server.client.runs.values()))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await answer.aclose()
    assert (await counted("4xx") - before["4xx"], await counted("2xx") - before["2xx"]) == (1, 0)


async def test_status_without_a_controller_is_503(server: Server) -> None:
    server.away = "the controller is away"
    status, headers, raw = await server.ask("/status")
    server.away = ""
    assert (status, headers["retry-after"], b"controller is away" in raw) == (503, "1", True)
