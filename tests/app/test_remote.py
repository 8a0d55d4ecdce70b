"""Calls to named replicas over Serve handles, as far as they go without Serve."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from app.rpc import directory, remote
from app.rpc.ports import ControllerGone, ReplicaGone
from app.rpc.remote import RemoteDecode


class Handle:
    """Notes on whose behalf Serve would think that a call is made."""

    deployment_name = "Decode"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def options(self, *, method_name: str, session_id: str, stream: bool) -> Any:
        calls = self.calls

        class Method:
            def remote(self, *args: Any) -> Any:
                calls.append((method_name, session_id, _get_serve_request_context()._internal_request_id))
                answer = asyncio.get_running_loop().create_future()
                answer.set_result({"asked": session_id})
                return answer

        return Method()


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_replicas", {})
    directory.update("Decode", directory.Replicas(live=frozenset({"d1", "d2"})))


async def test_calls_of_one_http_request_have_ids_of_their_own() -> None:
    """Serve's router keeps waiting calls by the id in the request context: two with one id would be mixed up."""
    handle = Handle()
    decode = RemoteDecode(handle, "f")
    token = _serve_request_context.set(_RequestContext(_internal_request_id="of the HTTP request"))
    try:
        answers = await asyncio.gather(decode.audit("d1"), decode.audit("d2"))
    finally:
        _serve_request_context.reset(token)
    assert answers == [{"asked": "d1"}, {"asked": "d2"}]
    assert handle.calls == [("audit", "d1", ""), ("audit", "d2", "")], "an empty id makes Serve draw a fresh one"


async def test_a_call_to_a_replica_that_serve_does_not_know_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "APPEAR_S", 0.02)
    handle = Handle()
    decode = RemoteDecode(handle, "f")
    with pytest.raises(ReplicaGone, match="new"):
        await decode.abort("new", ["x"])
    with pytest.raises(ReplicaGone, match="new"):
        await anext(aiter(decode.outputs("new")))
    assert handle.calls == []


async def test_a_call_waits_until_serve_knows_the_replica() -> None:
    decode = RemoteDecode(Handle(), "f")
    waiting = asyncio.ensure_future(decode.audit("new"))
    await asyncio.sleep(0.01)
    directory.update("Decode", directory.Replicas(live=frozenset({"d1", "new"})))
    assert await asyncio.wait_for(waiting, 5) == {"asked": "new"}


@pytest.mark.parametrize(("lost", "waits_s"), [(0, 1.5), (1, 0.95)])
async def test_patience_is_not_spent_by_a_call_that_waits_in_the_controller(
    lost: int, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost` calls get lost on their way; the next one waits in the controller's queue until the controller dies."""
    monkeypatch.setattr(remote, "FAILED_CALL_S", 0.3)
    asked = 0

    class Method:
        async def remote(self, *_: Any) -> str:
            nonlocal asked
            asked += 1
            if asked == lost + 1:
                await asyncio.sleep(waits_s)
            if asked <= lost + 2:
                raise RayActorError
            return "answer"

    class Actor:
        call = Method()

    controller = remote.RemoteController(lambda: Actor, "f")
    assert await controller._call("call", patience_s=1.0) == "answer"
    assert asked == lost + 3


async def test_a_controller_that_stays_away_is_given_up() -> None:
    class Method:
        async def remote(self, *_: Any) -> str:
            raise RayActorError

    class Actor:
        call = Method()

    with pytest.raises(ControllerGone):
        await asyncio.wait_for(remote.RemoteController(lambda: Actor, "f")._call("call", patience_s=0.2), 20)
