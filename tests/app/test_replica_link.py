"""The socket between a frontend and a replica: both ends, joined by a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors import link
from actors.engine.frontend_links import FrontendLinks
from actors.messages import PrefillDone, Ticket
from app.rpc.ports import ReplicaGone
from app.rpc.replica_link import CallFailed, ReplicaLink

TICKET = Ticket(ticket_id=7, attempt=1, request_id="r", frontend_id="f", epoch=1, decode="d")
DONE = PrefillDone(ticket_id=7, attempt=1, num_tokens=3, num_cached_tokens=0, seconds=0.1, output=[b"token"])


class Replica:
    """What an engine server does with calls, scripted."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.outputs_closed = asyncio.Event()

    async def prefill(self, ticket: Ticket, frames: list[bytes]) -> PrefillDone:
        self.heard.append(("prefill", ticket, frames))
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.heard.append("prefill cancelled")
            raise
        return DONE

    async def submit(self, frontend_id: str, frames: list[bytes], ticket: Ticket, hand_over: Any) -> None:
        self.heard.append(("submit", frontend_id, frames, ticket, hand_over))
        if frames == [b"bad"]:
            raise ValueError("no such request")

    async def abort(self, frontend_id: str, request_ids: list[str]) -> None:
        self.heard.append(("abort", frontend_id, request_ids))

    async def outputs(self, frontend_id: str) -> AsyncGenerator[list[bytes], None]:
        try:
            yield []
            while (frames := await self.queue.get()) is not None:
                yield frames
        finally:
            self.outputs_closed.set()


class Pair:
    def __init__(self, sends_outputs: bool) -> None:
        self.replica = Replica()
        self.links = FrontendLinks(self.replica, "127.0.0.1", sends_outputs)
        self.leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: list[str] = []
        self.front = ReplicaLink("d", lambda ended: self.ended.append(ended.reason))

    async def presence(self) -> AsyncGenerator[link.Address, None]:
        """As `EngineServer.link`, over Serve."""
        address = await self.links.invite("f")
        try:
            yield address
            await asyncio.shield(self.leave)
        finally:
            self.links.end(address.invitation)

    def break_off(self, error: Exception) -> None:
        self.leave.set_exception(error)


