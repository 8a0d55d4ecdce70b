"""Several models behind one address: a request reaches the application of its model, and only routes for clients do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.api.by_model import ByModel
from app.cli import main
from app.client.asgi import call
from app.commands.deploy import with_others
from app.models import IngressArgs
from cluster.models import ModelsSpec
from cluster.spec import SpecError

MODELS = {"small": "a", "large": "b"}


class Applications:
    """Echo what they are asked; those in `away` raise, as Serve does for an application that is not there."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []
        self.closed = 0

    async def ask(
        self, application: str, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((application, method, path))
        if application in self.away:
            raise RuntimeError("no such application")
        try:
            if path == "/v1/models":
                card = {"id": {v: k for k, v in MODELS.items()}[application], "object": "model"}
                yield 200, {"content-type": "application/json"}
                yield json.dumps({"object": "list", "data": [card]}).encode()
            elif body and b"endless" in body:
                yield 200, {"content-type": "text/event-stream"}
                while True:
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.01)
            else:
                yield 200, {"content-type": "application/json", "x-from": application}
                yield b"O"
                yield b"K"
        finally:
            self.closed += 1


async def ask(app: ByModel, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
    raw = None if body is None else json.dumps(body).encode()
    items = [item async for item in call(app, method, path, {"content-type": "application/json"}, raw)]
    (status, headers), chunks = items[0], b"".join(items[1:])
    return status, json.loads(chunks) if chunks.startswith(b"{") else chunks, headers


@pytest.fixture
def behind() -> Applications:
    return Applications()


@pytest.fixture
def app(behind: Applications) -> ByModel:
    return ByModel(MODELS, behind.ask)


async def test_a_request_goes_to_the_application_of_its_model(app: ByModel, behind: Applications) -> None:
    for model, application in MODELS.items():
        status, body, headers = await ask(app, "POST", "/v1/completions?a=1", {"model": model, "prompt": "x"})
        assert (status, body, headers["x-from"]) == (200, b"OK", application)
    status, *_ = await ask(app, "GET", "/v1/models/large")
    assert status == 200 and behind.asked[-1] == ("b", "GET", "/v1/models/large")
    assert behind.asked[0] == ("a", "POST", "/v1/completions?a=1")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/completions", {"model": "other"}, 404, "`other` does not exist; there are: large, small"),
        ("POST", "/v1/completions", {"prompt": "x"}, 400, "model is missing; there are: large, small"),
        ("POST", "/v1/completions", {"model": ["small"]}, 400, "model is missing"),
        ("GET", "/v1/models/other", None, 404, "`other` does not exist"),
        ("GET", "/status", None, 404, "ask below /a, /b"),
        ("POST", "/admin/scale", {"model": "small"}, 404, "ask below /a, /b"),
    ],
)
async def test_what_cannot_be_led_on_is_refused_in_words(
    app: ByModel, behind: Applications, method: str, path: str, body: Any, status: int, words: str
) -> None:
    found, tree, _ = await ask(app, method, path, body)
    assert found == status and words in tree["error"]["message"] and behind.asked == []


async def test_one_application_that_is_away_leaves_the_others(app: ByModel, behind: Applications) -> None:
    behind.away = {"b"}
    status, tree, headers = await ask(app, "POST", "/v1/completions", {"model": "large"})
    assert status == 503 and "large does not answer" in tree["error"]["message"] and headers["retry-after"] == "5"
    assert (await ask(app, "POST", "/v1/completions", {"model": "small"}))[0] == 200
    assert {card["id"] for card in (await ask(app, "GET", "/v1/models"))[1]["data"]} == {"small", "large"}
    status, tree, _ = await ask(app, "GET", "/health")
    assert status == 200 and tree["models"] == {"small": "ok", "large": "RuntimeError: no such application"}
    behind.away = {"a", "b"}
    assert (await ask(app, "GET", "/health"))[0] == 503


async def test_a_client_that_hangs_up_ends_the_answer(app: ByModel, behind: Applications) -> None:
    body = json.dumps({"model": "small", "prompt": "endless"}).encode()
    answer = call(app, "POST", "/v1/completions", {"content-type": "application/json"}, body)
    assert (await anext(answer))[0] == 200 and await anext(answer) == b"data: x\n\n"
    await answer.aclose()
    assert behind.closed == 1


def models_file(folder: Path, **second: Any) -> Path:
    entries = [
        {"application": "a", "topology": "local-scale", "settings": {"model.name": "small"}},
        {"application": "b", "topology": "local-scale", "settings": {"model.name": "large"}, **second},
    ]
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": entries}))
    return file


def test_a_file_of_models_becomes_one_serve_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "serve", str(models_file(tmp_path))]) == 0
    found = ServeDeploySchema.model_validate(yaml.safe_load(capsys.readouterr().out))
    assert [(each.name, each.route_prefix) for each in found.applications] == [
        ("a", "/a"),
        ("b", "/b"),
        ("models", "/"),
    ]
    assert IngressArgs.model_validate(found.applications[-1].args).models == MODELS


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"application": "a"}, "application 'a' is named twice"),
        ({"application": "models"}, "application 'models' is named twice"),
        ({"settings": {"model.name": "small"}}, "a and b both serve 'small'"),
        ({"settings": {"frontend.port": 9}}, "frontend.port is 9 in b and 8000 in a"),
        ({"color": 1}, "models.1.color"),
    ],
)
def test_models_that_do_not_go_together_are_refused(tmp_path: Path, second: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ModelsSpec.load(models_file(tmp_path, **second))


def test_a_deployment_names_what_else_was_deployed_by_a_config() -> None:
    """Serve takes away what a new config does not name; what `serve.run` started is not its to take."""
    details = {
        "applications": {
            "mine": {"source": "declarative", "deployed_app_config": {"name": "mine", "args": "old"}},
            "other": {"source": "declarative", "deployed_app_config": {"name": "other"}},
            "by-hand": {"source": "imperative", "deployed_app_config": None},
        }
    }
    found = with_others({"http_options": {}, "applications": [{"name": "mine", "args": "new"}]}, details)
    assert found == {"http_options": {}, "applications": [{"name": "other"}, {"name": "mine", "args": "new"}]}
