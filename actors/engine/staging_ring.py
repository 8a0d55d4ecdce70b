"""Which slot of a device ring holds what, and when it may be used again. Pure.

Pages are converted into a slot by the step that computed them and copied from there to staging by copiers, so that a
step waits for a copy only while every slot is taken. A *job* is what one seal covers, in parts of one slot each. Jobs
of a ticket are sealed in the order they began, each when all its parts are in staging. When a ticket's writing ends,
what is not being copied is dropped, and `Done` comes when nothing is: then its staging may be lent to another ticket.

| slot | until |
|---|---|
| free | `take` |
| converting | `converted`, or `failed` |
| converted | `next_copy`, in the order of `converted`; free at once when the ticket has ended |
| copying | `copied`, or `copy_failed`, which ends the ticket |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Key = tuple[int, int]
"""Ticket and attempt."""


class Slot(StrEnum):
    FREE = "free"
    CONVERTING = "converting"
    CONVERTED = "converted"
    COPYING = "copying"


@dataclass(frozen=True)
class Seal:
    """Every part of the job is in staging."""

    job: Job


@dataclass(frozen=True)
class Done:
    """No copier touches the ticket's staging any more."""

    key: Key


Effect = Seal | Done


@dataclass(eq=False)
class Job:
    """`left`: parts that are not in staging. `dead`: its ticket has ended, no seal comes. `facts`: the caller's."""

    key: Key
    left: int
    facts: Any = None
    dead: bool = False


@dataclass
class StagingRing:
    """`num_slots` of them. Each slot's present part belongs to `part[slot]`."""

    num_slots: int
    waits: int = 0  # times that a step found every slot taken
    slots: list[Slot] = field(default_factory=list)
    part: dict[int, Job] = field(default_factory=dict)
    _free: deque[int] = field(default_factory=deque)
    _converted: deque[int] = field(default_factory=deque)
    _jobs: dict[Key, deque[Job]] = field(default_factory=dict)  # not sealed yet, oldest first
    _ending: set[Key] = field(default_factory=set)  # copies of these are under way, and nothing more will be

    def __post_init__(self) -> None:
        self.slots = [Slot.FREE] * self.num_slots
        self._free = deque(range(self.num_slots))

    def begin(self, key: Key, parts: int, facts: Any = None) -> Job:
        job = Job(key, parts, facts, dead=key in self._ending)
        if not job.dead:
            self._jobs.setdefault(key, deque()).append(job)
        return job

    def take(self, job: Job) -> int | None:
        """A slot for the job's next part; None: all are taken, ask again when one was copied, or the job is dead."""
        if job.dead:
            return None
        if not self._free:
            self.waits += 1
            return None
        slot = self._free.popleft()
        self.slots[slot] = Slot.CONVERTING
        self.part[slot] = job
        return slot

    def converted(self, slot: int) -> None:
        if self.part[slot].dead:
            self._release(slot)
            return
        self.slots[slot] = Slot.CONVERTED
        self._converted.append(slot)

    def failed(self, slot: int) -> list[Effect]:
        """The conversion: the ticket ends, unless it has ended already."""
        job = self.part[slot]
        self._release(slot)
        return [] if job.dead else self.end(job.key)

    def next_copy(self) -> int | None:
        """The slot to copy now; the caller copies it once its conversion has ended on the device."""
        if not self._converted:
            return None
        slot = self._converted.popleft()
        self.slots[slot] = Slot.COPYING
        return slot

    def copied(self, slot: int) -> list[Effect]:
        job = self.part[slot]
        self._release(slot)
        job.left -= 1
        return self._settle(job.key)

    def copy_failed(self, slot: int) -> list[Effect]:
        key = self.part[slot].key
        self._release(slot)
        return self.end(key)

    def end(self, key: Key) -> list[Effect]:
        """Nothing more is written for the ticket: it has failed, or was given up."""
        for job in self._jobs.pop(key, ()):
            job.dead = True
        for slot in [slot for slot in self._converted if self.part[slot].key == key]:
            self._converted.remove(slot)
            self._release(slot)
        self._ending.add(key)
        return self._settle(key)

    def _settle(self, key: Key) -> list[Effect]:
        effects: list[Effect] = []
        if (jobs := self._jobs.get(key)) is not None:
            while jobs and jobs[0].left == 0:
                effects.append(Seal(jobs.popleft()))
            if not jobs:
                del self._jobs[key]
        if key in self._ending and not self._is_copied(key):
            self._ending.remove(key)
            effects.append(Done(key))
        return effects

    def _is_copied(self, key: Key) -> bool:
        return any(job.key == key and self.slots[slot] is Slot.COPYING for slot, job in self.part.items())

    def _release(self, slot: int) -> None:
        del self.part[slot]
        self.slots[slot] = Slot.FREE
        self._free.append(slot)

    def violations(self) -> list[str]:
        """Laws that hold after every event."""
        found = []
        free = [slot for slot, state in enumerate(self.slots) if state is Slot.FREE]
        if sorted(self._free) != free or set(self.part) & set(free) or len(self.part) + len(free) != self.num_slots:
            found.append(f"slots {self.slots}, free {list(self._free)}, with parts {sorted(self.part)}")
        if sorted(self._converted) != [s for s, state in enumerate(self.slots) if state is Slot.CONVERTED]:
            found.append(f"slots {self.slots}, to copy {list(self._converted)}")
        for key, jobs in self._jobs.items():
            held = [sum(part is job for part in self.part.values()) for job in jobs]
            left = [job.left for job in jobs]
            if not jobs or key in self._ending or not left[0] or any(h > n for h, n in zip(held, left)):
                found.append(f"ticket {key}: parts left of its jobs {left}, in slots {held}")
        return found

    def idle(self) -> bool:
        """Nothing is in a slot, and nothing waits for a seal or an end."""
        return not (self.part or self._jobs or self._ending)
