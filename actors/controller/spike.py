"""Does demand rise more than chance explains, and what does the present inflow need once things are steady. Pure.

Requests come at random times in random sizes, so a few long prompts in a row look like the beginning of a spike. What
tells one from the other is how unlikely chance is: over a window in which requests of `b` blocks came, the demand
(blocks of everybody placed or waiting, at their expected ends) moves by their sum less what others gave back, and by
chance alone with a standard deviation of at most about `sqrt(sum b^2)` for what came and likewise for what went. Only
growth beyond `CERTAINTY` such deviations counts as growth, so evidence of a few seconds is enough for a large spike,
and a small one has to last longer. Many requests in one moment (a batch was sent) are no spike: demand must have
grown both before the last second and in it. Nor is it one when demand comes back to where it was a while ago: within
`keep_ns` a spike shows a new high. A lower bound of the growth also bounds what is ordered too much.

A rate is extrapolated over the start-up of a replica, `ahead_ns`; so it is a mean over at least as long a time, of
which nothing came before the window. What the last minute brought is not expected twice within the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.controller.forecast import SECOND, Forecast
from actors.controller.journal import Tracked, TrackedDeque

CERTAINTY = 2.5  # standard deviations
RESERVE = 2.0  # standard deviations of a steady demand that are kept free when a pool shrinks
SHORTEST_NS = 2 * SECOND  # of the windows that are looked at
NEWEST_NS = SECOND  # the end of each window, which must show growth by itself


@dataclass(frozen=True, slots=True)
class _Moment:
    when_ns: int
    asked: float  # blocks of all requests that ever came
    squares: float
    demand: float


@dataclass(slots=True)
class Trend(Tracked):
    """The demand's recent course, kept for `keep_ns` and `ahead_ns`; growth is extrapolated `ahead_ns` far."""

    moments: TrackedDeque[_Moment] = field(default_factory=TrackedDeque)
    growth: float = 0.0  # blocks a second that the demand certainly grows by; 0 when chance explains it
    steady: float = 0.0  # blocks that the inflow of what is kept holds in the long run, with reserve

    def add(self, forecast: Forecast, demand: float, look_ns: int, keep_ns: int, ahead_ns: int, now_ns: int) -> None:
        now = _Moment(now_ns, forecast.asked_blocks, forecast.asked_squares, demand)
        self.moments.append(now)
        while self.moments[0].when_ns < now_ns - max(look_ns, keep_ns, ahead_ns):
            self.moments.popleft()
        since_ns = now_ns - max(look_ns, ahead_ns, SHORTEST_NS)
        recent = [then for then in self.moments if then.when_ns >= since_ns]
        before = [then for then in recent if then.when_ns <= now_ns - NEWEST_NS]
        self.growth = 0.0
        high = max((then.demand for then in self.moments if then.when_ns <= now_ns - look_ns // 2), default=0.0)
        if before and now.demand > high and now.demand > (late := before[-1]).demand:
            begins = (b for b in before if b.when_ns <= now_ns - SHORTEST_NS and b.demand < late.demand)
            self.growth = max((_certain_growth(begin, now, ahead_ns) for begin in begins), default=0.0)
        self.steady = self._steady(now, forecast.stay_ns)

    def _steady(self, now: _Moment, stay_ns: float) -> float:
        """Little's law over all moments kept, and the standard deviation of a compound Poisson sum over one stay."""
        first = self.moments[0]
        stays = max(SECOND, now.when_ns - first.when_ns) / stay_ns if stay_ns else math.inf
        held, squares = (now.asked - first.asked) / stays, (now.squares - first.squares) / stays
        return held + RESERVE * math.sqrt(max(0.0, squares))


def _certain_growth(then: _Moment, now: _Moment, at_least_ns: int) -> float:
    came, grown = now.asked - then.asked, now.demand - then.demand
    if came <= 0 or grown <= 0:
        return 0.0
    went = max(0.0, came - grown)
    variance = (now.squares - then.squares) * (1.0 + went / came)  # what went is taken to be spread as what came
    return max(0.0, grown - CERTAINTY * math.sqrt(variance)) * SECOND / max(at_least_ns, now.when_ns - then.when_ns)
