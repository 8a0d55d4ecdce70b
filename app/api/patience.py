"""How long a client will wait for an answer, as its own library says in the request's head. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Seconds. OpenAI's and Anthropic's Python clients send the first, their JavaScript clients the second; the others are
# for clients that say it by hand.
HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout", "request-timeout", "x-request-timeout")


def patience_s(headers: Mapping[str, str]) -> float:
    """The shortest time-out that the head names; 0: none, and none that is a number of seconds above 0."""
    return min((found for name in HEADERS if (found := _seconds(headers.get(name, ""))) > 0), default=0.0)


def _seconds(text: str) -> float:
    """A hint that cannot be read is no mistake of the request: another hop may mean something else by it."""
    try:
        found = float(text)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0
