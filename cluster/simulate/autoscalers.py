"""Occupancy scaling against Ray Serve's own autoscaling on ongoing requests: same cluster, same traces.

Both runs have the same controller, admission and engines; only who sets decode's replica count differs. `ServeScaler`
follows `ray.serve.autoscaling_policy` (2.60): mean of ongoing requests over the look-back, divided by the target per
replica, scaling factors of one, time-based delays that restart when the wish turns round; a test compares it with the
original step by step. Its target is swept, so that it is not beaten for want of tuning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.nouns import Role
from cluster.planner import Roofline
from cluster.planning.published import published_pool
from cluster.simulate.cluster import ClusterSim
from cluster.simulate.costs import RooflineCosts
from cluster.simulate.scenario import SPEC, Scenario, Shape
from cluster.simulate.traces import Arrival, Lengths, bursts
from cluster.simulate.world import SECOND

GPUS = 8  # a replica
START_S = 60.0
REPLICAS_MAX = 8
BLOCKS = 12_500  # of 32 tokens: 400,000 tokens a replica
TTFT_SLO_S = 15.0
TPOT_SLO_S = 0.060
FLAP_S = 300.0


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace."""

    policy: str
    trace: str
    requests: int
    slo: float  # share of requests with TTFT and TPOT within bounds; refused ones count as missed
    gpu_hours: float
    flaps: int
    busy: int
    ttft_p95_s: float
    reaction_s: float  # from a burst's begin to the first larger target, mean
    overshoot: int  # most replicas beyond what the occupancy of the moment needed
    peak_replicas: int


def spec_for(mode: str) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    spec["pools"]["prefill"] = {"replicas": 8, "min_replicas": 8, "max_replicas": 8}
    spec["pools"]["decode"] = {"replicas": 1, "min_replicas": 1, "max_replicas": REPLICAS_MAX}
    spec["admission"] = {"queue_max": 512, "queue_wait_s": 60.0}
    spec["transfer"] = {"lease_s": 120.0, "hand_over_s": 60.0}
    spec["scaling"] = {
        "mode": mode,
        "warm_up_s": START_S,
        "look_back_s": 10.0,
        "up_hold_s": 2.0,
        "down_hold_s": 20.0,
        "step_down_max": 4,
    }
    return spec


def long_bursts(seconds: float = 3_600.0, seed: int = 1) -> list[Arrival]:
    """Long contexts: a trickle, and five minutes of every twenty a flood."""
    lengths = Lengths(prompt_median=16_000, prompt_sigma=0.7, output_median=900, output_sigma=0.6, prompt_max=100_000)
    return bursts(random.Random(seed), 0.25, 2.5, 1_200.0, 300.0, seconds, lengths)


