"""Random schedules of a staging ring: a step, a device and copiers that take turns, and what must hold meanwhile.

The world is the ring's users without time: one step that converts into slots, in order, on a device that gets to it
later; copiers that start when the conversion has run on the device and take a while; tickets that end at any moment. A
schedule is a seed.

1. A copier reads, from beginning to end, what was converted for its part: no slot is used again before it was copied.
2. Copies begin in the order of conversions.
3. A seal says what is in staging, once, in the order of the ticket's jobs; none after the ticket's `Done`.
4. After `Done` no copier touches the ticket's staging. Each end of a ticket gives one `Done`.
5. At the end every job of a ticket that did not end is sealed, every slot is free, and nothing is remembered.
"""

from __future__ import annotations

import random
from collections import deque
from types import ModuleType
from typing import Any

Key = tuple[int, int]
Content = tuple[Key, int, int]  # ticket, its job, the part


class World:
    def __init__(self, module: ModuleType, seed: int) -> None:
        self.module, self.rng = module, random.Random(seed)
        rng = self.rng
        self.ring: Any = module.StagingRing(rng.randint(1, 4))
        self.copiers: list[tuple[int, Content] | None] = [None] * rng.randint(1, 3)
        self.steps = deque(self._plan())
        self.slot: int | None = None  # that the step converts into now
        self.part: tuple[Any, Content, int] | None = None  # job, next part, parts of the job
        self.memory: dict[int, Content] = {}
        self.device: deque[tuple[int, Content]] = deque()  # launched and not run
        self.order: deque[int] = deque()  # slots in the order of `converted`, not copied yet
        self.staging: set[Content] = set()
        self.parts_of: dict[tuple[Key, int], int] = {}
        self.sealed: dict[Key, list[int]] = {}
        self.ended: set[Key] = set()
        self.done: set[Key] = set()
        self.wrote_after_done: list[Content] = []

    def _plan(self) -> list[tuple[str, Key, int, int]]:
        """What the step does: jobs of several tickets in turn, and ends of some."""
        rng = self.rng
        keys = [(ticket, 1) for ticket in range(rng.randint(1, 4))]
        plan = [("job", key, number, rng.randint(1, 4)) for key in keys for number in range(rng.randint(1, 3))]
        rng.shuffle(plan)
        numbers: dict[Key, int] = {}
        for i, (what, key, _, parts) in enumerate(plan):
            plan[i] = (what, key, numbers.setdefault(key, 0), parts)
            numbers[key] += 1
        for key in keys:
            if rng.random() < 0.4:
                plan.insert(rng.randint(0, len(plan)), ("end", key, 0, 0))
        return plan

    # -- what may happen next

    def choices(self) -> list[Any]:
        found: list[Any] = []
        if self.part is not None or self.steps:
            found.append(self.step)
        if self.device:
            found.append(self.run_device)
        for i, copy in enumerate(self.copiers):
            if copy is not None:
                found.append(lambda i=i: self.end_copy(i))
            elif self.order and self._has_run(self.order[0]):
                found.append(lambda i=i: self.begin_copy(i))
        return found

    def _has_run(self, slot: int) -> bool:
        return all(slot != waiting for waiting, _ in self.device)

    def step(self) -> None:
        if self.part is None:
            what, key, number, parts = self.steps.popleft()
            if what == "end":
                self.end(key)
                return
            if key in self.ended and self.rng.random() < 0.8:
                return  # what has ended begins again only while a copy of it may be under way
            if key in self.done:
                return
            self.parts_of[key, number] = parts
            self.part = (self.ring.begin(key, parts, number), (key, number, 0), parts)
            return
        job, content, parts = self.part
        if self.slot is None:
            self.slot = self.ring.take(job)
            if self.slot is None and job.dead:
                self.part = None
            return
        slot, self.slot = self.slot, None
        if self.rng.random() < 0.03:
            self.ended.add(content[0])
            self._order_without(content[0])
            self.take_effects(self.ring.failed(slot))
            self.part = None
            return
        self.device.append((slot, content))
        if not job.dead:
            self.order.append(slot)
        self.ring.converted(slot)
        key, number, part = content
        self.part = (job, (key, number, part + 1), parts) if part + 1 < parts else None

    def run_device(self) -> None:
        slot, content = self.device.popleft()
        self.memory[slot] = content

    def begin_copy(self, i: int) -> None:
        slot = self.ring.next_copy()
        assert slot == self.order.popleft(), "copies do not begin in the order of conversions"
        self.copiers[i] = (slot, self.memory[slot])

    def end_copy(self, i: int) -> None:
        found = self.copiers[i]
        assert found is not None
        slot, content = found
        self.copiers[i] = None
        key = content[0]
        assert self.memory[slot] == content, f"slot {slot} was used again before it was copied"
        assert key not in self.done, f"ticket {key} is written after Done"
        if self.rng.random() < 0.03:
            self.ended.add(key)
            self._order_without(key)
            self.take_effects(self.ring.copy_failed(slot))
            return
        assert content not in self.staging, f"{content} is copied twice"
        self.staging.add(content)
        self.take_effects(self.ring.copied(slot))

    def end(self, key: Key) -> None:
        if key in self.ended:
            return
        self.ended.add(key)
        self._order_without(key)
        self.take_effects(self.ring.end(key))

    def _order_without(self, key: Key) -> None:
        """What has ended and is not being copied will not be."""
        copied = {copy[0] for copy in self.copiers if copy is not None}
        gone = {slot for slot, job in self.ring.part.items() if job.key == key and slot not in copied}
        self.order = deque(slot for slot in self.order if slot not in gone)

    def take_effects(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, self.module.Done):
                assert effect.key in self.ended and effect.key not in self.done, f"Done of {effect.key} is not due"
                self.done.add(effect.key)
                under_way = [copy for copy in self.copiers if copy is not None and copy[1][0] == effect.key]
                assert not under_way, f"Done of {effect.key} before {under_way} was copied"
                continue
            key, number = effect.job.key, effect.job.facts
            assert key not in self.ended, f"ticket {key} is sealed after it ended"
            missing = [part for part in range(self.parts_of[key, number]) if (key, number, part) not in self.staging]
            assert not missing, f"ticket {key} job {number} is sealed without parts {missing}"
            sealed = self.sealed.setdefault(key, [])
            assert number == len(sealed), f"ticket {key} job {number} is sealed after {sealed}"
            sealed.append(number)

    def finish(self) -> None:
        for key in {key for key, _ in self.parts_of} - self.ended:
            jobs = sorted(number for other, number in self.parts_of if other == key)
            assert self.sealed.get(key, []) == jobs, f"ticket {key}: {jobs} began, {self.sealed.get(key)} are sealed"
        assert self.done == self.ended, f"ended {self.ended}, done {self.done}"
        assert self.ring.idle() and all(slot == "free" for slot in self.ring.slots), f"left: {self.ring}"


def run(module: ModuleType, seed: int, moves_max: int = 2000) -> int:
    """One schedule to its end; the number of moves. Raises AssertionError for what must not be."""
    world = World(module, seed)
    for moves in range(moves_max):
        choices = world.choices()
        if not choices:
            world.finish()
            return moves
        world.rng.choice(choices)()
        assert not (found := world.ring.violations()), found
    raise AssertionError(f"seed {seed} has not ended after {moves_max} moves: {world.ring}")
