"""Whether an engine lives and whether it gets on: proofs of life of its processes, and what follows from them.

A thread of each engine process (EngineCore and every worker) writes the time into a file that the replica reads, so a
step may take as long as it needs: it is not taken for a death. `EngineWatch` is pure; `LifeFile` is the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

BEAT_EVERY_S = 0.5
SLOT = struct.Struct("<q")  # CLOCK_MONOTONIC in ns, the same for all processes of a machine; 0: never written
HUNG_STEPS = 20  # an engine has hung after this many times its longest step ...
HUNG_LEAST_SHARE = 0.2  # ... but not before this share of the configured time
CORE = 0  # EngineCore's place in the file; worker r has place r + 1


class LifeFile:
    """The replica's side: memory that the engine's processes open by `path` until `close`; no file is left of it."""

    def __init__(self, num_processes: int) -> None:
        self._descriptor = os.memfd_create("pageferry-life")
        os.ftruncate(self._descriptor, num_processes * SLOT.size)
        self._map = mmap.mmap(self._descriptor, num_processes * SLOT.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def oldest_ns(self) -> int:
        """When the process that was silent for longest last wrote; 0 until every one of them has written."""
        return min(int(value) for (value,) in SLOT.iter_unpack(self._map[:]))

    def close(self) -> None:
        """It cannot be opened from now on; a process that has it open keeps it."""
        os.close(self._descriptor)


def beat(path: str, place: int) -> None:
    """In an engine process: a thread writes the time at `place` of the file for as long as the process runs."""
    if not path:
        return
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)

    def write() -> None:
        while True:
            SLOT.pack_into(memory, place * SLOT.size, time.monotonic_ns())
            time.sleep(BEAT_EVERY_S)

    threading.Thread(target=write, name="pageferry-life", daemon=True).start()


@dataclass(frozen=True, slots=True)
class Progress:
    """What an answer of the engine's scheduler said. `asked_ns`: when it was asked."""

    asked_ns: int
    steps: int
    running: int


class EngineWatch:
    """Times are CLOCK_MONOTONIC in ns. `silent_ns`: a process without a sign of life has ended or is stopped;
    `hung_ns`: an engine that has requests and ends no step for this long has hung, sooner where its steps are short."""

    def __init__(self, silent_ns: int, hung_ns: int) -> None:
        self._silent_ns = silent_ns
        self._hung_ns = hung_ns
        self._steps = -1
        self._moved_ns = 0  # when the step count last changed, or nothing ran
        self.longest_ns = 0  # the longest that the engine took to answer, which it does between steps

    @property
    def limit_ns(self) -> int:
        """How long an engine may stand still now."""
        least = int(HUNG_LEAST_SHARE * self._hung_ns)
        return min(self._hung_ns, max(least, HUNG_STEPS * self.longest_ns))

    def answered(self, progress: Progress, now_ns: int) -> None:
        self.longest_ns = max(self.longest_ns, now_ns - progress.asked_ns)
        if progress.steps != self._steps or not progress.running:
            self._steps, self._moved_ns = progress.steps, now_ns

    def verdict(self, unanswered_since_ns: int, alive_ns: int, now_ns: int) -> str:
        """Why the engine must be replaced; "" while it is sound.

        unanswered_since_ns: when the question was asked that has no answer yet; 0: none. alive_ns: the oldest sign of
        life among its processes; 0: unknown.
        """
        if alive_ns and now_ns - alive_ns > self._silent_ns:
            return f"a process of the engine has shown no life for {(now_ns - alive_ns) / 1e9:.1f} s"
        stood = now_ns - (unanswered_since_ns or self._moved_ns or now_ns)
        if stood > self.limit_ns:
            how = "has not answered" if unanswered_since_ns else "runs requests and has made no step"
            return (
                f"the engine has hung: it {how} for {stood / 1e9:.1f} s; its longest step took "
                f"{self.longest_ns / 1e9:.2f} s"
            )
        return ""
