"""Serve's policy asks without waiting; whatever happens to the controller, the target stands as it is.

Ray's three calls are stood in for, so that answers come when the test says; a real Serve follows a real controller in
tests/service/test_scaling.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.controller import serve_policy
from actors.controller.serve_policy import ANSWER_S, ASK_EVERY_S, FIND_EVERY_S, FollowController
from actors.messages import PlatformSize


class Ray:
    """`get_actor`, `wait` and `get` of Ray, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[Any] = []
        self.answers: dict[int, Any] = {}
        self.lookups = 0
        self.there = True

    def get_actor(self, name: str, namespace: str) -> Any:
        self.lookups += 1
        if not self.there:
            raise ValueError(f"no actor {name}")

        def remote(question: Any) -> int:
            self.asked.append(question)
            return len(self.asked)

        return SimpleNamespace(call=SimpleNamespace(remote=remote))

    def wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        assert timeout == 0, "it must not wait"
        return [ref for ref in refs if ref in self.answers], []

    def get(self, ref: int) -> Any:
        if isinstance(self.answers[ref], Exception):
            raise self.answers[ref]
        return self.answers[ref]

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(serve_policy, "ray", made)
    monkeypatch.setattr("actors.controller.serve_policy.time", SimpleNamespace(monotonic=made.monotonic))
    return made


def turn(policy: FollowController, target: int = 2, current: int = 1) -> int:
    context = SimpleNamespace(app_name="app", current_num_replicas=current, target_num_replicas=target)
    decided, state = policy(context)
    assert state == {}
    return decided


def test_it_asks_with_what_serve_holds_and_takes_the_answer_once(ray: Ray) -> None:
    policy = FollowController("decode")
    assert turn(policy) == 2
    assert ray.asked == [PlatformSize("decode", 1, 2)]
    ray.answers[1] = 5
    assert turn(policy) == 5
    assert turn(policy, target=5) == 5, "an old answer is not given again"
    assert turn(policy, target=3) == 3, "it was set by others"


def test_one_question_at_a_time_and_not_at_every_turn(ray: Ray) -> None:
    policy = FollowController("decode")
    for _ in range(10):
        turn(policy)
    assert len(ray.asked) == 1
    ray.answers[1] = None
    assert turn(policy) == 2 and len(ray.asked) == 1
    ray.now += ASK_EVERY_S
    turn(policy)
    assert len(ray.asked) == 2


def test_without_a_controller_the_target_stands_and_it_is_looked_for_again(ray: Ray) -> None:
    ray.there = False
    policy = FollowController("decode")
    for _ in range(5):
        assert turn(policy) == 2
    assert ray.lookups == 1
    ray.there = True
    ray.now += FIND_EVERY_S
    turn(policy)
    assert len(ray.asked) == 1


def test_a_controller_that_hangs_or_dies_leaves_the_target(ray: Ray) -> None:
    policy = FollowController("decode")
    turn(policy)
    ray.now += ANSWER_S + 1
    assert turn(policy) == 2 and ray.lookups == 2, "it is looked up anew"
    ray.answers[len(ray.asked)] = RuntimeError("the actor died")
    assert turn(policy) == 2


def test_a_controller_that_is_not_there_yet_is_logged_once(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    policy = FollowController("decode")
    ray.there = False
    with caplog.at_level("INFO", logger="ray.serve"):
        for _ in range(5):
            assert turn(policy) == 2
            ray.now += FIND_EVERY_S
        assert len(caplog.records) == 1 and "cannot be asked for decode" in caplog.text
        ray.there = True
        turn(policy)
        ray.answers[1] = 2
        turn(policy)
        ray.there, policy._actor = False, None
        ray.now += 2 * FIND_EVERY_S
        turn(policy)
        assert len(caplog.records) == 2, "it was there in between"
