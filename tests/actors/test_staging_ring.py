"""The staging ring under random schedules (`support/ring_schedules.py`), and with bugs planted that they must find."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import ring_schedules

from actors.engine import staging_ring
from actors.engine.staging_ring import Done, Seal, Slot, StagingRing

SCHEDULES = 1_000
SOAK_SCHEDULES = 1_000_000
SOURCE = Path(staging_ring.__file__).read_text()
KEY = (7, 1)

FAILED_COPY = "        return self.end(key)\n\n    def end"
# What is wrong, the line as it is, and as the bug has it.
BUGS = (
    ("a slot is given twice", "slot = self._free.popleft()", "slot = self._free[0]"),
    ("a slot is free while it is copied", "self.slots[slot] = Slot.COPYING", "self._free.append(slot)"),
    ("the latest conversion is copied first", "slot = self._converted.popleft()", "slot = self._converted.pop()"),
    ("a job is sealed one part early", "jobs[0].left == 0", "jobs[0].left <= 1"),
    ("a part that was copied is not counted", "job.left -= 1", "job.left -= 0"),
    ("the latest job is sealed first", "effects.append(Seal(jobs.popleft()))", "effects.append(Seal(jobs.pop()))"),
    ("Done comes before the copy has ended", " and not self._is_copied(key):", ":"),
    ("Done never comes", "effects.append(Done(key))", "pass"),
    ("a part of an ended ticket is copied", "self._converted.remove(slot)", "continue"),
    ("jobs of an ended ticket live on", "job.dead = True", "job.dead = False"),
    ("a failed copy does not end its ticket", FAILED_COPY, FAILED_COPY.replace("self.end(key)", "[]")),
    ("a ticket that is ending begins again", "dead=key in self._ending)", "dead=False)"),
    ("a slot is lost", "self._free.append(slot)", "pass"),
    ("a conversion for a dead job is kept", "if self.part[slot].dead:", "if False:"),
)


def with_bug(old: str, new: str) -> ModuleType:
    assert SOURCE.count(old) == 1, f"{old!r} stands {SOURCE.count(old)} times in the ring"
    module = ModuleType("staging_ring_with_a_bug")
    sys.modules[module.__name__] = module  # where dataclasses look for the names of annotations
    exec(compile(SOURCE.replace(old, new), "staging_ring_with_a_bug", "exec"), module.__dict__)
    return module


def test_random_schedules() -> None:
    moves = [ring_schedules.run(staging_ring, seed) for seed in range(SCHEDULES)]
    assert max(moves) > 150 and sum(moves) > 20 * SCHEDULES


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_million_random_schedules() -> None:
    began = time.monotonic()
    moves = sum(ring_schedules.run(staging_ring, seed) for seed in range(SOAK_SCHEDULES))
    print(f"{SOAK_SCHEDULES:,} schedules, {moves:,} moves, no violation, {time.monotonic() - began:.0f} s")


@pytest.mark.parametrize(("what", "old", "new"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_found(what: str, old: str, new: str) -> None:
    module = with_bug(old, new)
    for seed in range(SCHEDULES):
        try:
            ring_schedules.run(module, seed)
        except Exception:
            return
    pytest.fail(f"{SCHEDULES} schedules do not see that {what}")


def test_back_pressure_is_counted_and_ends_with_a_copy() -> None:
    ring = StagingRing(1)
    job = ring.begin(KEY, 2)
    slot = ring.take(job)
    assert slot is not None and ring.take(job) is None and ring.waits == 1
    ring.converted(slot)
    assert ring.slots == [Slot.CONVERTED] and ring.next_copy() == slot and ring.next_copy() is None
    assert ring.copied(slot) == []
    again = ring.take(job)
    assert again == slot
    ring.converted(again)
    assert ring.next_copy() == again and ring.copied(again) == [Seal(job)] and ring.idle()


def test_an_end_waits_for_the_copy_that_is_under_way() -> None:
    ring = StagingRing(3)
    job = ring.begin(KEY, 3)
    slots = [ring.take(job) for _ in range(3)]
    for slot in slots[:2]:
        assert slot is not None
        ring.converted(slot)
    assert ring.next_copy() == slots[0]
    assert ring.end(KEY) == [] and ring.slots == [Slot.COPYING, Slot.FREE, Slot.CONVERTING]
    ring.converted(2)
    assert ring.copied(0) == [Done(KEY)] and ring.idle()
    assert ring.end(KEY) == [Done(KEY)], "a ticket of which nothing is here is done at once"


def test_a_conversion_that_fails_after_its_ticket_ended_says_nothing_again() -> None:
    ring = StagingRing(2)
    job = ring.begin(KEY, 2)
    copied, converting = ring.take(job), ring.take(job)
    assert copied is not None and converting is not None
    ring.converted(copied)
    assert ring.next_copy() == copied and ring.copy_failed(copied) == [Done(KEY)]
    assert ring.failed(converting) == [] and ring.idle()
