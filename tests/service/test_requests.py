"""Requests through the real service: hand-over, n, two frontends, internal fields, the client by HTTP and handle."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_service import STORY, fetch
from ray import serve

from app.client import AsyncClient, Client, ServiceError
from app.commands.serve import APPLICATION, Service


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


def ferry(service: Service) -> dict[str, int]:
    found: dict[str, int] = fetch(service.url, "/status")["ferry"]
    return found


def test_a_prompt_is_handed_over_and_not_computed_again(service: Service, client: Client, quiet: Any) -> None:
    before = ferry(service)
    # An unseen prompt: neither side has a page of it.
    answer = client.complete(f"{time.time()} " + STORY * 20, max_tokens=4, temperature=0)
    assert answer.usage.completion_tokens == 4
    quiet()  # heartbeats with the counters have come in
    after = ferry(service)
    moved = after["tokens_moved"] - before["tokens_moved"]
    assert moved == answer.usage.prompt_tokens
    assert after["tokens_recomputed"] == before["tokens_recomputed"]
    assert after["bytes_moved"] > before["bytes_moved"]


def test_n_sequences_share_one_hand_over(service: Service, client: Client, quiet: Any) -> None:
    before = fetch(service.url, "/status")
    answer = client.complete(f"{time.time()} names: " + STORY * 3, n=4, max_tokens=6, temperature=0.9, seed=1)
    assert len({choice.text for choice in answer.choices}) > 1
    quiet()
    after = fetch(service.url, "/status")
    assert after["counters"]["admitted"] - before["counters"]["admitted"] == 1
    assert after["ferry"]["tokens_moved"] - before["ferry"]["tokens_moved"] == answer.usage.prompt_tokens


def test_a_form_that_cannot_be_split_is_served_by_decode_alone(service: Service, client: Client, quiet: Any) -> None:
    before = ferry(service)
    answer = client.complete(STORY * 2, max_tokens=2, temperature=0, prompt_logprobs=1)
    assert len(answer.raw["choices"][0]["prompt_logprobs"]) == answer.usage.prompt_tokens
    quiet()
    assert ferry(service)["tokens_moved"] == before["tokens_moved"]


def test_many_at_once_over_both_frontends(service: Service, client: Client) -> None:
    assert len(fetch(service.url, "/status")["frontends"]) == 2

    def ask(number: int) -> str:
        return client.complete(f"Number {number} is" + STORY, max_tokens=8, temperature=0).text

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    # Batched rows may round differently, so a tie may fall the other way; most must not.
    assert sum(one == other for one, other in zip(alone, together)) >= 6


def test_internal_fields_from_outside_are_400(client: Client) -> None:
    forbidden: tuple[dict[str, Any], ...] = (
        {"kv_transfer_params": {"pageferry": {}}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    )
    for extra in forbidden:
        with pytest.raises(ServiceError, match="kv_transfer_params") as caught:
            client.complete("Hello", max_tokens=1, **extra)
        assert caught.value.status == 400


def test_no_room_is_429_with_retry_after(client: Client) -> None:
    """Prompts of 60 pages, 22 MB each: staging has room for two, the queue for twelve. The rest is refused."""
    prompt = STORY * 120
    client.complete(prompt, max_tokens=1)  # computed once; what is asked for is room, not work

    def ask(_: int) -> int:
        try:
            client.complete(prompt, max_tokens=40, ignore_eos=True, temperature=0)
            return 200
        except ServiceError as error:
            assert error.status == 429 and error.retry_after_s is not None and error.retry_after_s >= 1
            return error.status

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    assert set(answers) == {200, 429}
    assert answers.count(200) >= 6
    assert client.complete("Hello", max_tokens=1).usage.completion_tokens == 1


def test_health_version_metrics_models(service: Service, client: Client) -> None:
    assert client.healthy()
    assert client.request("GET", "/v1/models")["data"][0]["id"] == "smollm2"
    assert "version" in client.request("GET", "/version")
    reply = client.http.get("/metrics")
    assert reply.status_code == 200 and "vllm:request_success_total" in reply.text


class TestOverAHandle:
    """The Python client without HTTP."""

    def test_sync(self, service: Service) -> None:
        with Client(serve.get_app_handle(APPLICATION)) as client:
            answer = client.chat("Name a colour.", max_tokens=5, temperature=0)
            assert answer.usage.completion_tokens == 5 and answer.model == "smollm2"
            with client.stream_chat("Count.", max_tokens=6, temperature=0, ignore_eos=True) as stream:
                deltas = list(stream)
            assert deltas[-1].finish_reason == "length"
            with pytest.raises(ServiceError) as caught:
                client.chat("x", max_tokens=10**6)
            assert caught.value.status == 400

    def test_async_with_cancellation(self, service: Service) -> None:
        async def talk() -> None:
            async with (
                AsyncClient(serve.get_app_handle(APPLICATION)) as client,
                client.stream_chat("Count.", max_tokens=1500, ignore_eos=True) as stream,
            ):
                async for delta in stream:
                    if delta.text:
                        break

        asyncio.run(talk())  # `quiet` sees that the 1,499 other tokens are not computed
