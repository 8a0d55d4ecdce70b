"""Messages of many requests in one call of the controller's actor: every one is answered, or raises, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.controller.actor import Client, Mailbox
from actors.controller.events import StepFailed
from actors.messages import AdmitRequest, Ended, Outcome, Request, Ticket, WaitForHandOver
from app.rpc import batching
from app.rpc.batching import BatchingHandle


class Actor:
    """Answers what `answer` has something for at once, and the rest when it is asked to."""

    def __init__(self) -> None:
        self.life = 1
        self.batches: list[list[tuple[int, Request[Any] | None]]] = []
        self.mailboxes: dict[Client, Mailbox] = {}
        self.polls = 0
        self.broken = False
        self.answer: Callable[[Any], Any] = lambda message: "ok" if isinstance(message, Ended) else None
        self.lose_reply = False

    @property
    def calls(self) -> Actor._Method:
        return Actor._Method(self._calls)

    @property
    def answers(self) -> Actor._Method:
        return Actor._Method(self._answers)

    class _Method:
        def __init__(self, run: Any) -> None:
            self.remote = lambda *args: asyncio.ensure_future(run(*args))

    @property
    def mailbox(self) -> Mailbox:
        """Of the handle that was made last."""
        return self.mailboxes[max(self.mailboxes)]

    async def _calls(self, client: Client, batch: list[tuple[int, Request[Any] | None]]) -> Any:
        if self.broken:
            raise RayActorError
        self.batches.append(batch)
        mailbox = self.mailboxes.setdefault(client, Mailbox())
        for number, message in batch:
            if message is not None and (value := self.answer(message)) is not None:
                mailbox.put(number, value)
        if self.lose_reply:
            mailbox.take()
            raise RayActorError
        return self.life, mailbox.take()

    async def _answers(self, client: Client, timeout_s: float) -> Any:
        self.polls += 1
        mailbox = self.mailboxes[client]
        await mailbox.filled.wait()
        if self.broken:
            raise RayActorError
        return self.life, mailbox.take()


def admit(name: str) -> AdmitRequest:
    return AdmitRequest(request_id=name, frontend_id="f", num_prompt_tokens=1, max_tokens=1)


def ticket(number: int) -> Ticket:
    return Ticket(ticket_id=number, attempt=1, request_id="r", frontend_id="f", epoch=1, decode="d")


async def settle() -> None:
    await asyncio.sleep(4 * batching.WINDOW_S)


async def test_what_comes_close_together_goes_in_one_call() -> None:
    actor = Actor()
    handle = BatchingHandle(actor, "f")
    assert await handle.call.remote(Ended(1, Outcome.DONE)) == "ok"
    answers = await asyncio.gather(*(handle.call.remote(Ended(n, Outcome.DONE)) for n in range(20)))
    assert answers == ["ok"] * 20 and [len(batch) for batch in actor.batches] == [1, 20]
    assert actor.polls == 0, "none is waited for: no long poll"


async def test_a_later_answer_comes_by_the_poll_and_a_failed_step_is_raised() -> None:
    actor = Actor()
    handle = BatchingHandle(actor, "f")
    wait, other = (handle.call.remote(WaitForHandOver(n, 1, 9.0)) for n in (1, 2))
    await settle()
    numbers = [number for number, _ in actor.batches[0]]
    actor.mailbox.put(numbers[1], StepFailed("no"))
    with pytest.raises(StepFailed):
        await other
    actor.mailbox.put(numbers[0], "seal")
    assert await wait == "seal"
    await settle()
    assert actor.polls == 2, "it stands only while a caller waits"


@pytest.mark.parametrize("moment", ["sent", "reply", "poll", "life"])
async def test_what_may_be_lost_is_an_error_at_who_waits(moment: str) -> None:
    actor = Actor()
    handle = BatchingHandle(actor, "f")
    actor.broken, actor.lose_reply = moment == "sent", moment == "reply"
    waits = [handle.call.remote(admit(name)) for name in ("a", "b")]
    await settle()
    if moment == "poll":
        actor.broken = True
        actor.mailbox.filled.set()
    elif moment == "life":
        actor.life = 2
        assert await handle.call.remote(Ended(9, Outcome.DONE)) == "ok"
    for wait in waits:
        with pytest.raises(RayActorError):
            await asyncio.wait_for(wait, 5)


async def test_who_leaves_is_withdrawn_and_a_ticket_on_its_way_is_given_back() -> None:
    actor = Actor()
    handle = BatchingHandle(actor, "f")
    wait = asyncio.ensure_future(handle.call.remote(admit("a")))
    await settle()
    [(number, _)] = actor.batches[0]
    wait.cancel()
    actor.mailbox.put(number, ticket(7))  # granted in the same moment
    await settle()
    sent = [entry for batch in actor.batches[1:] for entry in batch]
    assert (number, None) in sent
    assert [message for _, message in sent if message is not None] == [Ended(7, Outcome.CANCELLED)]


async def test_a_handle_that_was_given_up_takes_no_answer_of_its_successor() -> None:
    """One lost connection makes the frontend look the actor up again, while the old handle's calls still wait there."""
    actor = Actor()
    old, new = BatchingHandle(actor, "f"), BatchingHandle(actor, "f")
    first = old.call.remote(admit("a"))
    await settle()
    second = new.call.remote(admit("b"))
    await settle()
    for client, number in zip(sorted(actor.mailboxes), (1, 2)):
        [asked] = [n for batch in actor.batches for n, message in batch if message == admit("ab"[number - 1])]
        actor.mailboxes[client].put(asked, ticket(number))
    assert (await first).ticket_id == 1 and (await second).ticket_id == 2
