"""A cluster without room: an event that frees nothing costs little; room that there is goes to its owner at once."""

from __future__ import annotations

from typing import Any

import pytest
from controller_driver import SECOND, ControllerDriver, spec_of

from actors.controller import capacity, selector
from actors.controller.events import Tick
from actors.messages import FrontendHeartbeat, Overloaded, Ticket

PLACES = 4


class Looks(ControllerDriver):
    """Counts how often a place was looked for."""

    def __init__(self, replicas: int = 1, **decode: Any) -> None:
        super().__init__(spec_of(admission={"queue_max": 64, "queue_wait_s": 900}))
        self.looks = 0
        choose = self.machine.selector.choose

        def counted(*args: Any) -> Any:
            self.looks += 1
            return choose(*args)

        object.__setattr__(self.machine.selector, "choose", counted)
        self.decode(*(f"d{n}" for n in range(replicas)), max_num_seqs=PLACES, **decode)
        self.placed = [self.admit(f"r{n}", disaggregate=False) for n in range(PLACES * replicas)]

    def looks_of(self, step: Any) -> int:
        before = self.looks
        step()
        return self.looks - before


def test_what_frees_nothing_is_looked_at_once_in_a_while() -> None:
    rig = Looks()
    calls = [rig.ask(f"w{n}", disaggregate=False) for n in range(20)]
    rig.beat("d0")
    for step in (
        lambda: rig.beat("d0"),
        lambda: rig.report(),
        lambda: rig.step(FrontendHeartbeat("f", tuple(t.ticket_id for t in rig.placed), 0), 999),
        lambda: rig.ask("one more", disaggregate=False),
        lambda: rig.step(Tick()),
    ):
        assert rig.looks_of(step) == 0
    rig.now += SECOND // 10
    assert 0 < rig.looks_of(lambda: rig.step(Tick())) <= 10
    assert not any(call in rig.answers for call in calls) and rig.audit() == []


def test_a_place_that_is_freed_goes_to_the_first_at_once() -> None:
    rig = Looks()
    first, second = rig.ask("w1", disaggregate=False), rig.ask("w2", disaggregate=False)
    rig.beat("d0")
    rig.end(rig.placed[0])
    assert isinstance(rig.answers.get(first), Ticket) and second not in rig.answers
    rig.end(rig.placed[1])
    assert isinstance(rig.answers.get(second), Ticket)


def test_a_replica_that_joins_takes_those_who_wait_at_once() -> None:
    rig = Looks()
    calls = [rig.ask(f"w{n}", disaggregate=False) for n in range(PLACES)]
    rig.decode("new", max_num_seqs=PLACES)
    assert all(isinstance(rig.answers.get(call), Ticket) for call in calls)


def test_who_comes_and_has_its_turn_at_once_is_looked_at_though_nothing_got_freer() -> None:
    """All replicas are too full for the first, another tenant's small request fits beside what is kept for it."""
    rig = ControllerDriver(spec_of(admission={"queue_max": 64, "queue_wait_s": 900}))
    rig.decode("a", blocks_total=100)
    rig.admit("r", prompt=1600, most=320, disaggregate=False)
    large = [rig.ask(f"large{n}", prompt=2000, most=320, tenant="t", disaggregate=False) for n in range(20)]
    small = rig.ask("small", prompt=32, most=32, tenant="u", disaggregate=False)
    assert isinstance(rig.answers.get(small), Ticket) and not any(call in rig.answers for call in large)


def test_who_leaves_the_front_lets_the_next_in() -> None:
    rig = ControllerDriver(spec_of(admission={"queue_max": 64, "queue_wait_s": 900}))
    rig.decode("a", blocks_total=100)
    rig.admit("r", prompt=1600, most=320, disaggregate=False)
    front = rig.ask("front", prompt=1600, most=1024, disaggregate=False)
    behind = rig.ask("behind", prompt=320, most=512, disaggregate=False)
    assert behind not in rig.answers
    rig.withdraw(front)
    assert isinstance(rig.answers.get(behind), Ticket)


@pytest.mark.parametrize("replicas", [4, 60])
def test_the_place_of_the_first_is_looked_for_among_a_few_replicas(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    earliest = capacity.earliest

    def counted(demand: Any, replica: Any, *args: Any) -> int:
        looked.append(replica.id)
        return earliest(demand, replica, *args)

    monkeypatch.setattr(selector, "earliest", counted)
    rig = Looks(replicas)
    waits = rig.ask("waits", disaggregate=False)
    assert 0 < len(looked) <= selector.HOLD_LOOKS
    assert not isinstance(rig.answers.get(waits), Overloaded)
    for ticket in rig.placed:
        if ticket.decode == looked[0]:
            rig.end(ticket)
    assert isinstance(rig.answers.get(waits), Ticket)
