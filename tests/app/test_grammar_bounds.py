"""What a client may ask an engine to compile: measured before anything is done with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette

from app.api import grammar_bounds
from app.api.json_body import BadBody
from app.api.middleware import Access, RequestFilter
from app.client import asgi
from cluster.frontend_spec import FrontendSpec

LIMITS = FrontendSpec()


def schema(properties: int, required: bool = True) -> dict[str, Any]:
    names = [f"name{n}" for n in range(properties)]
    found = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return found | ({"required": names} if required else {})


def wrapped(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}


TOO_LARGE: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": wrapped(schema(2000))}, "response_format", "weight"),
    ({"response_format": wrapped(schema(500, required=False))}, "response_format", "weight"),
    ({"structured_outputs": {"choice": [f"c{n}" for n in range(5000)]}}, "structured_outputs", "weight"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs", "bytes"),
    ({"structured_outputs": {"regex": "|".join("ab" for _ in range(5000))}}, "structured_outputs", "weight"),
    ({"structured_outputs": {"regex": "[a-z]{1,1000}" * 20}}, "structured_outputs", "weight"),
    ({"guided_grammar": "root ::= " + " | ".join(["x"] * 5000)}, "guided_grammar", "weight"),
    ({"text": {"format": wrapped(schema(2000))}}, "text.format", "weight"),
    (
        {"sampling_params": {"structured_outputs": {"json": schema(2000)}}},
        "sampling_params.structured_outputs",
        "weight",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": schema(2000)}}], "tool_choice": "required"},
        "tools",
        "weight",
    ),
]
TAKEN: list[Any] = [
    {"prompt": "x" * 100_000},
    {"response_format": wrapped(schema(200))},
    {"response_format": wrapped(schema(200, required=False))},
    {"structured_outputs": {"choice": [f"c{n}" for n in range(1000)]}},
    {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}},
    {"structured_outputs": {"json": {"type": "string", "maxLength": 10**9}}},
    {"tools": [{"function": {"name": "f", "parameters": schema(2000)}}]},  # chosen by the model: not compiled
    {"response_format": None, "text": "no object", "sampling_params": 5, "structured_outputs": {"regex": 7}},
    ["no object"],
]


@pytest.mark.parametrize(("body", "field", "what"), TOO_LARGE)
def test_what_would_hold_an_engine_up_is_refused(body: dict[str, Any], field: str, what: str) -> None:
    with pytest.raises(BadBody) as caught:
        grammar_bounds.check(body, LIMITS)
    assert caught.value.field == field
    assert what in str(caught.value) and f"frontend.grammar_{what}_max" in str(caught.value)


@pytest.mark.parametrize("body", TAKEN)
def test_what_people_ask_for_is_taken(body: Any) -> None:
    grammar_bounds.check(body, LIMITS)


async def test_it_is_a_400_that_names_field_and_setting() -> None:
    guard = RequestFilter(Starlette(), Access(frontend=FrontendSpec(grammar_weight_max=10)))
    body = json.dumps({"prompt": "x", "response_format": wrapped(schema(20))}).encode()
    headers = {"content-type": "application/json"}
    reply, raw = [item async for item in asgi.call(guard, "POST", "/v1/completions", headers, body)]
    error = json.loads(raw)["error"]
    assert (reply[0], error["param"]) == (400, "response_format") and "frontend.grammar_weight_max" in error["message"]
