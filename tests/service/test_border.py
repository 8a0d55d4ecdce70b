"""Whatever a client sends ends in an answer or in a 4xx that says what is wrong with it, and leaves nothing behind."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from live_service import ended, fetch

from app.commands.serve import Service
from app.processes import marked
from ops.chaos.fuzz import INSIDE, Case, Fuzz, problem

# A campaign by hand: PAGEFERRY_FUZZ=10000 pytest tests/service/test_border.py -k anything
REQUESTS = int(os.environ.get("PAGEFERRY_FUZZ", "400"))
SEED = int(os.environ.get("PAGEFERRY_FUZZ_SEED", "1"))
GROWTH_BYTES = 512 << 20  # caches that fill, and what the allocator keeps


def resident(service: Service) -> dict[str, int]:
    """Bytes of every process of the service, by name and pid."""
    found = {}
    for pid in marked(service.mark):
        try:
            with open(f"/proc/{pid}/statm") as sizes, open(f"/proc/{pid}/comm") as name:
                found[f"{name.read().strip()} {pid}"] = int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass  # it has ended
    return found


def admitted(service: Service) -> int:
    return int(fetch(service.url, "/status")["counters"].get("admitted", 0))


@pytest.mark.timeout(3600)
def test_anything_a_client_sends_ends_well(service: Service, quiet: Any) -> None:
    fuzz = Fuzz(fetch(service.url, "/openapi.json"), SEED)
    cases = [fuzz.case() for _ in range(REQUESTS)]
    before, memory, opened = (
        ended(service),
        resident(service),
        fetch(service.url, "/status")["counters"].get("admitted", 0),
    )
    problems: list[str] = []
    with httpx2.Client(base_url=service.url, timeout=120) as client:

        def send(case: Case) -> None:
            reply = client.post(case.path, content=case.body, headers={"content-type": "application/json"})
            if wrong := problem(case, reply.status_code, reply.text):
                problems.append(wrong)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(send, cases))
    assert not problems, f"{len(problems)} of {REQUESTS}:\n" + "\n".join(problems[:40])
    quiet()
    after, now = ended(service), admitted(service)
    assert after["failed"] == before["failed"], "a client's mistake is no failure of the service"
    assert sum(after.values()) - sum(before.values()) == now - opened, "tickets opened = tickets ended"
    grown = {name: size - memory[name] for name, size in resident(service).items() if name in memory}
    print("MiB grown:", {name: size >> 20 for name, size in grown.items() if size > 1 << 20})
    assert all(size < GROWTH_BYTES for size in grown.values()), grown


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
    ],
)
def test_a_grammar_that_allows_no_token_is_400(service: Service, form: dict[str, Any], quiet: Any) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **form}
    reply = httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 400 and "allows no token" in reply.json()["error"]["message"], reply.text
    quiet()


def test_more_sequences_than_openai_allows_are_400(service: Service) -> None:
    """Else one request of thousands holds all others up."""
    body = {"model": "smollm2", "prompt": "Hi", "max_tokens": 1, "temperature": 1, "n": 129}
    reply = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 400 and "n must be at most 128" in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/v1/responses/resp_1"])
def test_answers_say_nothing_of_the_inside(service: Service, path: str) -> None:
    text = httpx2.get(service.url + path, timeout=30).text
    assert not INSIDE.search(text), text


def test_every_answer_names_its_request(service: Service) -> None:
    reply = httpx2.post(f"{service.url}/v1/completions", json={"model": "no"}, headers={"x-request-id": "mine"})
    assert reply.status_code in (400, 404) and reply.headers["x-request-id"] == "mine"
    assert httpx2.get(f"{service.url}/health", timeout=30).headers["x-request-id"]
