"""Ray Serve's own autoscaling on ongoing requests, step by step, for simulated clusters."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

REPLICAS_MAX = 8


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The public knobs of Ray Serve's `AutoscalingConfig`."""

    target_ongoing_requests: float
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0
    minimum: int = 1
    maximum: int = REPLICAS_MAX


class ServeScaler:
    """One deployment's target, from its ongoing requests (running and queued)."""

    def __init__(self, settings: ServeSettings, current: int) -> None:
        self.settings = settings
        self.target = current
        self._samples: deque[tuple[float, float]] = deque()
        self._wish = 0  # +1 up, -1 down
        self._since_s: float | None = None

    def step(self, now_s: float, ongoing: float, running: int) -> int:
        """`running`: replicas that are up."""
        settings = self.settings
        self._samples.append((now_s, ongoing))
        while self._samples[0][0] < now_s - settings.look_back_s:
            self._samples.popleft()
        mean = sum(value for _, value in self._samples) / len(self._samples)
        if running == 0:
            return self.target
        desired = math.ceil(mean / settings.target_ongoing_requests)
        return self.decide(now_s, min(max(desired, settings.minimum), settings.maximum))

    def decide(self, now_s: float, desired: int) -> int:
        """The delay logic: a wish must stand for its delay before it is granted."""
        wish = (desired > self.target) - (desired < self.target)
        if wish != self._wish:
            self._wish, self._since_s = wish, None
        if wish == 0:
            return self.target
        self._since_s = now_s if self._since_s is None else self._since_s
        delay_s = self.settings.upscale_delay_s if wish > 0 else self.settings.downscale_delay_s
        if now_s - self._since_s + 1e-6 >= delay_s:
            self._wish, self._since_s = 0, None
            self.target = desired if wish > 0 else max(1, desired)
        return self.target
