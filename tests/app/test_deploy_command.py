"""What `pageferry deploy` makes of what Serve says while it deploys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from app.commands import deploy

BEFORE = 1_000.0


def details(
    status: str = "RUNNING", deployed_at: float = BEFORE + 1, states: str = "RUNNING", whole: bool = True
) -> Any:
    replicas = [{"state": state} for state in states.split()]
    decode = {"status": "HEALTHY" if whole else "UPDATING", "target_num_replicas": 1, "replicas": replicas}
    application = {"name": "a", "status": status, "last_deployed_time_s": deployed_at, "message": "it failed"}
    return {"applications": {"a": {**application, "deployments": {"Decode": {**decode, "message": "no such model"}}}}}


class Client:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def get_serve_details(self) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "POLL_S", 0.0)


def test_it_waits_until_the_new_replicas_serve(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(
        {"applications": {}},
        details(deployed_at=BEFORE),  # the deployment before
        details("DEPLOYING", states="RUNNING STARTING", whole=False),
        details(),
    )
    assert deploy._wait(client, {"a": BEFORE}, 60.0) == {"a": "RUNNING"}
    said = capsys.readouterr().err.splitlines()
    assert said == ["pageferry deploy: Serve has not begun", "pageferry deploy: Decode 1 of 1 running, 1 starting"]


def test_a_failure_is_shown_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"a: it failed\nDecode: no such model"):
        deploy._wait(Client(details("DEPLOY_FAILED")), {"a": BEFORE}, 60.0)


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 61.0)
    monkeypatch.setattr("app.commands.deploy.time.monotonic", lambda: next(clock))
    with pytest.raises(TimeoutError, match=r"not deployed after 60 s: a deploying"):
        deploy._wait(Client(details("DEPLOYING")), {"a": BEFORE}, 60.0)
