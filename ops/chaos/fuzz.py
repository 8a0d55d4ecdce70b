"""What a client could send and should not: from the service's own schema, with hostile values in its fields."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "smollm2", "prompt": "Hello", "max_tokens": 3},
    "/v1/chat/completions": {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 3,
    },
    "/v1/responses": {"model": "smollm2", "input": "Hello", "max_output_tokens": 3},
    "/v1/messages": {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"model": "smollm2", "prompt": "Hello"},
    "/detokenize": {"model": "smollm2", "tokens": [28, 29]},
}
# As they are written in JSON, or in what a careless program takes for JSON.
HOSTILE = (
    r'"\ud800"',
    r'["a", "\udfff"]',
    r'{"\ud800": 1}',
    r'{"a": "\ud800"}',
    r'"\u0000"',
    "NaN",
    "-Infinity",
    "1e999",
    "1e-320",
    str(10**26),
    str(-(10**26)),
    str(2**63 - 1),
    str(-(2**63)),
    str(2**31),
    "5000",
    "-1",
    "0",
    "1",
    "0.5",
    "1.5",
    "true",
    "false",
    "null",
    '""',
    '" "',
    '"a"',
    '"auto"',
    '"none"',
    '"required"',
    '"' + "x" * 20_000 + '"',
    "[]",
    "{}",
    "[0]",
    "[-1]",
    "[99999999]",
    '["a"]',
    '[1, "a", null, {}]',
    "[[[1]]]",
    '{"a": {"b": [1]}}',
    '{"type": "json_object"}',
    '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}',
    '{"type": "function", "function": {"name": "a", "parameters": 1}}',
    '[{"type": "function", "function": {"name": "a"}}]',
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]',
    '[{"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}]',
    '{"include_usage": 1}',
    '{"28": 1e9}',
    '{"28": "a"}',
    '{"regex": "(("}',
    '{"json": {"type": "object", "properties": {"a": {"$ref": "#/no"}}}}',
    "[" * 120 + "]" * 120,
    '{"a":' * 60 + "1" + "}" * 60,
)
# What an answer must not hold: stack traces, paths, addresses, process ids and object identities of the service.
INSIDE = re.compile(
    r'Traceback|File \\?"/|site-packages|/(?:work|usr|tmp|home|root|opt|var)/|\b0x[0-9a-f]{6,}|\bpid\W{0,3}\d|'
    r"\b(?:127|10|192)\.\d+\.\d+\.\d+|ray::|raylet|RayActor|RayTask"
)


@dataclass(frozen=True)
class Case:
    path: str
    body: bytes


class Fuzz:
    """`schema` is the service's OpenAPI document; the same seed gives the same requests."""

    def __init__(self, schema: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._fields = {path: _fields(schema, path) | set(base) for path, base in BASES.items()}

    def case(self) -> Case:
        draw = self._random
        path = draw.choice([*BASES])
        fields = {name: json.dumps(value) for name, value in BASES[path].items()}
        if draw.random() < 0.2:
            fields["stream"] = "true"
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            fields[draw.choice(sorted(self._fields[path]))] = draw.choice(HOSTILE)
        body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
        if draw.random() < 0.03:
            body = draw.choice(("", "null", "[]", body[:-1], body + "x", '"a"', "1", "[" * 50_000))
        return Case(path, body.encode("utf-8", "surrogatepass"))


def _fields(schema: dict[str, Any], path: str) -> set[str]:
    post = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names: set[str] = set()
    pending = [post]
    while pending:
        part = pending.pop()
        if "$ref" in part:
            pending.append(schema["components"]["schemas"][part["$ref"].rpartition("/")[2]])
        pending += part.get("anyOf", []) + part.get("oneOf", []) + part.get("allOf", [])
        names |= set(part.get("properties", {}))
    return names


def problem(case: Case, status: int, text: str) -> str:
    """What is wrong with an answer; "" when it is an answer that a service may give."""
    where = f"{case.path} {case.body[:300]!r}: {status} {text[:600]}"
    if status >= 500 or re.search(r'"code": ?5\d\d', text):
        return f"an error of the service's own: {where}"
    if found := INSIDE.search(text):
        return f"{found.group()!r} is of the inside: {where}"
    if status >= 400:
        try:
            error = json.loads(text)["error"]
            if not error["message"] or error.get("code", status) != status:  # Anthropic's form has no code
                return f"an error without a message or with another code: {where}"
        except (ValueError, KeyError, TypeError):
            return f"an error in no form: {where}"
    return ""
