"""The page ledger against a deliberately dumb model, and each law broken on purpose.

1. Honest use (allocate, share, grow, release, free) never breaches a law, in any order.
2. A tag names one life of one page, ever; a claim keeps the tag that the page had when it was claimed.
3. After every step `breaches` equals what the dumb model finds by looking at everything.
4. A page whose free would leave fewer references than claims is not given back, and the breach has its history.
5. A page in doubt is withheld when its last holder leaves, and never handed out until it is lifted; it is
   releasable when no living request claims it from before.
6. A page in the free list that a request claims is not handed out.
7. A page handed out under a claim begins another life: the old claim is lost, not freed.
8. `free + held + quarantined == total`; when idle nothing is held.
9. Two claims need two references.
10. The epoch makes tags of two replicas differ; a full counter moves on to the next epoch.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.engine.integrity.ledger import COUNTER_BITS, STEPS_IN_FLIGHT, FreeAnswer, Law, Ledger, tag_epoch


class DumbPool:
    """A pool without checks of its own: reference counts and a free list."""

    def __init__(self, num_pages: int) -> None:
        self.refs = [0] * num_pages
        self.free = list(range(1, num_pages))

    def take(self, page: int) -> None:
        self.free.remove(page)
        self.refs[page] = 1

    def drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.free.append(page)


def ledger_of(num_pages: int = 8, epoch: int = 5) -> tuple[Ledger, DumbPool]:
    pool = DumbPool(num_pages)
    return Ledger(num_pages, epoch, pool.refs.__getitem__), pool


def give(ledger: Ledger, pool: DumbPool, request: str, *pages: int) -> list[int]:
    for page in pages:
        pool.take(page)
        ledger.allocated(page)
    return ledger.claim(request, ledger.num_claimed(request), pages)


def end(ledger: Ledger, pool: DumbPool, request: str) -> None:
    for page in ledger.release(request).kept:
        answer = ledger.free(page)
        if answer is FreeAnswer.GIVE:
            pool.drop(page)


class HonestUse(RuleBasedStateMachine):
    """Invariants 1, 2, 3, 5 and 8."""

    NUM_PAGES = 10

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.pool = ledger_of(self.NUM_PAGES)
        self.held: dict[str, list[tuple[int, int]]] = {}  # the model: request -> (page, life)
        self.lives = Counter[int]()
        self.doubted: set[int] = set()
        self.withheld: set[int] = set()
        self.tags: dict[tuple[int, int], int] = {}  # (page, life) -> tag
        self.names = itertools.count()

    def _new(self, request: str, count: int) -> None:
        pages = self.pool.free[:count]
        for page in pages:
            assert self.ledger.may_hand_out(page)
            self.pool.take(page)
            self.lives[page] += 1
            tag = self.ledger.allocated(page)
            assert tag not in self.tags.values()
            self.tags[page, self.lives[page]] = tag
        had = len(self.held[request])
        self.held[request] += [(page, self.lives[page]) for page in pages]
        tags = self.ledger.claim(request, had, pages)
        assert tags == [self.tags[life] for life in self.held[request][had:]]

    @precondition(lambda self: self.pool.free)
    @rule(count=st.integers(1, 3))
    def admit(self, count: int) -> None:
        request = f"r{next(self.names)}"
        self.held[request] = []
        self._new(request, count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A prefix hit: some first pages of another request, each with a reference of its own, then fresh ones."""
        other = data.draw(st.sampled_from(sorted(self.held)))
        hit = [life for life in self.held[other] if life[0] not in self.doubted]
        hit = hit[: data.draw(st.integers(0, len(hit)))]
        request = f"r{next(self.names)}"
        for page, _ in hit:
            self.pool.refs[page] += 1
        self.held[request] = list(hit)
        assert self.ledger.claim(request, 0, [page for page, _ in hit]) == [self.tags[life] for life in hit]
        if self.pool.free:
            self._new(request, 1)

    @precondition(lambda self: self.held and self.pool.free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self._new(data.draw(st.sampled_from(sorted(self.held))), 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.held)))
        lives = self.held.pop(request)
        released = self.ledger.release(request)
        assert list(released.kept) == [page for page, _ in lives] and released.lost == ()
        for page in reversed(released.kept):
            answer = self.ledger.free(page)
            last = self.pool.refs[page] == 1
            if last and page in self.doubted:
                assert answer is FreeAnswer.WITHHOLD
                self.withheld.add(page)
            else:
                assert answer is FreeAnswer.GIVE
                self.pool.drop(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({page for lives in self.held.values() for page, _ in lives})))
        self.ledger.doubt(page, "test")
        self.doubted.add(page)

    @rule()
    def lift(self) -> None:
        pages = self.ledger.quarantined()
        assert set(pages) == self.withheld
        self.ledger.lift(pages)
        for page in pages:
            self.pool.drop(page)
        self.doubted -= self.withheld
        self.withheld.clear()

    @invariant()
    def laws_hold(self) -> None:
        assert self.ledger.breaches(self.pool.free) == []
        assert sum(self.ledger.num_breaches.values()) == 0

    @invariant()
    def the_model_agrees(self) -> None:
        claims = Counter(page for lives in self.held.values() for page, _ in lives)
        for page in range(1, self.NUM_PAGES):
            assert self.ledger.num_claims(page) == claims[page]
            assert sorted(self.ledger.holders(page)) == sorted(
                r for r, lives in self.held.items() if page in [p for p, _ in lives]
            )
        assert self.ledger.num_quarantined == len(self.withheld)
        held = set(claims) | self.withheld
        assert len(held) + len(self.pool.free) == self.NUM_PAGES - 1

    def teardown(self) -> None:
        for request in list(self.held):
            end(self.ledger, self.pool, request)
        assert self.ledger.idle_breaches(self.pool.free) == []


