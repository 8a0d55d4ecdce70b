"""What one HTTP request knows of its caller, visible to everything that runs on its behalf."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from app.story import Fault


@dataclass(slots=True)
class Caller:
    """Set by the guard for every HTTP request. `fault` is how the request failed inside, for the response headers."""

    tenant: str = ""
    session: str = ""
    fault: Fault | None = None


CALLER: ContextVar[Caller | None] = ContextVar("pageferry_caller", default=None)


def current() -> Caller:
    """The caller of the running request; an anonymous one outside HTTP."""
    return CALLER.get() or Caller()


def cache_salt(tenant: str) -> str:
    """The prefix-cache salt of a tenant: equal on every frontend, never equal between tenants."""
    return hashlib.sha256(f"pageferry tenant {tenant}".encode()).hexdigest()[:32]
