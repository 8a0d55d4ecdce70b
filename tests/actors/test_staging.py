"""Leased staging memory against a dumb model.

Invariants:
1. free + held == max, and no two regions overlap (Staging.breaches).
2. A region is never given to another key while an engine may still write or read it.
3. A region is given back once it is released or expired and not in use, and not before.
4. A key holds at most one region.
5. A request that could never fit raises; one that does not fit now gets None; one that fits a hole gets it.
6. Nothing leaks: when everything is released and every engine is gone, all bytes are free in one hole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.transfer.staging import ALIGN_BYTES, Staging, StagingError, aligned

MAX = 16 * ALIGN_BYTES
ENGINES = ("p0", "p1", "d0")
KEYS = [(ticket, attempt) for ticket in range(4) for attempt in (1, 2)]


@dataclass
class Held:
    offset: int
    size: int
    expires: int
    users: set[tuple[str, bool]] = field(default_factory=set)  # (engine, writes)
    over: bool = False


class StagingMachine(RuleBasedStateMachine):
    """The model is a dict of what is held: slow, obvious, without holes."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(MAX)
        self.model: dict[tuple[int, int], Held] = {}
        self.now = 0

    def _forget_what_is_over(self) -> None:
        self.model = {key: m for key, m in self.model.items() if not m.over or m.users}

    @rule(key=st.sampled_from(KEYS), num_bytes=st.integers(1, MAX), lease=st.integers(1, 20))
    def grant(self, key: tuple[int, int], num_bytes: int, lease: int) -> None:
        if key in self.model:
            with pytest.raises(StagingError, match="already holds"):
                self.staging.grant(key, num_bytes, self.now + lease)
            return
        region = self.staging.grant(key, num_bytes, self.now + lease)
        spans = sorted((m.offset, m.size) for m in self.model.values())
        edges = [0, *[end for offset, size in spans for end in (offset, offset + size)], MAX]
        largest = max(edges[i + 1] - edges[i] for i in range(0, len(edges), 2))
        assert (region is not None) == (aligned(num_bytes) <= largest)  # 5
        if region is not None:
            self.model[key] = Held(region.offset, aligned(num_bytes), self.now + lease)

    @rule(key=st.sampled_from(KEYS), engine=st.sampled_from(ENGINES), write=st.booleans())
    def use(self, key: tuple[int, int], engine: str, write: bool) -> None:
        opened = (self.staging.open_writer if write else self.staging.open_reader)(key, engine)
        mine = self.model.get(key)
        assert opened == (mine is not None and not mine.over)
        if opened and mine is not None:
            mine.users.add((engine, write))

    @rule(key=st.sampled_from(KEYS), engine=st.sampled_from(ENGINES), write=st.booleans())
    def done(self, key: tuple[int, int], engine: str, write: bool) -> None:
        (self.staging.writer_done if write else self.staging.reader_done)(key, engine)
        if key in self.model:
            self.model[key].users.discard((engine, write))
        self._forget_what_is_over()

    @rule(key=st.sampled_from(KEYS))
    def release(self, key: tuple[int, int]) -> None:
        self.staging.release(key)
        if key in self.model:
            self.model[key].over = True
        self._forget_what_is_over()

    @rule(engine=st.sampled_from(ENGINES))
    def engine_dies(self, engine: str) -> None:
        writing = [key for key, m in self.model.items() if (engine, True) in m.users]
        assert sorted(self.staging.peer_gone(engine)) == sorted(writing)
        for m in self.model.values():
            m.users = {user for user in m.users if user[0] != engine}
        self._forget_what_is_over()

    @rule(step=st.integers(1, 15))
    def time_passes(self, step: int) -> None:
        self.now += step
        late = [key for key, m in self.model.items() if not m.over and m.expires <= self.now]
        assert sorted(self.staging.expire(self.now)) == sorted(late)
        for key in late:
            self.model[key].over = True
        self._forget_what_is_over()

    @invariant()
    def laws(self) -> None:
        assert self.staging.breaches() == []  # 1
        mine = {region.key: (region.offset, region.size) for region in self.staging}
        assert mine == {key: (m.offset, m.size) for key, m in self.model.items()}  # 2, 3, 4

    @precondition(lambda self: self.model)
    @rule()
    def everything_goes(self) -> None:
        for key in KEYS:
            self.staging.release(key)
        for engine in ENGINES:
            self.staging.peer_gone(engine)
        self.model.clear()
        assert self.staging.bytes_free == MAX and len(self.staging) == 0  # 6
        region = self.staging.grant((99, 1), MAX, self.now + 1)
        assert region is not None and region.offset == 0
        self.staging.release((99, 1))


StagingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStaging = StagingMachine.TestCase


def test_what_can_never_fit_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(StagingError, match="staging_bytes_max"):
        Staging(MAX).grant((1, 1), MAX + 1, 10)
    with pytest.raises(StagingError, match="0 bytes"):
        Staging(MAX).grant((1, 1), 0, 10)
    with pytest.raises(StagingError, match="least"):
        Staging(ALIGN_BYTES - 1)


def test_a_late_writer_keeps_its_bytes_from_everybody_else() -> None:
    staging = Staging(2 * ALIGN_BYTES)
    first = staging.grant((1, 1), 2 * ALIGN_BYTES, 5)
    assert first is not None and staging.open_writer((1, 1), "p0")
    assert staging.expire(5) == [(1, 1)]
    assert staging.grant((2, 1), 1, 10) is None  # the engine may still write there
    assert not staging.open_reader((1, 1), "d0")  # and it may not be read any more
    assert staging.writer_done((1, 1), "p0")
    assert staging.grant((2, 1), 1, 10) is not None
