"""How far a run is: a bar with rate and time left on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_NS = 10 * 10**9


class ProgressBar:
    """Counts bytes of a known total. Writes to stderr. A context manager."""

    def __init__(self, total_bytes: int) -> None:
        console = Console(stderr=True)
        self._total, self._done = total_bytes, 0
        self._first: int | None = None
        self._started_ns = self._said_ns = time.monotonic_ns()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TaskProgressColumn(),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("compress", total=total_bytes)

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """The first call tells what an earlier run had done (0 if nothing), which does not count as speed."""
        if self._first is None:
            self._first = nbytes
        self._done += nbytes
        if self._bar:
            self._bar.update(self._task, completed=self._done)
            return
        now = time.monotonic_ns()
        if now - self._said_ns >= LINE_EVERY_NS:
            self._said_ns = now
            print(self.line(now - self._started_ns), file=sys.stderr, flush=True)

    def line(self, elapsed_ns: int) -> str:
        rate = (self._done - (self._first or 0)) / max(elapsed_ns / 1e9, 1e-9)
        left = f"{(self._total - self._done) / rate:.0f} s left" if rate else "time left not known yet"
        return (
            f"{self._done / self._total:6.1%}  {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB  "
            f"{rate / 1e6:.0f} MB/s  {left}"
        )
