"""`POST /faults` refuses what it cannot read with 400."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from app.api.server import _add_faults
from app.client import asgi

BODIES = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"\xff",
    b'{"kind": "k", "victim": "v", "more": Infinity}',
    b'{"kind": "k", "victim": "v", "trial": 1e999}',
    b"[" * 100_000,
]


async def _status(body: bytes) -> int:
    async def fault(kind: str, victim: str, trial: int, more: float) -> Any:
        return {"fired": True}

    routes = FastAPI()
    _add_faults(routes, fault)
    reply, *_ = [item async for item in asgi.call(routes, "POST", "/faults", {}, body)]
    return int(reply[0])


@pytest.mark.parametrize("body", BODIES)
async def test_what_cannot_be_read_is_400(body: bytes) -> None:
    assert await _status(body) == 400


async def test_what_can_be_read_is_done() -> None:
    assert await _status(b'{"kind": "k", "victim": "v", "trial": 1, "more": 2}') == 200