@pytest.fixture(params=[True, False], ids=["decode", "prefill"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    made = Pair(request.param)
    await made.front.open(made.presence())
    yield made
    made.front.end("the test is over")
    made.links.close()


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_calls_are_answered_each_for_itself(pair: Pair) -> None:
    prefill = asyncio.ensure_future(pair.front.call(lambda n: link.Prefill(n, TICKET, [b"x", b"y"])))
    await pair.front.call(lambda n: link.Submit(n, TICKET, None, [b"z"]))
    with pytest.raises(CallFailed, match="ValueError: no such request"):
        await pair.front.call(lambda n: link.Submit(n, TICKET, None, [b"bad"]))
    await pair.front.call(lambda n: link.Abort(n, ["r"]))
    pair.replica.go_on.set()
    assert await prefill == DONE
    assert ("prefill", TICKET, [b"x", b"y"]) in pair.replica.heard
    assert ("submit", "f", [b"z"], TICKET, None) in pair.replica.heard
    assert pair.replica.heard[-1] == ("abort", "f", ["r"])
    assert not pair.front.busy


async def test_a_caller_that_leaves_cancels_its_prefill_and_no_other(pair: Pair) -> None:
    calls = [asyncio.ensure_future(pair.front.call(lambda n: link.Prefill(n, TICKET, []))) for _ in range(2)]
    await eventually(lambda: len(pair.replica.heard) == 2)
    calls[0].cancel()
    await eventually(lambda: "prefill cancelled" in pair.replica.heard)
    pair.replica.go_on.set()
    assert await calls[1] == DONE and pair.replica.heard.count("prefill cancelled") == 1


async def test_outputs_come_in_order() -> None:
    pair = Pair(sends_outputs=True)
    await pair.front.open(pair.presence())
    for number in range(100):
        pair.replica.queue.put_nowait([b"%d" % number])
    async with asyncio.timeout(10):
        assert [await pair.front.outputs.get() for _ in range(100)] == [[b"%d" % n] for n in range(100)]
        pair.replica.queue.put_nowait(None)  # the engine has failed
        assert await pair.front.outputs.get() is None
    assert pair.ended == ["its engine has ended"] and pair.front.died
    pair.links.close()


@pytest.mark.parametrize("cause", ["the connection", "the process", "the process, unreachable"])
async def test_a_connection_that_breaks_is_no_death_unless_ray_says_so(pair: Pair, cause: str) -> None:
    call = asyncio.ensure_future(pair.front.call(lambda n: link.Prefill(n, TICKET, [])))
    await eventually(lambda: pair.replica.heard)
    if cause != "the connection":
        kind = ActorUnavailableError if "unreachable" in cause else ActorDiedError
        error = kind("away", None) if kind is ActorUnavailableError else kind()
        asyncio.get_running_loop().call_later(0.05, pair.break_off, error)
    pair.links.close()
    with pytest.raises(ReplicaGone) as gone:
        await asyncio.wait_for(call, 10)
    assert gone.value.died == (cause == "the process")


@pytest.mark.parametrize("who", ["frontend", "replica", "presence"])
async def test_the_end_of_either_side_ends_all(pair: Pair, who: str) -> None:
    call = asyncio.ensure_future(pair.front.call(lambda n: link.Prefill(n, TICKET, [])))
    await eventually(lambda: pair.replica.heard)
    if who == "frontend":
        pair.front.end("enough")
    elif who == "replica":
        pair.links.close()
    else:
        pair.leave.set_result(None)
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(call, 10)
    await eventually(lambda: "prefill cancelled" in pair.replica.heard and not pair.links._links)
    assert pair.replica.outputs_closed.is_set() == pair.links._sends_outputs
    assert len(pair.ended) == 1
    with pytest.raises(ReplicaGone):
        await pair.front.call(lambda n: link.Abort(n, []))


@pytest.mark.parametrize("mistake", ["secret", "invitation", "twice", "no hello", "too long", "garbage"])
async def test_only_who_was_invited_is_heard(mistake: str) -> None:
    pair = Pair(sends_outputs=False)
    address = await pair.links.invite("f")
    reader, writer = await asyncio.open_connection(address.host, address.port)
    challenge = await link.receive(reader, link.CHALLENGE)
    proof = link.proof(b"guessed" if mistake == "secret" else address.secret, challenge.nonce)
    match mistake:
        case "too long":
            writer.write(b"\xff\xff\xff\xff")
        case "garbage":
            writer.write(b"\x00\x00\x00\x02hi")
        case "no hello":
            link.send(writer, link.Abort(1, ["r"]))
        case _:
            link.send(writer, link.Hello(address.invitation + (mistake == "invitation"), proof))
    if mistake == "twice":
        await link.receive(reader, link.WELCOME)
        first = writer
        reader, writer = await asyncio.open_connection(address.host, address.port)
        challenge = await link.receive(reader, link.CHALLENGE)
        link.send(writer, link.Hello(address.invitation, link.proof(address.secret, challenge.nonce)))
        first.close()
    with pytest.raises((EOFError, OSError)):
        await asyncio.wait_for(link.receive(reader, link.WELCOME), 10)
    assert pair.replica.heard == []
    writer.close()
    pair.links.close()


async def test_a_message_that_is_not_understood_ends_the_link(pair: Pair) -> None:
    assert pair.front._writer is not None
    pair.front._writer.write(b"\x00\x00\x00\x02hi")
    await eventually(lambda: pair.ended)
    with pytest.raises(ReplicaGone):
        await pair.front.call(lambda n: link.Abort(n, []))


async def test_what_is_too_large_fails_its_own_call_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FRAME_BYTES_MAX", 1000)
    with pytest.raises(CallFailed, match="at most 1000"):
        await pair.front.call(lambda n: link.Submit(n, TICKET, None, [bytes(1001)]))
    await pair.front.call(lambda n: link.Abort(n, ["r"]))
    assert pair.replica.heard == [("abort", "f", ["r"])]


async def test_a_replica_that_never_answers_is_gone() -> None:
    async def silent() -> AsyncGenerator[link.Address, None]:
        yield link.Address("127.0.0.1", 1, 1, b"")

    ended: list[ReplicaLink] = []
    front = ReplicaLink("d", ended.append)
    with pytest.raises(ReplicaGone, match="cannot be reached"):
        await front.open(silent())
    assert ended == [front]
