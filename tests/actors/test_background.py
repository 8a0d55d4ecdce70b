"""Repeated work outlives its own failures and ends when it is cancelled."""

from __future__ import annotations

import asyncio
import logging

import pytest

from actors.background import repeat


async def test_a_failure_ends_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def work() -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError(f"failure {calls}")

    task = asyncio.create_task(repeat("counting", work, 0.001, logging.getLogger("test")))
    while calls < 5:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.message for record in caplog.records] == ["counting failed; it is tried again every 0.001 s"]
    assert "failure 1" in caplog.text


async def test_plain_functions_are_repeated_too() -> None:
    calls: list[int] = []
    task = asyncio.create_task(repeat("counting", lambda: calls.append(1), 0.001, logging.getLogger("test")))
    while len(calls) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
