"""A client that hangs up is noticed through the default ingress in prefill and decode, however it sends its request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_service import LONG, STORY, ended, states, wait_for

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
        data = json.dumps({"model": "smollm2", "ignore_eos": True, **body}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        pieces = [f"{head}\r\n\r\n".encode(), data]
        if self._writes == 1:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            self._socket.sendall(piece)
            time.sleep(0.05)

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


def is_cancelled(service: Service, before: dict[str, int]) -> None:
    """Within moments, and it is counted as the client's doing."""
    wait_for(lambda: not states(service), NOTICED_S)
    assert ended(service) == before | {"cancelled": before["cancelled"] + 1}


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