def mixed_bursts(seconds: float = 3_600.0, seed: int = 2) -> list[Arrival]:
    """Every other flood is short chat, with as many requests and a tenth of the context."""
    chat = Lengths(prompt_median=1_000, prompt_sigma=0.7, output_median=400, output_sigma=0.6)
    arrivals = []
    for arrival, other in zip(
        long_bursts(seconds, seed), bursts(random.Random(seed), 0.25, 2.5, 1_200.0, 300.0, seconds, chat), strict=False
    ):
        odd = int(arrival.at_ns // (1_200 * SECOND)) % 2
        arrivals.append(replace(other, at_ns=arrival.at_ns) if odd else arrival)
    return arrivals


def costs() -> RooflineCosts:
    plan = published_pool("kimi-k2.6", "int4", "fp8")
    return RooflineCosts(Roofline.of(plan.arch, plan.settings), 0.6)


def play(arrivals: list[Arrival], serve: ServeSettings | None) -> ClusterSim:
    """One run; `serve` None: the controller scales."""
    scenario = Scenario(
        seed=1,
        arrivals=tuple(arrivals),
        spec=spec_for("off" if serve else "occupancy"),
        shape=Shape(
            nodes=2,
            frontends=2,
            decode_blocks=BLOCKS,
            prefill_blocks=BLOCKS,
            max_seqs=256,
            staging_bytes=1 << 28,
            start_s=START_S,
        ),
        limit_s=900.0,
        settle_s=5.0,
    )
    line = costs()
    cluster = ClusterSim(scenario, {Role.PREFILL: line, Role.DECODE: line}, quantum=16, sample_ns=SECOND)
    if serve is not None:
        scaler = ServeScaler(serve, 1)

        def look() -> None:
            ongoing = sum(len(frontend.stories) for frontend in cluster.frontends)
            up = len(cluster.pool(Role.DECODE))
            cluster.platform.targets[Role.DECODE] = scaler.step(cluster.world.now_ns / SECOND, ongoing, up)
            cluster.world.at(SECOND // 2, look)

        cluster.world.at(SECOND, look)
    return cluster.run()


def judge(cluster: ClusterSim, policy: str, trace: str) -> Outcome:
    good, ttfts = 0, []
    for record in cluster.records:
        if record.outcome != "done":
            continue
        ttft = (record.first_token_ns - record.arrival_ns) / SECOND
        tpot = (record.end_ns - record.first_token_ns) / SECOND / max(1, record.output_tokens - 1)
        ttfts.append(ttft)
        good += ttft <= TTFT_SLO_S and tpot <= TPOT_SLO_S
    ttfts.sort()
    targets = [(sample.at_s, sample.decode_target) for sample in cluster.findings.samples]
    return Outcome(
        policy=policy,
        trace=trace,
        requests=len(cluster.records),
        slo=good / len(cluster.records),
        gpu_hours=cluster.platform.replica_ns[Role.DECODE] * GPUS / SECOND / 3_600,
        flaps=flaps(targets),
        busy=sum(record.outcome == "busy" for record in cluster.records),
        ttft_p95_s=ttfts[int(0.95 * len(ttfts))],
        reaction_s=reaction(targets),
        overshoot=max(
            sample.decode_replicas - max(1, math.ceil(sample.occupancy * sample.decode_replicas / 0.5))
            for sample in cluster.findings.samples
        ),
        peak_replicas=max(sample.decode_replicas for sample in cluster.findings.samples),
    )


def flaps(targets: list[tuple[float, int]]) -> int:
    """Moves that were for nothing: replicas given up and asked for again within `FLAP_S`, or asked for and given up
    again before they were up."""
    moves = [(at_s, now > before) for (_, before), (at_s, now) in itertools.pairwise(targets) if now != before]
    return sum(
        (not up and up_next and later - at_s < FLAP_S) or (up and not up_next and later - at_s < START_S)
        for (at_s, up), (later, up_next) in itertools.pairwise(moves)
    )


def reaction(targets: list[tuple[float, int]], every_s: float = 1_200.0, burst_s: float = 300.0) -> float:
    """Mean seconds from the begin of a burst to the first larger target in it; a burst without one counts whole."""
    waits = []
    last_s = targets[-1][0]
    begin_s = every_s - burst_s + 1.5
    while begin_s + burst_s <= last_s:
        inside = [(at_s, target) for at_s, target in targets if begin_s <= at_s < begin_s + burst_s]
        grown = [at_s for at_s, target in inside if target > inside[0][1]]
        waits.append(grown[0] - begin_s if grown else burst_s)
        begin_s += every_s
    return sum(waits) / len(waits) if waits else 0.0


def policies() -> dict[str, ServeSettings | None]:
    found: dict[str, ServeSettings | None] = {"occupancy": None}
    for target in (6.0, 9.0, 12.0, 18.0, 30.0):
        found[f"ongoing {target:g}, default delays"] = ServeSettings(target)
    for target in (6.0, 9.0, 12.0, 18.0, 30.0):
        found[f"ongoing {target:g}, quick delays"] = ServeSettings(target, 2.0, 20.0, 10.0)
    return found


def compare(seconds: float = 3_600.0, repeats: int = 3) -> tuple[list[Outcome], dict[str, ClusterSim]]:
    """Every policy on every trace, `repeats` times with other arrivals; and the first runs of some, for a picture."""
    outcomes, clusters = [], {}
    for trace, make in (("long bursts", long_bursts), ("mixed bursts", mixed_bursts)):
        for name, settings in policies().items():
            runs = []
            for seed in range(1, repeats + 1):
                cluster = play(make(seconds, seed), settings)
                runs.append(judge(cluster, name, trace))
                if seed == 1 and name in ("occupancy", "ongoing 9, default delays", "ongoing 9, quick delays"):
                    clusters[f"{trace}: {name}"] = cluster
            outcomes.append(together(runs))
    return outcomes, clusters


def together(runs: list[Outcome]) -> Outcome:
    """Sums of counts, means of shares and times, the worst of extremes."""
    requests = sum(run.requests for run in runs)
    return Outcome(
        policy=runs[0].policy,
        trace=runs[0].trace,
        requests=requests,
        slo=sum(run.slo * run.requests for run in runs) / requests,
        gpu_hours=sum(run.gpu_hours for run in runs),
        flaps=sum(run.flaps for run in runs),
        busy=sum(run.busy for run in runs),
        ttft_p95_s=sum(run.ttft_p95_s for run in runs) / len(runs),
        reaction_s=sum(run.reaction_s for run in runs) / len(runs),
        overshoot=max(run.overshoot for run in runs),
        peak_replicas=max(run.peak_replicas for run in runs),
    )


def table(outcomes: list[Outcome]) -> str:
    head = "| trace | policy | SLO met | GPU-hours | flaps | refused | TTFT p95 s | reaction s | overshoot | peak |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {o.trace} | {o.policy} | {o.slo:.1%} | {o.gpu_hours:.1f} | {o.flaps} | {o.busy} | {o.ttft_p95_s:.1f} | "
        f"{o.reaction_s:.0f} | {o.overshoot} | {o.peak_replicas} |"
        for o in outcomes
    ]
    slo = f"SLO: first token within {TTFT_SLO_S:g} s and {TPOT_SLO_S * 1e3:g} ms a token after it; a replica starts in"
    return "\n".join(lines) + f"\n\n{slo} {START_S:g} s and has {GPUS} GPUs.\n"


def main(args: argparse.Namespace) -> int:
    outcomes, clusters = compare(repeats=args.repeats)
    print(json.dumps([asdict(outcome) for outcome in outcomes]) if args.json else table(outcomes))
    if args.markdown:
        Path(args.markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(args.markdown).write_text(table(outcomes))
    if args.plot:
        from cluster.simulate.plots import plot_scaling

        print(plot_scaling(clusters, Path(args.plot) / "autoscalers.png"))
    return 0