TestHonestUse = HonestUse.TestCase
TestHonestUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_every_short_honest_history_is_clean() -> None:
    """Invariant 1, exhaustively: all sequences of six operations of two requests over three pages."""
    operations = [(verb, request) for verb in ("grow", "share", "leave") for request in "ab"]
    for history in itertools.product(operations, repeat=6):
        ledger, pool = ledger_of(4)
        for verb, request in history:
            other = "b" if request == "a" else "a"
            if verb == "grow" and pool.free:
                give(ledger, pool, request, pool.free[0])
            elif verb == "share" and not ledger.num_claimed(request):
                for page in ledger.pages_of(other):
                    pool.refs[page] += 1
                ledger.claim(request, 0, ledger.pages_of(other))
            elif verb == "leave":
                end(ledger, pool, request)
        assert ledger.breaches(pool.free) == [], history
        for request in "ab":
            end(ledger, pool, request)
        assert ledger.idle_breaches(pool.free) == [] and not any(ledger.num_breaches.values()), history


def test_a_free_that_takes_a_claimed_page_is_refused_and_reported_with_its_history() -> None:
    ledger, pool = ledger_of()
    give(ledger, pool, "a", 1, 2)
    assert ledger.free(2) is FreeAnswer.REFUSE  # 4
    (breach,) = ledger.kept_breaches(forget=True)
    assert ledger.kept_breaches(forget=False) == []
    assert (breach.law, breach.page) == (Law.FREED_WHILE_HELD, 2) and "a hold it" in breach.text
    assert [event.split(" tag")[0] for event in breach.history] == ["step 0 allocated", "step 0 claimed by a"]
    assert ledger.in_doubt(2) and ledger.breaches(pool.free) == []
    released = ledger.release("a")
    assert [ledger.free(page) for page in released.kept] == [FreeAnswer.GIVE, FreeAnswer.WITHHOLD]  # 5
    assert ledger.num_quarantined == 1


def test_a_count_below_zero_is_refused() -> None:
    ledger, pool = ledger_of()
    assert ledger.free(3) is FreeAnswer.REFUSE
    assert ledger.num_breaches[Law.UNDERFLOW] == 1
    pool.refs[3] = -1
    assert any("-1 references" in found for found in ledger.breaches(pool.free))


def test_a_claimed_page_in_the_free_list_is_not_handed_out() -> None:
    ledger, pool = ledger_of()
    give(ledger, pool, "a", 1)
    pool.drop(1)  # behind the ledger's back
    assert any("is free with" in found for found in ledger.breaches(pool.free))
    assert ledger.may_hand_out(2) and not ledger.may_hand_out(1)  # 6
    assert ledger.num_breaches[Law.FREED_WHILE_HELD] == 1


def test_a_page_handed_out_under_a_claim_has_another_life() -> None:
    ledger, pool = ledger_of()
    (old,) = give(ledger, pool, "a", 1)
    pool.drop(1)
    (new,) = give(ledger, pool, "b", 1)
    assert new != old and ledger.num_breaches[Law.LIFE] == 1  # 7
    assert ledger.tags_of("a") == (old,) and ledger.holders(1) == ["b"]
    released = ledger.release("a")
    assert released.kept == () and released.lost == ((0, 1),)
    end(ledger, pool, "b")
    assert ledger.idle_breaches(pool.free) == []


def test_a_page_in_doubt_stays_out_until_it_is_lifted() -> None:
    ledger, pool = ledger_of()
    ledger.doubt(4, "test")
    assert not ledger.may_hand_out(4)  # 5
    pool.take(4)
    ledger.withhold(4)
    assert ledger.num_quarantined == 1 and ledger.idle_breaches(pool.free) == []  # 8
    assert ledger.quarantined() == [4]
    ledger.lift([4])
    pool.drop(4)
    assert ledger.may_hand_out(4) and ledger.num_quarantined == 0


