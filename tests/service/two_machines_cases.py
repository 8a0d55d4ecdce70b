"""A service on two raylets that a link of limited rate joins: prefill here, decode in another network namespace.

Real engines on both. The link is slowed, cut under load, and the transfer actors of both sides are killed and stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from live_service import STORY, fetch, wait_for, wait_quiet

from app.client import Client
from cluster.names import NAMESPACE, transfer_actor
from ops.two_machines import Raylets, raylets, service

PROMPT = STORY * 12  # about 240 tokens
ANSWER = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}


@dataclass
class Site:
    made: Raylets
    url: str

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = fetch(self.url, "/status")
        return found

    def moved(self) -> dict[str, int]:
        found: dict[str, int] = self.status()["ferry"]
        return found

    def ask(self, number: int) -> str:
        """`number` makes it a prompt of its own, in no prefix cache."""
        with Client(self.url, timeout_s=120) as client:
            return "".join(chunk.text for chunk in client.stream_chat(f"Tale {number}. {PROMPT}", **ANSWER))

    def transfer_pid(self, side: int) -> int:
        """Of the transfer actor on the first or second node."""
        node = next(each["NodeID"] for each in ray.nodes() if each["NodeManagerAddress"] == self.addresses[side])
        actor: Any = ray.get_actor(transfer_actor("pageferry", node), namespace=NAMESPACE)
        return int(ray.get(actor.pid.remote(), timeout=60))

    @property
    def addresses(self) -> tuple[str, str]:
        return self.made.link.near, self.made.link.far


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with raylets() as made, service(made) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield Site(made, url)
        finally:
            ray.shutdown()


def test_pages_cross_between_the_machines_by_the_direct_way(site: Site) -> None:
    before = site.moved()
    first, again = site.ask(1), site.ask(1)
    assert first and first == again
    after = site.moved()
    assert after["tokens_moved"] > before["tokens_moved"] and after["tokens_recomputed"] == before["tokens_recomputed"]
    [link] = [each for each in wait_for(lambda: site.status()["links"]) if each["fetches"]]
    assert (link["way"], link["failed"]) == ("direct", 0) and link["bytes_per_s"] > 0
    wait_quiet(site.url)


def test_on_a_slow_link_pages_still_come(site: Site) -> None:
    site.made.link.limit(20)
    try:
        before = site.moved()
        assert site.ask(2)
        after = site.moved()
        assert after["tokens_moved"] > before["tokens_moved"]
        assert after["tokens_recomputed"] == before["tokens_recomputed"]
    finally:
        site.made.link.limit(0)
    wait_quiet(site.url)


@pytest.mark.parametrize("blow", ["kill", "stop"])
@pytest.mark.parametrize("side", [0, 1], ids=["source", "target"])
def test_a_transfer_actor_that_is_struck_loses_no_request_and_leaks_nothing(site: Site, side: int, blow: str) -> None:
    site.made.link.limit(50)
    numbers = range(100 * (2 * side + (blow == "stop")) + 10, 100 * (2 * side + (blow == "stop")) + 13)
    try:
        answers = under_load(site, numbers, lambda: strike(site.transfer_pid(side), blow))
    finally:
        site.made.link.limit(0)
    assert all(answers.values()), answers
    assert {number: site.ask(number) for number in numbers} == answers, "an answer is not what the model says"
    wait_quiet(site.url, 60.0)


def test_a_link_that_is_cut_for_a_moment_loses_no_request_and_leaks_nothing(site: Site) -> None:
    """Shorter than Ray's own patience with a raylet: what is under way is resumed, or computed again."""
    if not site.made.link.namespace:
        pytest.skip("a loopback address cannot be cut: network namespaces are not permitted here")
    site.made.link.limit(50)

    def cut() -> None:
        site.made.link.cut()
        time.sleep(3.0)
        site.made.link.join()

    try:
        answers = under_load(site, range(500, 503), cut)
    finally:
        site.made.link.limit(0)
    assert all(answers.values()), answers
    assert {number: site.ask(number) for number in answers} == answers
    wait_quiet(site.url, 60.0)


def strike(pid: int, blow: str) -> None:
    if blow == "kill":
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(pid, signal.SIGCONT)


def under_load(site: Site, numbers: range, strikes: Any) -> dict[int, str]:
    """Answers to requests of which some are in every phase when it strikes."""
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = site.ask(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    strikes()
    for thread in threads:
        thread.join(180)
    assert set(answers) == set(numbers), "a request has not ended"
    return answers


def test_a_link_that_was_seen_to_be_slow_is_not_used(site: Site) -> None:
    if not site.made.link.namespace:
        pytest.skip("a loopback address has no limited rate: network namespaces are not permitted here")
    alone = site.status()["counters"].get("decode_alone", 0)
    site.made.link.limit(2)
    try:
        for number in range(600, 606):
            assert site.ask(number)
            if site.status()["counters"].get("decode_alone", 0) > alone:
                break
        else:
            raise AssertionError(f"pages still cross: {site.status()['links']}")
    finally:
        site.made.link.limit(0)
    wait_quiet(site.url)
