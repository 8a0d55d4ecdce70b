"""A fetch in chunks from a source that spoils, delays and breaks; the numbers are laws of `actors.transfer.chunks`."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.transfer import chunks
from actors.transfer.chunks import Ask, Broke, Came, ChunkFetch, Ended, Gone, Moved, Open, Opened, Stopped, Tick

MS = 1_000_000


class Source:
    """Carries a fetch out, with a dice for what goes wrong, and looks at every law after every step."""

    def __init__(self, plan: ChunkFetch, seed: int, trouble: float, dead_ways: frozenset[int] = frozenset()) -> None:
        self.plan, self.dice, self.trouble, self.dead = plan, random.Random(seed), trouble, dead_ways
        self.now = 0
        self.stream = self.way = 0
        self.waiting: deque[Ask] = deque()
        self.landed: list[int] = []  # chunk indices in the order written, spoilt ones too
        self.intact: set[int] = set()
        self.ended: Ended | None = None
        self.opened: list[tuple[int, int]] = []

    def run(self, steps_max: int = 5_000) -> Ended:
        todo: deque[chunks.Event] = deque()
        effects = self.plan.begin(self.now)
        for _ in range(steps_max):
            todo.extend(self.carry(effects))
            self.laws()
            if self.ended is not None:
                assert self.plan.step(Tick(), self.now + 10**12) == []  # 5
                return self.ended
            event = todo.popleft() if todo else self.next()
            self.now += self.dice.choice((0, MS, 20 * MS))
            effects = self.plan.step(event, self.now)
        raise AssertionError("it does not end")

    def carry(self, effects: list[chunks.Effect]) -> list[chunks.Event]:
        events: list[chunks.Event] = []
        for effect in effects:
            match effect:
                case Open(stream, way):
                    late = [Came(self.stream, ask.index, True) for ask in self.waiting][:1]  # 5
                    self.stream, self.way = stream, way
                    self.waiting.clear()
                    self.opened.append((stream, way))
                    events.append(Broke(stream, "refused") if way in self.dead else Opened(stream))
                    events += late
                case Ask(stream, index, first, num_bytes):
                    assert stream == self.stream and index not in self.intact
                    assert first == index * self.plan.chunk_bytes and num_bytes == self.plan.size(index)
                    self.waiting.append(effect)
                case Ended():
                    assert self.ended is None  # 5
                    self.ended = effect
        return events

    def next(self) -> chunks.Event:
        if self.dice.random() < self.trouble:
            kind = self.dice.choice(("break", "spoil", "quiet"))
            if kind == "break":
                return Broke(self.stream, "reset")
            if kind == "quiet":
                self.now += self.plan.quiet_ns
                return Tick()
            if self.waiting:
                ask = self.waiting.popleft()
                return Came(self.stream, ask.index, False)
        if not self.waiting:
            return Tick()
        if self.dice.random() < 0.3:
            return Moved(self.stream)
        ask = self.waiting.popleft()
        self.intact.add(ask.index)
        return Came(self.stream, ask.index, True)

    def laws(self) -> None:
        plan = self.plan
        places = [*plan.missing, *plan.asked, *plan.there]
        assert sorted(places) == list(range(plan.num_chunks))  # 1
        assert plan.there <= self.intact  # 1
        outstanding = sum(plan.size(index) for index in plan.asked)
        assert outstanding <= plan.window_bytes  # 2
        if self.ended is not None and self.ended.complete:
            assert len(plan.there) == plan.num_chunks  # 1


@given(
    num_bytes=st.integers(1, 400),
    chunk=st.integers(1, 64),
    window=st.integers(1, 200),
    seed=st.integers(0, 10_000),
    trouble=st.sampled_from((0.0, 0.05, 0.3)),
    dead=st.frozensets(st.integers(0, 1)),
)
def test_the_laws_hold_whatever_goes_wrong(
    num_bytes: int, chunk: int, window: int, seed: int, trouble: float, dead: frozenset[int]
) -> None:
    plan = ChunkFetch(num_bytes, 2, chunk, window, quiet_ns=4_000 * MS)
    source = Source(plan, seed, trouble, dead)
    ended = source.run()
    assert ended.complete or ended.reason
    if len(dead) == 2:
        assert not ended.complete and [way for _, way in source.opened] == [0, 0, 1, 1]  # 4
    if not trouble and len(dead) < 2:
        assert ended.complete and plan.asked_again == 0
        assert [way for _, way in source.opened] == ([0, 0, 1] if 0 in dead else [0])  # 4


def begun(num_bytes: int = 100, chunk: int = 10, window: int = 30) -> ChunkFetch:
    plan = ChunkFetch(num_bytes, 2, chunk, window, quiet_ns=1_000)
    assert plan.begin(0) == [Open(1, 0)]
    return plan


def test_a_broken_stream_loses_only_what_was_asked_of_it() -> None:
    plan = begun()
    assert [effect.index for effect in plan.step(Opened(1), 0) if isinstance(effect, Ask)] == [0, 1, 2]
    assert [effect.index for effect in plan.step(Came(1, 0, True), 1) if isinstance(effect, Ask)] == [3]
    assert plan.step(Broke(1, "reset"), 2) == [Open(2, 0)]
    asked = [effect.index for effect in plan.step(Opened(2), 3) if isinstance(effect, Ask)]
    assert asked == [1, 2, 3] and plan.there == {0}


def test_progress_and_not_the_whole_time_keeps_a_fetch_alive() -> None:
    plan = begun(num_bytes=10_000)
    now = 0
    plan.step(Opened(1), now)
    for index in range(999):
        now += 900
        assert plan.step(Tick(), now) == [] and plan.stream == 1
        plan.step(Came(1, index, True), now)
    assert plan.step(Tick(), now + 999) == [] and plan.step(Moved(1), now + 999) == []
    assert plan.step(Tick(), now + 1_998) == []
    assert plan.step(Tick(), now + 1_999) == [Open(2, 0)]


def test_a_chunk_whose_checksum_is_wrong_is_asked_again_on_another_stream() -> None:
    plan = begun(num_bytes=20)
    plan.step(Opened(1), 0)
    plan.step(Came(1, 0, True), 1)
    assert plan.step(Came(1, 1, False), 2) == [Open(2, 0)]
    assert plan.step(Opened(2), 3) == [Ask(2, 1, 10, 10)]
    assert plan.step(Came(2, 1, True), 4) == [Ended(True)]


@pytest.mark.parametrize("event", [Gone(1), Stopped()])
def test_what_is_gone_or_not_wanted_ends_at_once_and_blames_no_way(event: chunks.Event) -> None:
    plan = begun()
    plan.step(Opened(1), 0)
    assert plan.step(event, 1) == [Ended(False, "")]
    assert plan.step(Came(1, 0, True), 2) == []


BUGS = (  # (what stands in the module, what a bug would put there)
    ("self.missing.extendleft(reversed(self.asked))", "pass"),
    ("if not intact:", "if False:"),
    ("and outstanding + self.size(self.missing[0]) <= self.window_bytes", ""),
    ('getattr(event, "stream", self.stream) != self.stream', "False"),
    ("self.way, self._failures = self.way + 1, 0", "self._failures = 0"),
    ("if self.ended or ", "if "),
    ("if len(self.there) == self.num_chunks:", "if not self.missing:"),
)


@pytest.mark.parametrize(("old", "new"), BUGS, ids=[old.strip()[:40] for old, _ in BUGS])
def test_a_bug_in_the_machine_breaks_a_law(old: str, new: str) -> None:
    text = Path(chunks.__file__).read_text()
    assert text.count(old) == 1
    module = types.ModuleType("chunks_with_a_bug")
    sys.modules[module.__name__] = module
    exec(compile(text.replace(old, new), module.__name__, "exec"), module.__dict__)
    # Its events and effects are those of the shipped module, so that `Source` understands them.
    module.__dict__.update({name: getattr(chunks, name) for name in EVENTS})
    with pytest.raises(AssertionError):
        for seed in range(200):
            plan = module.ChunkFetch(90, 2, 10, 30, quiet_ns=4_000 * MS)
            Source(plan, seed, 0.3).run(500)
            Source(module.ChunkFetch(90, 2, 10, 30, quiet_ns=4_000 * MS), seed, 0.0, frozenset({0, 1})).run(500)


EVENTS = ("Opened", "Moved", "Came", "Broke", "Gone", "Stopped", "Tick", "Open", "Ask", "Ended")
