"""A spike differs from chance, from a batch, and from demand that comes back to where it was."""

from __future__ import annotations

import math
import random

from actors.controller.forecast import SECOND, Forecast
from actors.controller.spike import Trend

Times = tuple[int, int]
LOOK, KEEP, AHEAD, STEP = 10 * SECOND, 60 * SECOND, 30 * SECOND, SECOND // 2


class Pool:
    """Requests of `mean` blocks, exponential, come at a rate and stay `stay_s` each."""

    def __init__(self, seed: int = 1, stay_s: float = 8.0, mean: float = 600.0, times: Times = (KEEP, AHEAD)) -> None:
        self.times = times
        self.dice = random.Random(seed)
        self.forecast = Forecast(stay_ns=stay_s * SECOND)
        self.trend = Trend()
        self.stay_s, self.mean = stay_s, mean
        self.held: list[tuple[int, int]] = []
        self.now_ns = 0

    def come(self, blocks: int, stay_s: float | None = None) -> None:
        self.forecast.asked(blocks)
        self.held.append((self.now_ns + int((stay_s or self.stay_s) * SECOND), blocks))

    def look(self) -> float:
        self.held = [(end, blocks) for end, blocks in self.held if end > self.now_ns]
        self.trend.add(self.forecast, sum(blocks for _, blocks in self.held), LOOK, *self.times, self.now_ns)
        return self.trend.growth

    def run(self, seconds: float, rate: float, stay_s: float | None = None) -> list[float]:
        seen = []
        for _ in range(int(seconds * SECOND / STEP)):
            self.now_ns += STEP
            limit, chance = math.exp(-rate * STEP / SECOND), self.dice.random()
            while chance > limit:  # Poisson by multiplication
                self.come(1 + int(self.dice.expovariate(1 / self.mean)), stay_s)
                chance *= self.dice.random()
            seen.append(self.look())
        return seen


def test_a_flood_is_seen_within_seconds_and_chance_hardly_ever() -> None:
    alarms, waits = 0, []
    for seed in range(20):
        pool = Pool(seed)
        alarms += sum(growth > 0 for growth in pool.run(600, 0.25))
        flood = pool.run(20, 2.5, stay_s=60.0)
        waits.append(next((n for n, growth in enumerate(flood) if growth > 0), len(flood)) * STEP / SECOND)
    assert alarms < 0.005 * 20 * 1_200, "looks in quiet times that took chance for growth"
    assert sorted(waits)[len(waits) // 2] <= 7.0 and max(waits) < 20.0


def test_the_growth_is_a_lower_bound_in_the_mean() -> None:
    pool = Pool(3, mean=600)
    pool.run(120, 0.25)
    flood = [growth for growth in pool.run(30, 5.0, stay_s=600.0) if growth > 0]
    true = 5.0 * 600
    assert flood and 0.2 * true < sum(flood) / len(flood) < true


def test_a_batch_in_one_moment_is_no_flood() -> None:
    pool = Pool()
    pool.run(60, 0.0)
    for _ in range(40):
        pool.come(600, stay_s=100.0)
    assert not any(pool.run(30, 0.0))


def test_demand_that_returns_to_a_recent_high_is_no_flood() -> None:
    def steps(pool: Pool, high_before: bool) -> bool:
        for moment in range(60):
            pool.now_ns += STEP
            if high_before and moment == 20:
                pool.come(100_000, stay_s=5.0)
            if moment >= 45:
                pool.come(600, stay_s=100.0)
            pool.look()
        return pool.trend.growth > 0

    assert steps(Pool(), high_before=False)
    assert not steps(Pool(), high_before=True)


def test_what_the_inflow_holds_is_littles_law_and_a_reserve() -> None:
    pool = Pool(5, stay_s=10.0, mean=100.0)
    pool.run(200, 20.0)
    held = 20.0 * 10.0 * 100.0
    assert held < pool.trend.steady < 1.35 * held
    slow = Pool(5, stay_s=10.0, mean=100.0, times=(10 * SECOND, 150 * SECOND))
    slow.run(200, 20.0)
    assert held < slow.trend.steady < 1.35 * held, "replicas that start slowly lengthen the window and nothing else"
    quiet = Trend()
    quiet.add(Forecast(), 0.0, LOOK, KEEP, AHEAD, SECOND)
    assert (quiet.steady, quiet.growth) == (0.0, 0.0)
