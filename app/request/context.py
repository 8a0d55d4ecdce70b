"""What one HTTP request knows of its caller, visible to everything that runs on its behalf."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.messages import Rates
from actors.spans import NO_SPAN, Span
from app.request.events import RequestError

T = TypeVar("T")


@dataclass(slots=True)
class Caller:
    """Set by the guard for every HTTP request. `fault` is how the request failed inside, for the response headers.

    `trace` is the request's X-Request-Id, the client's or one of ours: the answer has it, and every line of the log.
    `named_by_serve`: Serve's HTTP server has read or made that id, and writes it into the answer. `patience_s`: the
    client gives up when nothing has come after this; 0: it does not say.
    `rates`: what was left of the tenant's limits when the request was admitted or refused.
    """

    tenant: str = ""
    session: str = ""
    trace: str = ""
    named_by_serve: bool = False
    patience_s: float = 0.0
    fault: RequestError | None = None
    rates: Rates | None = None
    span: Span = NO_SPAN


CALLER: ContextVar[Caller | None] = ContextVar("pageferry_caller", default=None)


def current() -> Caller:
    """The caller of the running request; an anonymous one outside HTTP."""
    return CALLER.get() or Caller()


def cache_salt(tenant: str) -> str:
    """The prefix-cache salt of a tenant: equal on every frontend, never equal between tenants."""
    return hashlib.sha256(f"pageferry tenant {tenant}".encode()).hexdigest()[:32]


def detached(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that belongs to no HTTP request.

    Ray and Serve remember in context variables on whose behalf a call is made, and cancel all calls of a request whose
    client is gone: also one that others use too, as a replica's output stream. What ends a call is decided here.
    """
    return asyncio.get_running_loop().create_task(work, context=Context())


def fetch_exception(call: asyncio.Future[Any]) -> None:
    """A call that nothing awaits any more may fail: asyncio must not call that an error of its own."""
    if not call.cancelled():
        call.exception()
