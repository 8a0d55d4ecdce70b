"""What a JSON body may hold, whatever reads it later: text that is Unicode, numbers that fit, bounded nesting. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec

MAX_DEPTH = 100  # a JSON schema of forty objects inside each other has 80
MAX_NAME_CHARS = 256
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
# Kept in tables of the service for as long as the request lives, and after it.
NAMES = ("request_id", "session_id", "cache_salt")


class BadBody(ValueError):
    """`field` is the dotted path of what is wrong; "" for the body as a whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def parse(body: bytes) -> Any:
    """The body as plain values. Raises `BadBody`."""
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _explained(body, error) from None
    check(tree)
    return tree


def check(tree: Any) -> None:
    """Raises `BadBody` for a value that could not be passed on to an engine."""
    _walk(tree, "", MAX_DEPTH)
    if isinstance(tree, dict):
        for name in NAMES:
            value = tree.get(name)
            if isinstance(value, str) and len(value) > MAX_NAME_CHARS:
                raise BadBody(name, f"{name} has {len(value)} characters; at most {MAX_NAME_CHARS} are taken")


def _walk(value: Any, path: str, depth: int) -> None:
    kind = type(value)
    if kind is str:
        if not value.isascii():
            _check_text(value, path)
    elif kind is int:
        if not INT_MIN <= value <= INT_MAX:
            raise BadBody(path, f"{_named(path)} is out of range: {INT_MIN} to {INT_MAX}")
    elif kind is float:
        if not math.isfinite(value):
            raise BadBody(path, f"{_named(path)} is {value}: JSON has no such number")
    elif kind is dict or kind is list:
        if depth == 0:
            raise BadBody(path, f"{_named(_shortened(path))} is nested more than {MAX_DEPTH} levels deep")
        if kind is list and _all_small(value):
            return
        children: Iterable[tuple[Any, Any]] = value.items() if kind is dict else enumerate(value)
        for key, inner in children:
            if kind is dict and not key.isascii():
                _check_text(key, path, "a key of ")
            _walk(inner, f"{path}.{key}" if path else str(key), depth - 1)


def _all_small(values: list[Any]) -> bool:
    """Whether a list is of integers in range only: a prompt as token ids, the longest thing that a body can hold."""
    return set(map(type, values)) == {int} and min(values) >= INT_MIN and max(values) <= INT_MAX


def _check_text(text: str, path: str, what: str = "") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f"character {error.start} is half of a surrogate pair"
        raise BadBody(path, f"{what}{_named(path)} is no valid Unicode text: {at}") from None


def _named(path: str) -> str:
    return path or "the body"


def _shortened(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:77]}..."


def _explained(body: bytes, error: Exception) -> BadBody:
    """Which field it is, from a parser that takes more than JSON allows."""
    try:
        text = body.decode("utf-8", "surrogatepass")
        tree = json.loads(text)
        check(tree)
    except BadBody as found:
        return found
    except RecursionError:
        return BadBody("", f"the body is nested more than {MAX_DEPTH} levels deep")
    except UnicodeDecodeError as found:
        return BadBody("", f"the body is not UTF-8: byte {found.start}")
    except ValueError as found:
        return BadBody("", f"the body is not JSON: {found}")
    return BadBody("", f"the body is not JSON: {error}")
