"""A client that hangs up is noticed through the default ingress in every phase, however it sends its request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_service import LONG, STORY, ended, fetch, states, wait_for

from app.commands.serve import Service

NOTICED_S = 2.5  # 0.3 s where nothing else runs; the answers asked for here take at least ten times as long
TOKENS = 1000


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


class Connection:
    """HTTP on a bare socket; `writes` is how many pieces a request leaves in."""

    def __init__(self, service: Service, writes: int) -> None:
        self._socket = socket.create_connection((service.spec.frontend.host, service.spec.frontend.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writes = writes

    def post(self, **body: Any) -> None:
        head, data = self._request(body)
        for piece in [head + data] if self._writes == 1 else [head, data]:
            self._socket.sendall(piece)
            time.sleep(0.05)

    def pipeline(self, *bodies: dict[str, Any]) -> None:
        """Several requests before the first is answered."""
        self._socket.sendall(b"".join(head + data for head, data in map(self._request, bodies)))

    @staticmethod
    def _request(body: dict[str, Any]) -> tuple[bytes, bytes]:
        data = json.dumps({"model": "smollm2", "ignore_eos": True, **body}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        return f"{head}\r\n\r\n".encode(), data

    def read_answer(self) -> dict[str, Any]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._socket.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        while len(body) < length:
            body += self._socket.recv(65536)
        answer: dict[str, Any] = json.loads(body)
        return answer

    def hang_up(self) -> None:
        self._socket.close()


def noticed(what: Callable[[], bool]) -> None:
    began = time.monotonic()
    wait_for(what, NOTICED_S)
    print(f"noticed after {time.monotonic() - began:.2f} s")


def is_cancelled(service: Service, before: dict[str, int], number: int = 1) -> None:
    """Within moments, and it is counted as the client's doing."""
    noticed(lambda: not states(service))
    assert ended(service) == before | {"cancelled": before["cancelled"] + number}


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("writes", [1, 2])
def test_a_client_that_hangs_up(service: Service, phase: str, stream: bool, writes: int) -> None:
    before = ended(service)
    connection = Connection(service, writes)
    prompt = LONG if phase == "prefilling" else STORY
    connection.post(prompt=f"{time.time()} {prompt}", max_tokens=300, stream=stream)
    wait_for(lambda: phase in states(service))
    connection.hang_up()
    is_cancelled(service, before)


def test_a_client_that_hangs_up_during_its_second_request(service: Service) -> None:
    """On a connection that has been kept alive after an answer."""
    connection = Connection(service, 2)
    connection.post(prompt="Hello", max_tokens=2)
    assert connection.read_answer()["usage"]["completion_tokens"] == 2
    wait_for(lambda: not states(service))
    before = ended(service)
    connection.post(prompt=f"{time.time()} {STORY}", max_tokens=TOKENS)
    wait_for(lambda: "decoding" in states(service))
    connection.hang_up()
    is_cancelled(service, before)


def waiting(service: Service) -> int:
    return int(fetch(service.url, "/status")["queue"]["waiting"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("writes", [1, 2])
def test_a_client_that_hangs_up_while_it_waits_for_room(service: Service, stream: bool, writes: int) -> None:
    """All sequence slots of both replicas are taken by two requests with 32 answers each."""
    crowd = [Connection(service, 1) for _ in range(2)]
    for number, connection in enumerate(crowd):
        connection.post(prompt=f"{number} {time.time()} Once", max_tokens=600, n=32, stream=True)
    wait_for(lambda: sum(states(service).values()) == 2)
    before = ended(service)
    connection = Connection(service, writes)
    connection.post(prompt=f"{time.time()} Hello", max_tokens=300, stream=stream)
    wait_for(lambda: waiting(service) == 1)
    connection.hang_up()
    noticed(lambda: not waiting(service))
    assert ended(service) == before, "it never had a ticket"
    for connection in crowd:
        connection.hang_up()
    is_cancelled(service, before, len(crowd))


def test_a_client_that_hangs_up_on_a_pipeline(service: Service) -> None:
    """Its second request, sent before the first was answered, does not keep the first one alive, and never starts."""
    before = ended(service)
    connection = Connection(service, 1)
    ask = {"max_tokens": TOKENS, "prompt": f"{time.time()} {STORY}"}
    connection.pipeline(ask, ask)
    wait_for(lambda: "decoding" in states(service))
    connection.hang_up()
    is_cancelled(service, before)


def test_a_client_that_hangs_up_during_the_second_request_of_a_pipeline(service: Service) -> None:
    before = ended(service)
    connection = Connection(service, 1)
    connection.pipeline(
        {"prompt": "Hello", "max_tokens": 2}, {"max_tokens": TOKENS, "prompt": f"{time.time()} {STORY}"}
    )
    assert connection.read_answer()["usage"]["completion_tokens"] == 2
    wait_for(lambda: "decoding" in states(service) and ended(service)["done"] == before["done"] + 1)
    connection.hang_up()
    is_cancelled(service, before | {"done": before["done"] + 1})


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_clients_own_timeout(service: Service, stream: bool) -> None:
    before = ended(service)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=2.0) as client:
        ask: Callable[..., Any] = client.completions.create
        options = {"model": "smollm2", "prompt": f"{time.time()} {LONG}", "max_tokens": 300, "stream": stream}
        with pytest.raises((openai.APITimeoutError, TimeoutError)):
            answer = ask(**options, extra_body={"ignore_eos": True})
            until = time.monotonic() + 2.0
            for _ in answer:  # a stream's time-out is between two events: the whole answer's is the caller's
                if time.monotonic() > until:
                    answer.close()
                    raise TimeoutError
    is_cancelled(service, before)
