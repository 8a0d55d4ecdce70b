"""The share of a step that checking takes: what is divided by what, and that one engine's spec has no prefill pool."""

from __future__ import annotations

import pytest

from ops.bench.integrity_cost.cli import text
from ops.bench.integrity_cost.share import Burst, spec_for, table


def test_shares_are_of_the_same_burst() -> None:
    bursts = [Burst(4, 2.0, 40, 2_000_000, 4_000_000), Burst(4, 4.0, 40, 4_000_000, 8_000_000), Burst(1, 1.0, 9, 9, 9)]
    one, four = table(bursts)
    assert (one["concurrency"], one["bursts"], four["concurrency"], four["bursts"]) == (1, 1, 4, 2)
    assert four["step_ms"] == pytest.approx(75.0)
    assert four["check"]["percent"] == pytest.approx(0.1) and four["check"]["us_a_step"] == pytest.approx(75.0)
    assert four["tracker"]["percent"] == pytest.approx(0.2)
    assert "0.100 % [0.100, 0.100]" in text([four])


def test_the_measured_engine_is_decode_alone_with_the_check() -> None:
    spec = spec_for("model")
    assert spec.pools.prefill.replicas == 0 and spec.integrity.mode == "check"
