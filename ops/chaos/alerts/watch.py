"""What fires when: asks Prometheus twice a second and keeps each change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ops.prometheus.local import Prometheus

LOOK_EVERY_S = 0.5


class Watch(threading.Thread):
    """`changes`: (seconds since the start, alert, fires)."""

    def __init__(self, prometheus: Prometheus, say: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._prometheus = prometheus
        self._say = say
        self._over = threading.Event()
        self.began = time.monotonic()
        self.changes: list[tuple[float, str, bool]] = []
        self.firing: set[str] = set()

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            found = self._prometheus.firing()
            for alert in sorted(found ^ self.firing):
                self.changes.append((round(self.now, 1), alert, alert in found))
                self._say(f"{self.now:6.1f} s  {alert} {'fires' if alert in found else 'is clear'}")
            self.firing = found

    def stop(self) -> None:
        self._over.set()
        self.join()

    def wait(self, until: Callable[[set[str]], bool], seconds: float) -> bool:
        end = self.now + seconds
        while not until(self.firing):
            if self.now > end:
                return False
            time.sleep(0.2)
        return True

    def after(self, alert: str, since: float, fires: bool) -> float | None:
        """Seconds from `since` to the first such change at or after it."""
        return next(
            (round(at - since, 1) for at, name, how in self.changes if (name, how) == (alert, fires) and at >= since),
            None,
        )

    def all_fired(self, alerts: Iterable[str], since: float) -> bool:
        return all(self.after(alert, since, True) is not None for alert in alerts)

    def clear_after(self, alert: str, fired: float, ended: float) -> float | None:
        """Seconds from `ended` until it was clear; 0 when it was before, None when it never was after it `fired`."""
        clears = [at for at, name, fires in self.changes if name == alert and not fires and at >= fired]
        late = next((at for at in clears if at >= ended), None)
        return round(late - ended, 1) if late is not None else 0.0 if clears else None
