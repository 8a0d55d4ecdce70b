"""How a request's fault is said in the words of each API: error bodies, and the last events of a stream. Pure.

vLLM's server knows a few exceptions and gives each the `type` of its HTTP status; the Responses stream has no way for
an error at all. So the status comes from vLLM's handlers, and what is in the body is put right here.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from app.request.events import RequestError

OPENAI_ERROR = b'data: {"error"'  # how vLLM's chat and completion streams begin an error event
ANTHROPIC_ERROR = b"event: error"


def kind_of(fault: RequestError) -> str:
    """The error's `type`."""
    return fault.kind or HTTPStatus(fault.status).phrase


def error_of(fault: RequestError) -> dict[str, Any]:
    return {"message": fault.message, "type": kind_of(fault), "param": None, "code": fault.status}


def with_kind(body: bytes, fault: RequestError) -> bytes:
    """An error body of vLLM's, OpenAI's or Anthropic's form, with the fault's own type; others as they are."""
    try:
        tree = json.loads(body)
        tree["error"]["type"] = kind_of(fault)
    except (ValueError, KeyError, TypeError):
        return body
    return json.dumps(tree).encode()


def event_status(chunk: bytes) -> int:
    """The `code` of an error event; 0 when it has none."""
    error = _data(chunk).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0


def is_error_event(chunk: bytes) -> bool:
    return chunk.startswith((OPENAI_ERROR, ANTHROPIC_ERROR))


def error_event(chunk: bytes, fault: RequestError, last: bytes) -> bytes:
    """In the place of the error event `chunk` that vLLM made of the fault; `last` is the event before it.

    A chat or completion stream's event is a chunk as well: it ends the choice that `last` was about with
    `finish_reason` "error", for clients that look for nothing else.
    """
    if chunk.startswith(ANTHROPIC_ERROR):
        return _event({"type": "error", "error": {"type": kind_of(fault), "message": fault.message}}, "error")
    tree: dict[str, Any] = {"error": error_of(fault)}
    before = _data(last)
    open_choices = [c for c in before.get("choices") or () if c.get("finish_reason") is None]
    if open_choices:
        same = {name: before[name] for name in ("id", "object", "created", "model") if name in before}
        tree |= same | {"choices": [_ended(choice) for choice in open_choices]}
    return _event(tree)


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
    return {"index": choice.get("index", 0), **empty, "logprobs": None, "finish_reason": "error"}


def closing_events(fault: RequestError, first: bytes, last: bytes) -> bytes:
    """The end of a stream that vLLM breaks off without a word (Responses): `error`, then `response.failed`.

    `first` and `last` are the stream's own first and last events.
    """
    number = int(_data(last).get("sequence_number", -1)) + 1
    error = {"type": "error", "code": kind_of(fault), "message": fault.message, "param": None}
    events = _event(error | {"sequence_number": number}, "error")
    response = _data(first).get("response")
    if isinstance(response, dict):
        failed = response | {"status": "failed", "error": {"code": kind_of(fault), "message": fault.message}}
        tree = {"type": "response.failed", "sequence_number": number + 1, "response": failed}
        events += _event(tree, "response.failed")
    return events


def _event(tree: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(tree)}\n\n".encode()


def _data(event: bytes) -> dict[str, Any]:
    """The JSON of a server-sent event; empty when it has none."""
    for line in event.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return found
            except ValueError:
                return {}
    return {}
