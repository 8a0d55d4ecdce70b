"""The controller's page book against the engine's ledger: it knows from frontends what a prompt holds.

The ledger counts references and claims. A page that it gives to a second request with a second reference is, to it and
to the tags, an honest shared page; only the book sees that the two have nothing in common there.
"""

from __future__ import annotations

from typing import Any

import pytest
from controller_driver import ControllerDriver

from actors.controller.status import pages
from actors.engine.integrity.ledger import Ledger, tag_epoch
from actors.messages import PageDelta, Ticket
from app.commands.page_picture import picture

PAGES = 16


class Engine:
    """A replica's pool and its ledger, and what it reports of them."""

    def __init__(self, rig: ControllerDriver) -> None:
        self.rig = rig
        self.refs = [0] * PAGES
        self.ledger = Ledger(PAGES, tag_epoch("d", 1), self.refs.__getitem__)

    def give(self, ticket: Ticket, shared: tuple[int, ...], fresh: tuple[int, ...]) -> None:
        """`shared` pages get one more reference, as on a prefix hit; `fresh` ones begin a life."""
        for page in shared:
            self.refs[page] += 1
        for page in fresh:
            self.refs[page] = 1
            self.ledger.allocated(page)
        mine = (*shared, *fresh)
        tags = self.ledger.claim(ticket.request_id, 0, mine)
        added = dict(zip(mine, tags))
        self.beat(PageDelta(request_id=ticket.request_id, added=added, ticket_id=ticket.ticket_id))

    def beat(self, *deltas: PageDelta) -> None:
        held = sum(count > 0 for count in self.refs)
        self.rig.beat("d", held=held, pages=deltas)

    def breaches(self) -> list[str]:
        return self.ledger.breaches([page for page in range(1, PAGES) if not self.refs[page]])


@pytest.fixture
def rig() -> ControllerDriver:
    made = ControllerDriver()
    made.decode("d", blocks_total=PAGES - 1)
    return made


def admit(rig: ControllerDriver, name: str, *hashes: int) -> Ticket:
    return rig.admit(name, prompt=32 * len(hashes) + 1, most=8, prefix_hashes=hashes)


def violations(rig: ControllerDriver) -> float:
    return rig.machine.counters.get("page_book_violations", 0)


def test_a_common_beginning_is_shared_in_peace(rig: ControllerDriver) -> None:
    engine = Engine(rig)
    engine.give(admit(rig, "a", 1, 2), (), (1, 2, 3))
    engine.give(admit(rig, "b", 1, 2, 9), (1, 2), (4, 5))
    assert engine.breaches() == [] == rig.audit() and violations(rig) == 0


@pytest.mark.parametrize(
    ("hashes", "shared", "says"),
    [
        ((8, 9), (1,), "page 1 holds another prompt's tokens at position 0"),
        ((1, 9), (1, 3), "page 3 is at its position 1, and at 2 of another that owns it"),
        ((1, 9), (1, 2), "page 2 holds another prompt's tokens at position 1"),
    ],
)
def test_a_page_that_the_ledger_gives_to_a_stranger_is_caught(
    rig: ControllerDriver, hashes: tuple[int, ...], shared: tuple[int, ...], says: str
) -> None:
    engine = Engine(rig)
    engine.give(admit(rig, "a", 1, 2), (), (1, 2, 3))
    wrong = admit(rig, "b", *hashes)
    engine.give(wrong, shared, (4, 5))
    assert engine.breaches() == [], "two claims, two references, one life: the ledger's laws hold"
    assert any(says in text for text in rig.audit()) and violations(rig) == 1
    engine.beat()
    assert any(says in text for text in rig.audit()), "for as long as it holds the page"
    for page in engine.ledger.release("b").kept:
        engine.refs[page] -= 1
    engine.beat(PageDelta(request_id="b", released=True))
    assert rig.audit() == []


def test_without_tags_a_page_of_two_prompts_is_caught(rig: ControllerDriver) -> None:
    first, second = admit(rig, "a", 1, 2), admit(rig, "b", 8, 9)
    for ticket, pages_of in ((first, (1, 2, 3)), (second, (4, 2, 5))):
        added = dict.fromkeys(pages_of, 0)
        rig.beat("d", held=5, pages=(PageDelta(request_id=ticket.request_id, added=added, ticket_id=ticket.ticket_id),))
    assert any("page 2 holds another prompt's tokens at position 1" in text for text in rig.audit())
    assert violations(rig) == 1


def test_the_picture_shows_who_has_which_page(rig: ControllerDriver) -> None:
    engine = Engine(rig)
    engine.give(admit(rig, "a", 1, 2), (), (1, 2, 3))
    engine.give(admit(rig, "b", 1), (1,), (7, 8))
    found: dict[str, Any] = pages(rig.machine)["d"]
    lines = picture("d", found, width=10)
    assert lines[0] == "decode d (ready): 5 of 15 pages held by 2 requests, 1 shared, 10 free"
    assert lines[1:3] == ["      1  #AA...BB..", "     11  ....."]
    assert [line.split()[:4] for line in lines[4:]] == [["A", "3", "pages", "a"], ["B", "3", "pages", "b"]]
    rig.beat("d", pages_whole=True, held=0)
    assert "no pages with owners: idle" in picture("d", pages(rig.machine)["d"])[1]
