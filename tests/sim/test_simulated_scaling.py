"""Scaling in simulated time: the model of Serve's scaler against the original, and both policies on the same trace."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import Role
from cluster.plan.published import CONTEXT_SHARE
from ops.bench.scaling import autoscale, plots, published, scale
from ops.bench.scaling.autoscale import flaps, judge, long_bursts, play
from ops.bench.scaling.serve_scaler import ServeScaler, ServeSettings
from ops.simulate.checkers import check
from ops.simulate.cluster import ClusterSim
from ops.simulate.faults import FaultKind
from ops.simulate.scenario import random_scenario
from ops.simulate.traces import Lengths, TraceError, bursts, poisson, replay
from ops.simulate.world import SECOND


@pytest.mark.parametrize("seed", range(5))
def test_the_model_of_serves_scaler_decides_as_the_original(seed: int) -> None:
    policy = pytest.importorskip("ray.serve.autoscaling_policy")
    dice = random.Random(seed)
    settings = ServeSettings(8.0, upscale_delay_s=5.0, downscale_delay_s=20.0, minimum=1, maximum=10)
    ours, target = ServeScaler(settings, 2), 2
    state: dict[str, Any] = {}
    config = SimpleNamespace(
        upscale_delay_s=5.0, downscale_delay_s=20.0, downscale_to_zero_delay_s=None, get_upscaling_factor=lambda: 1.0
    )
    config.get_downscaling_factor = config.get_upscaling_factor
    now_s, load, changes = 0.0, 16.0, 0
    for _ in range(1_500):
        now_s += dice.choice((0.1, 0.5, 2.0))
        load = max(1.0, load + dice.gauss(0, 6)) if dice.random() < 0.2 else load
        wish = policy._apply_scaling_factors(load / settings.target_ongoing_requests, target, config)
        wish = min(max(wish, settings.minimum), settings.maximum)
        target, state = policy._apply_delay_logic(wish, target, config, state, _now=now_s)
        before = ours.target
        assert ours.decide(now_s, wish) == target
        changes += ours.target != before
    assert changes > 10


def test_a_target_that_turns_round_too_soon_is_a_flap() -> None:
    assert flaps([(0, 1), (10, 3), (500, 1), (900, 2)]) == 0
    assert flaps([(0, 3), (100, 1), (200, 3)]) == 1
    assert flaps([(0, 1), (10, 3), (40, 1)]) == 1, "given up before it was up"


@pytest.mark.soak
def test_occupancy_scaling_beats_ongoing_requests_on_a_flood_of_long_contexts() -> None:
    arrivals = [arrival for arrival in long_bursts(1_250.0, 3) if arrival.at_ns >= 700 * SECOND]
    arrivals = [replace(arrival, at_ns=arrival.at_ns - 700 * SECOND) for arrival in arrivals]
    ours = judge(play(arrivals, None), "occupancy", "long")
    plain = judge(play(arrivals, ServeSettings(9.0)), "ongoing", "long")
    quick = judge(play(arrivals, ServeSettings(9.0, 2.0, 20.0, 10.0)), "ongoing, quick", "long")
    assert ours.slo > plain.slo and ours.gpu_hours < plain.gpu_hours
    assert ours.slo >= quick.slo - 0.01 and ours.flaps <= quick.flaps
    assert ours.busy == 0 and ours.flaps == 0


def test_a_pool_wakes_from_zero_and_sleeps_again() -> None:
    base = random_scenario(1, ())
    spec: dict[str, Any] = json.loads(json.dumps(base.spec))
    spec["pools"]["decode"] = {"replicas": 1, "min_replicas": 0, "max_replicas": 3}
    spec["scaling"] = {"mode": "occupancy", "down_hold_s": 5.0, "up_hold_s": 1.0, "look_back_s": 2.0, "warm_up_s": 1.0}
    early, late = replace(base.arrivals[0], at_ns=0), replace(base.arrivals[0], at_ns=40 * SECOND)
    with closing(ClusterSim(replace(base, arrivals=(early, late), spec=spec), sample_ns=SECOND)) as cluster:
        assert check(cluster.run()).clean
    assert [record.outcome for record in cluster.records] == ["done", "done"]
    decode = [(sample.at_s, sample.decode_replicas) for sample in cluster.findings.samples]
    assert (1.0, 1) in decode and any(count == 0 for at_s, count in decode if 20 < at_s < 40)
    reasons = [text for _, text in cluster.controller.log if text.startswith("scale decode")]
    assert "idle for 5 s" in reasons[0] and "woken by a request" in reasons[1]
    assert cluster.platform.targets[Role.DECODE] == 0


def test_a_pool_that_shrinks_gives_up_orders_before_replicas() -> None:
    base = random_scenario(1, ())
    shape = replace(base.shape, start_s=10.0)
    spec: dict[str, Any] = json.loads(json.dumps(base.spec))
    spec["pools"]["decode"] = {"replicas": 1, "min_replicas": 1, "max_replicas": 3}
    spec["scaling"] = {"mode": "off"}
    cluster = ClusterSim(replace(base, spec=spec, shape=shape, settle_s=20.0), sample_ns=SECOND)
    targets = cluster.platform.targets
    cluster.world.at(2 * SECOND, targets.__setitem__, Role.DECODE, 3)
    cluster.world.at(4 * SECOND, targets.__setitem__, Role.DECODE, 2)
    cluster.world.at(6 * SECOND, targets.__setitem__, Role.DECODE, 1)
    with closing(cluster):
        assert check(cluster.run()).clean
    found = cluster
    assert {sample.decode_replicas for sample in found.findings.samples} == {1}
    assert found.platform.coming[Role.DECODE] == []


def test_the_published_pools_admit_what_was_published_and_no_more() -> None:
    bf16, fp8 = published.measure("bf16", 40), published.measure("fp8", 80)
    assert (bf16.admitted, bf16.queued) == (32, 8), "the 33rd request waits"
    assert (fp8.admitted, fp8.queued) == (64, 16)
    gain = fp8.tokens_per_s / bf16.tokens_per_s - 1
    assert gain == pytest.approx(published.PUBLISHED_GAIN, rel=0.1)
    for point in (bf16, fp8):
        assert point.published is not None and point.tokens_per_s == pytest.approx(point.published, rel=0.01)
    assert "| fp8 | 80 | 64 | 16 |" in published.table([bf16, fp8], {CONTEXT_SHARE: gain})


def test_the_stored_curve_is_the_page() -> None:
    results = Path(__file__).parents[2] / "ops" / "results"
    raw = json.loads((results / "simulate" / "published-curve.json").read_text())
    points = [published.Point(**point) for point in raw["points"]]
    held = {float(share): gain for share, gain in raw["gain_by_held"].items()}
    assert published.table(points, held) in (results / "simulate.md").read_text()


@pytest.mark.soak
def test_the_published_gain_grows_with_what_requests_hold() -> None:
    assert published.PUBLISHED_GAIN < published.gain(0.4) < published.gain(0.69) < 0.6


def test_a_large_cluster_is_driven_and_audited() -> None:
    record = scale.measure_all([8], seconds=8.0)
    room, full = record["runs"]
    assert room["audit_clean"] and full["audit_clean"], (room["breaches"], full["breaches"])
    counts = {row["kind"]: row["count"] for row in room["steps"]}
    assert counts["AdmitRequest"] > 40 and counts["TransferReport"] > 60 and counts["Ended"] > 0
    assert room["waiting"] == 0 < full["waiting"] and room["busy_answers"] == 0
    assert 1_000 < record["bytes_a_ticket"] < 20_000
    assert scale.table(record).count("| AdmitRequest |") == 2


def test_traces_have_the_rates_and_lengths_asked_for(tmp_path: Path) -> None:
    lengths = Lengths(prompt_median=500, output_median=50, prompt_max=4_000, output_max=200)
    steady = poisson(random.Random(1), 20.0, 200.0, lengths)
    assert 3_600 < len(steady) < 4_400
    prompts = sorted(arrival.prompt_tokens for arrival in steady)
    assert 430 < prompts[len(prompts) // 2] < 580 and prompts[-1] <= 4_000
    assert all(len(arrival.prefix_hashes) == arrival.prompt_tokens // 32 for arrival in steady)
    assert len({arrival.prefix_hashes[0] for arrival in steady if arrival.prefix_hashes}) < len(steady) / 2
    burst = bursts(random.Random(1), 1.0, 50.0, 20.0, 5.0, 100.0, lengths)
    inside = sum(arrival.at_ns % (20 * SECOND) >= 15 * SECOND for arrival in burst)
    assert inside > 10 * (len(burst) - inside)

    rows = [
        {"at_s": 0.5, "prompt_tokens": 9, "output_tokens": 3},
        {"at_s": 0.1, "prompt_tokens": 8, "output_tokens": 2},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert [arrival.prompt_tokens for arrival in replay(file)] == [8, 9]
    file.write_text('{"at_s": 0.5, "prompt_tokens": 9}')
    with pytest.raises(TraceError, match="line 1"):
        replay(file)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scenario = random_scenario(2, (FaultKind.CRASH_DECODE,))
    with closing(ClusterSim(scenario, sample_ns=SECOND // 4)) as cluster:
        cluster.run()
    curve = [published.Point("bf16", 1, 1, 0, 130.0, 137.0), published.Point("fp8", 1, 1, 0, 130.0, None)]
    steps = [{"kind": "Tick", "p50": 1.0, "p99": 2.0}]
    for path in (
        plots.plot_run(cluster, tmp_path / "run.png"),
        plots.plot_scaling({"a: occupancy": cluster, "a: ongoing": cluster}, tmp_path / "scaling.png"),
        plots.plot_curve(curve, tmp_path / "curve.png"),
        plots.plot_decisions([{"load": "room", "replicas": 9, "steps": steps}], tmp_path / "decisions.png"),
        plots.plot_front(autoscale.summaries([outcome("occupancy", 1, 0.9, 20.0, 1)]), tmp_path / "front.png"),
    ):
        assert path.read_bytes()[:4] == b"\x89PNG"


def outcome(policy: str, seed: int, slo: float, gpu_hours: float, flaps: int) -> autoscale.Outcome:
    return autoscale.Outcome(policy, "long bursts", seed, 100, slo, gpu_hours, flaps, 0, 1.0, 2.0, 1, 3)


def test_the_comparison_is_a_table_that_says_who_is_beaten() -> None:
    runs = [outcome("occupancy", seed, 0.9 + seed / 100, 20.0, 0) for seed in (1, 2, 3)]
    runs += [outcome("Serve 2", seed, 0.8, 30.0, 4) for seed in (1, 2, 3)]
    runs += [outcome("Serve 6", seed, 0.8, 30.0, 0) for seed in (1, 2, 3)]
    runs += [outcome("Serve 1", seed, 1.0, 60.0, 0) for seed in (1, 2, 3)]
    ours, *serve = found = autoscale.summaries(runs)
    assert ours.slo.value == pytest.approx(0.92) and ours.slo.half == pytest.approx(4.3027 * 0.01 / 3**0.5)
    assert [ours.beats(other) for other in serve] == ["all three", "nowhere worse", ""]
    assert not serve[0].beats(ours)
    text = autoscale.table(found)
    assert "92.0% ± 2.5" in text and text.count("none of ours") == 1


def test_runs_that_are_recorded_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def quick(arrivals: Any, serve: ServeSettings | None, minimum: int = 1) -> ClusterSim:
        played.append(serve)
        with closing(ClusterSim(random_scenario(2, ()), sample_ns=SECOND)) as cluster:
            return cluster.run()

    monkeypatch.setattr(autoscale, "play", quick)
    monkeypatch.setattr(autoscale, "policies", lambda trace: [autoscale.Policy("occupancy")])
    first = autoscale.compare(1, 60.0, tmp_path / "runs.jsonl")
    again = autoscale.compare(2, 60.0, tmp_path / "runs.jsonl")
    assert len(first) == 2 and len(played) == 4 and again[:2] == first