def test_a_quarantined_page_is_releasable_when_no_living_request_claims_it_from_before() -> None:
    ledger, pool = ledger_of()
    give(ledger, pool, "holder", 2)
    pool.drop(2)  # below the ledger: `holder` keeps its claim on a life that is over
    give(ledger, pool, "victim", 2)
    ledger.doubt(2, "test")
    (page,) = ledger.release("victim").kept
    assert ledger.free(page) is FreeAnswer.WITHHOLD and ledger.quarantined() == [2]
    ledger.step += 10
    assert ledger.releasable() == []  # `holder` still believes that page 2 is its own
    assert ledger.release("holder").lost == ((0, 2),)
    assert ledger.releasable() == [2]
    ledger.step -= 8
    assert ledger.releasable() == []  # a step of that time may be in flight


def test_one_long_request_does_not_keep_the_pages_of_others_in_quarantine() -> None:
    ledger, pool = ledger_of(num_pages=1001)
    give(ledger, pool, "long", 1)
    for page in range(2, 902):
        give(ledger, pool, f"r{page}", page)
        ledger.doubt(page, "test")
        end(ledger, pool, f"r{page}")
    assert ledger.num_quarantined == 900
    ledger.step += STEPS_IN_FLIGHT
    assert ledger.releasable() == list(range(2, 902))


def test_two_claims_on_one_reference_are_a_breach() -> None:
    ledger, pool = ledger_of()
    give(ledger, pool, "a", 1)
    ledger.claim("b", 0, [1])
    assert ledger.num_breaches[Law.SHARING] == 1  # 9
    assert any("1 references for 2 claims" in found for found in ledger.breaches(pool.free))


def test_fewer_references_than_claims_are_found_by_asking() -> None:
    ledger, pool = ledger_of()
    give(ledger, pool, "a", 1)
    pool.refs[1] += 1
    ledger.claim("b", 0, [1])
    assert not ledger.short(1)
    pool.refs[1] -= 1
    assert ledger.short(1) and ledger.in_doubt(1)
    assert ledger.num_breaches[Law.FREED_WHILE_HELD] == 1


def test_a_claim_is_written_once() -> None:
    """The table may say later what it wants: the claim stays what it was, and the difference is reported."""
    ledger, pool = ledger_of()
    tags = give(ledger, pool, "a", 1, 2)
    assert ledger.claim("a", 0, [1, 2]) == [] and not any(ledger.num_breaches.values())
    assert ledger.claim("a", 0, [1, 3]) == []
    assert ledger.tags_of("a") == tuple(tags) and ledger.pages_of("a") == (1, 2)
    assert ledger.num_breaches[Law.LIFE] == 1


def test_pages_outside_the_pool_can_never_pass() -> None:
    ledger, _ = ledger_of(4)
    assert ledger.claim("a", 0, [0, 4, -1]) == [-1, -1, -1]
    assert ledger.num_breaches[Law.LIFE] == 3
    assert ledger.release("a").lost == ((0, 0), (1, 4), (2, -1))


def test_lost_pages_are_seen() -> None:
    ledger, pool = ledger_of(4)
    pool.free.remove(2)
    assert ledger.idle_breaches(pool.free) == [
        "page 2 has 0 references and is not in the free list: lost",
        "1 pages are held by no request",
    ]


def test_a_page_twice_in_the_free_list_is_seen() -> None:
    ledger, pool = ledger_of(4)
    assert "page 2 is in the free list twice" in ledger.breaches([*pool.free, 2])


def test_tags_of_two_replicas_differ_and_epochs_move_on() -> None:
    epochs = {tag_epoch(f"decode-{i}", 1) for i in range(1000)}
    assert len(epochs) == 1000 and all(0 <= epoch < 1 << 31 for epoch in epochs)  # 10
    assert tag_epoch("a", 1) != tag_epoch("a", 2)
    ledger, pool = ledger_of(4, epoch=(1 << 31) - 1)
    ledger._counter = (1 << COUNTER_BITS) - 1
    (tag,) = give(ledger, pool, "a", 1)
    assert tag == 1 and ledger.epoch == 0
    assert 0 < (1 << 31) - 1 << COUNTER_BITS | ((1 << COUNTER_BITS) - 1) < 1 << 63


@pytest.mark.parametrize(("pages", "epoch"), [(1, 0), (4, -1), (4, 1 << 31)])
def test_impossible_ledgers_are_refused(pages: int, epoch: int) -> None:
    with pytest.raises(ValueError):
        Ledger(pages, epoch, lambda page: 0)
