"""A client leaves or a replica dies at each phase of a ticket: afterwards blocks, staging and tickets are at zero."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
from live_service import LONG, STORY, ended, fetch, states, wait_for

from app.client import Client
from app.commands.serve import Service


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


def hang_up(service: Service, path: str, body: str, when: Any) -> None:
    """Sends a request on a bare socket and closes it when `when()` is true."""
    host, port = service.spec.frontend.host, service.spec.frontend.port
    with socket.create_connection((host, port)) as wire:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        wire.sendall((head + body).encode())
        wait_for(when)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # as a killed process would


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(service: Service, phase: str, stream: bool) -> None:
    """Prefill or decode stops within moments: the 1,000s of tokens that were asked for would take a minute."""
    before = ended(service)
    prompt = LONG if phase == "prefilling" else STORY
    body = f'{{"model": "smollm2", "prompt": "{time.time()} {prompt}", "max_tokens": 300, "ignore_eos": true, '
    body += f'"stream": {str(stream).lower()}}}'
    hang_up(service, "/v1/completions", body, lambda: phase in states(service))
    gone = time.monotonic()
    wait_for(lambda: not states(service), 5.0)
    assert time.monotonic() - gone < 5.0
    assert ended(service) == before | {"cancelled": before["cancelled"] + 1}


def test_a_client_that_hangs_up_with_n_sequences(service: Service) -> None:
    before = ended(service)
    body = f'{{"model": "smollm2", "prompt": "{time.time()} {STORY}", "max_tokens": 300, "ignore_eos": true, "n": 3}}'
    hang_up(service, "/v1/completions", body, lambda: "decoding" in states(service))
    wait_for(lambda: not states(service), 5.0)
    assert ended(service) == before | {"cancelled": before["cancelled"] + 1}


class Streaming(threading.Thread):
    """A client that reads a whole stream; `text` and `error` are what it saw."""

    def __init__(self, service: Service, prompt: str, **options: Any) -> None:
        super().__init__()
        self.service, self.prompt, self.options = service, prompt, options
        self.tokens: list[str] = []
        self.ids: list[int] = []
        self.finish: str | None = None
        self.usage: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with (
                Client(self.service.url, model="smollm2") as client,
                client.stream_complete(
                    self.prompt,
                    stream_options={"include_usage": True},
                    return_token_ids=True,
                    **self.options,
                ) as stream,
            ):
                for delta in stream:
                    self.tokens.append(delta.text)
                    if delta.index >= 0:
                        self.ids += delta.raw["choices"][0].get("token_ids") or []
                    self.finish = delta.finish_reason or self.finish
                    self.usage = delta.usage or self.usage
        except Exception as error:
            self.error = error


def busy_decode(service: Service) -> dict[str, Any] | None:
    replicas = fetch(service.url, "/status")["pools"]["decode"]["replicas"]
    return next((each for each in replicas if each["running"]), None)


def wait_whole(service: Service, pool: str, count: int) -> None:
    """Until the pool has its replicas back: engines take a while to start."""

    def whole() -> bool:
        replicas = fetch(service.url, "/status")["pools"][pool]["replicas"]
        return bool(sum(each["state"] == "ready" for each in replicas) == count)

    wait_for(whole, 120.0)


@pytest.mark.timeout(240)
def test_a_stream_survives_the_death_of_its_decode_replica(service: Service) -> None:
    """Killed in the middle, it goes on elsewhere: no token twice, none missing, usage counted once."""
    reference = Streaming(service, STORY, max_tokens=60, temperature=0, ignore_eos=True)
    reference.run()
    assert reference.error is None and reference.finish == "length"
    victim = Streaming(service, STORY, max_tokens=60, temperature=0, ignore_eos=True)
    victim.start()
    wait_for(lambda: len(victim.ids) > 10)
    replica = wait_for(lambda: busy_decode(service))
    os.kill(replica["engine"]["replica_pid"], signal.SIGKILL)
    victim.join(60)
    assert victim.error is None, victim.error
    assert (victim.finish, victim.usage.completion_tokens) == ("length", 60)
    assert victim.usage.prompt_tokens == reference.usage.prompt_tokens
    assert len(victim.ids) == 60
    # The tokens so far are computed again as a prompt, which rounds differently: the text may fork there, not before.
    assert victim.ids[:10] == reference.ids[:10]
    wait_whole(service, "decode", 2)


@pytest.mark.timeout(240)
def test_a_prompt_survives_the_death_of_its_prefill_replica(service: Service) -> None:
    """There is no other prefill replica here, so decode computes the prompt itself."""
    victim = Streaming(service, f"{time.time()} {LONG}", max_tokens=5, temperature=0, ignore_eos=True)
    victim.start()
    wait_for(lambda: "prefilling" in states(service))
    [replica] = fetch(service.url, "/status")["pools"]["prefill"]["replicas"]
    os.kill(replica["engine"]["replica_pid"], signal.SIGKILL)
    victim.join(90)
    assert victim.error is None, victim.error
    assert victim.usage.completion_tokens == 5
    wait_whole(service, "prefill", 1)
