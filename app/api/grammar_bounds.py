"""How large a grammar a client may ask for. Pure.

vLLM compiles JSON schemas, regular expressions, choices and grammars in the engine core, one after the other and
without a bound, and keeps them: one schema can hold all requests of an engine up for minutes. What a body asks for is
therefore weighed before anything is done with it. The weight follows what the compiler's time was seen to follow: one
for each value of a schema and each alternative, a quarter for each repetition (up to a thousand of them), and a
fiftieth of the square of an object's optional properties.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from app.api.json_body import BadBody
from cluster.frontend_spec import FrontendSpec

FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "output_format",
    "output_config",
)
INSIDE = ("sampling_params", "extra_body")  # where the same fields may stand
REPETITIONS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
REPEATS_COUNT, OPTIONALS_PER = 1000, 50
_REPEAT = re.compile(r"\{(\d{1,9})?,?(\d{1,9})?\}")
_PARTS = re.compile(r"\||::=|\(")


def check(body: Any, limits: FrontendSpec) -> None:
    """Raises `BadBody` for the first field that asks for more than the limits allow."""
    for field, value in _asked(body):
        num_bytes, weight = measure(value)
        for amount, found, setting in (
            (f"{num_bytes} bytes", num_bytes, "grammar_bytes_max"),
            (f"a weight of {weight:.0f}", weight, "grammar_weight_max"),
        ):
            if found > (most := getattr(limits, setting)):
                raise BadBody(
                    field,
                    f"{field} asks for a grammar of {amount}; at most {most} are taken (frontend.{setting}): ask for "
                    "fewer properties, alternatives and repetitions, and name properties in `required`",
                )


def _asked(body: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(body, dict):
        return
    for name in FIELDS:
        if body.get(name) is not None:
            yield f"{path}{name}", body[name]
    text = body.get("text")
    if isinstance(text, dict) and text.get("format") is not None:
        yield f"{path}text.format", text["format"]
    if body.get("tools") and body.get("tool_choice") not in (None, "auto", "none"):
        yield f"{path}tools", body["tools"]
    for name in INSIDE:
        yield from _asked(body.get(name), f"{path}{name}.")


def measure(value: Any) -> tuple[int, float]:
    """Characters of all texts, and the weight."""
    num_bytes, weight, ahead = 0, 0.0, [value]
    while ahead:
        each = ahead.pop()
        weight += 1
        if isinstance(each, str):
            num_bytes += len(each)
            weight += len(_PARTS.findall(each)) + sum(_repetitions(match) for match in _REPEAT.finditer(each))
        elif isinstance(each, dict):
            num_bytes += sum(map(len, each))
            weight += _optional(each) ** 2 / OPTIONALS_PER
            weight += sum(_repeats(each[name]) for name in REPETITIONS if isinstance(each.get(name), int))
            ahead += each.values()
        elif isinstance(each, list):
            ahead += each
    return num_bytes, weight


def _repetitions(match: re.Match[str]) -> float:
    return _repeats(max(int(number or 0) for number in match.groups()))


def _repeats(count: int) -> float:
    return min(max(count, 0), REPEATS_COUNT) / 4


def _optional(schema: dict[str, Any]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    names = required if isinstance(required, list) else ()
    return len(properties.keys() - {name for name in names if isinstance(name, str)})
