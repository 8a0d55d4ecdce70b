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
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.messages import Role
from cluster.json_output import print_json
from cluster.plan.published import published_pool
from cluster.plan.roofline import Roofline
from ops.bench.scaling.serve_scaler import REPLICAS_MAX, ServeScaler, ServeSettings
from ops.bench.stats import mean_interval
from ops.simulate.cluster import ClusterSim
from ops.simulate.costs import RooflineCosts
from ops.simulate.scenario import SPEC, Scenario, Shape
from ops.simulate.traces import Arrival, Lengths, bursts
from ops.simulate.world import SECOND

GPUS = 8  # a replica
START_S = 60.0
BLOCKS = 12_500  # of 32 tokens: 400,000 tokens a replica
TTFT_SLO_S = 15.0
TPOT_SLO_S = 0.060
FLAP_S = 300.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Who sets decode's replicas; `serve` None: the controller. Both have the same least number of replicas."""

    name: str
    minimum: int = 1
    serve: ServeSettings | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace."""

    policy: str
    trace: str
    seed: int
    requests: int
    slo: float  # share of requests with TTFT and TPOT within bounds; refused ones count as missed
    gpu_hours: float
    flaps: int
    busy: int
    ttft_p95_s: float
    reaction_s: float  # from a burst's begin to the first larger target, mean
    overshoot: int  # most replicas beyond what the occupancy of the moment needed
    peak_replicas: int


def spec_for(mode: str, minimum: int = 1) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    spec["pools"]["prefill"] = {"replicas": 8, "min_replicas": 8, "max_replicas": 8}
    spec["pools"]["decode"] = {"replicas": minimum, "min_replicas": minimum, "max_replicas": REPLICAS_MAX}
    spec["admission"] = {"queue_max": 512, "queue_wait_s": 60.0}
    spec["transfer"] = {"lease_s": 120.0, "hand_over_s": 60.0}
    spec["scaling"] = {
        "mode": mode,
        "warm_up_s": START_S,
        "look_back_s": 10.0,
        "up_hold_s": 2.0,
        "down_hold_s": 20.0,
        "step_down_max": REPLICAS_MAX,
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
    return RooflineCosts(Roofline.of(plan.arch, plan.settings))


def play(arrivals: list[Arrival], serve: ServeSettings | None, minimum: int = 1) -> ClusterSim:
    """One run; `serve` None: the controller scales."""
    scenario = Scenario(
        seed=1,
        arrivals=tuple(arrivals),
        spec=spec_for("off" if serve else "occupancy", minimum),
        shape=Shape(
            nodes=2,
            frontends=2,
            decode_blocks=BLOCKS,
            prefill_blocks=BLOCKS,
            max_seqs=256,
            staging_bytes=1 << 28,
            start_s=START_S,
            ledger=False,
        ),
        limit_s=900.0,
        settle_s=5.0,
    )
    line = costs()
    cluster = ClusterSim(scenario, {Role.PREFILL: line, Role.DECODE: line}, quantum=16, sample_ns=SECOND)
    if serve is not None:
        scaler = ServeScaler(serve, minimum)

        def look() -> None:
            ongoing = sum(len(frontend.records) for frontend in cluster.frontends)
            up = len(cluster.pool(Role.DECODE))
            cluster.platform.targets[Role.DECODE] = scaler.step(cluster.world.now_ns / SECOND, ongoing, up)
            cluster.world.at(SECOND // 2, look)

        cluster.world.at(SECOND, look)
    try:
        return cluster.run()
    finally:
        cluster.close()


def judge(cluster: ClusterSim, policy: str, trace: str, seed: int = 1) -> Outcome:
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
        seed=seed,
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


# Serve's delays: as they come; the holds that ours has; up at once and down late.
DELAYS = {
    "default delays": (30.0, 600.0, 30.0),
    "quick": (2.0, 20.0, 10.0),
    "patient": (0.0, 300.0, 10.0),
}
DEFAULT = "Serve 2, default delays"  # `AutoscalingConfig()` but for the bounds
TRACES = {"long bursts": long_bursts, "mixed bursts": mixed_bursts}


def serve_policy(target: int, delays: str, minimum: int = 1) -> Policy:
    up_s, down_s, look_s = DELAYS[delays]
    name = f"Serve {target}, {delays}" + (f", at least {minimum}" if minimum > 1 else "")
    return Policy(name, minimum, ServeSettings(target, up_s, down_s, look_s, minimum))


def policies(trace: str) -> list[Policy]:
    """Ours with each least number of replicas, and Serve's targets, delays and least numbers."""
    ours = [Policy("occupancy" + (f", at least {minimum}" if minimum > 1 else ""), minimum) for minimum in (1, 2, 3, 4)]
    if trace != "long bursts":
        few = [
            serve_policy(2, "default delays"),
            serve_policy(6, "quick"),
            serve_policy(9, "quick"),
            serve_policy(9, "patient"),
        ]
        return [*ours[:2], *few, serve_policy(9, "quick", 2)]
    swept = [serve_policy(target, delays) for target in (2, 4, 6, 9, 12) for delays in DELAYS]
    floors = [serve_policy(target, d, least) for least in (2, 3) for target in (9, 12) for d in ("quick", "patient")]
    return [*ours, *swept, *floors]


def compare(repeats: int, seconds: float = 3_600.0, record: Path | None = None) -> list[Outcome]:
    """Every policy on every trace and seed 1 to `repeats`. `record`: JSON lines; what is there is not run again."""
    runs = [(trace, seed, policy) for seed in range(1, repeats + 1) for trace in TRACES for policy in policies(trace)]
    return run_all(runs, seconds, record)


def read(record: Path | None) -> list[Outcome]:
    if record is None or not record.exists():
        return []
    return [Outcome(**json.loads(line)) for line in record.read_text().splitlines()]


def run_all(runs: Iterable[tuple[str, int, Policy]], seconds: float, record: Path | None) -> list[Outcome]:
    """Trace, seed and policy of each run, in order. `record`: JSON lines; what is there is not run again."""
    known = {(row.trace, row.seed, row.policy): row for row in read(record)}
    outcomes = []
    for trace, seed, policy in runs:
        found = known.get((trace, seed, policy.name))
        if found is None:
            cluster = play(TRACES[trace](seconds, seed), policy.serve, policy.minimum)
            found = judge(cluster, policy.name, trace, seed)
            if record is not None:
                record.parent.mkdir(parents=True, exist_ok=True)
                with record.open("a") as lines:
                    lines.write(json.dumps(asdict(found)) + "\n")
        outcomes.append(found)
    return outcomes


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds, with the half-width of its 95 % interval (0 for a single seed)."""

    value: float
    half: float

    @classmethod
    def of(cls, values: list[float]) -> Mean:
        found = mean_interval(values)
        return cls(found.value, found.high - found.value if len(values) > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy on a trace over all seeds; flaps and refusals are of one hour."""

    policy: str
    trace: str
    slo: Mean
    gpu_hours: Mean
    flaps: Mean
    busy: Mean
    ttft_p95_s: Mean
    reaction_s: Mean
    overshoot: int
    peak_replicas: int

    @property
    def ours(self) -> bool:
        return not self.policy.startswith("Serve")

    def beats(self, other: Summary) -> str:
        """`all three`: more SLO, fewer GPU-hours, fewer flaps. `nowhere worse`: equal in some. Else empty."""
        wins = (
            self.slo.value - other.slo.value,
            other.gpu_hours.value - self.gpu_hours.value,
            other.flaps.value - self.flaps.value,
        )
        if min(wins) > 0:
            return "all three"
        return "nowhere worse" if min(wins) == 0 and max(wins) > 0 else ""


def summaries(outcomes: list[Outcome]) -> list[Summary]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.trace, outcome.policy), []).append(outcome)
    names = ("slo", "gpu_hours", "flaps", "busy", "ttft_p95_s", "reaction_s")
    return [
        Summary(
            policy=policy,
            trace=trace,
            overshoot=max(run.overshoot for run in runs),
            peak_replicas=max(run.peak_replicas for run in runs),
            **{name: Mean.of([float(getattr(run, name)) for run in runs]) for name in names},
        )
        for (trace, policy), runs in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def table(found: list[Summary]) -> str:
    lines = [
        "| trace | policy | SLO met | GPU-hours | flaps | refused | TTFT p95 s | reaction s | overshoot | peak "
        "| beaten by |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for s in found:
        rivals = [o for o in found if o.trace == s.trace and o.ours and not s.ours]
        beaten = [f"{o.policy} ({how})" for o in rivals if (how := o.beats(s))]
        lines.append(
            f"| {s.trace} | {s.policy} | {s.slo.value:.1%} ± {s.slo.half * 100:.1f} | "
            f"{s.gpu_hours.value:.1f} ± {s.gpu_hours.half:.1f} | {s.flaps.value:.1f} | {s.busy.value:.1f} | "
            f"{s.ttft_p95_s.value:.1f} | {s.reaction_s.value:.0f} | {s.overshoot} | {s.peak_replicas} | "
            f"{'; '.join(beaten) or ('' if s.ours else 'none of ours')} |"
        )
    slo = f"SLO: first token within {TTFT_SLO_S:g} s and {TPOT_SLO_S * 1e3:g} ms a token after it; a replica starts in"
    notes = (
        f"{slo} {START_S:g} s and has {GPUS} GPUs; at most {REPLICAS_MAX}. ±: 95 % interval over seeds. Flaps: an hour."
    )
    return "\n".join(lines) + f"\n\n{notes}\n"


SHOWN = ("occupancy, at least 2", DEFAULT, "Serve 9, quick")


def draw(found: list[Summary], folder: Path, seconds: float = 3_600.0) -> list[Path]:
    """SLO against GPU-hours of every policy, and some runs of seed 1 over time."""
    from ops.bench.scaling.plots import plot_front, plot_scaling

    clusters = {
        f"{trace}: {policy.name}": play(make(seconds, 1), policy.serve, policy.minimum)
        for trace, make in TRACES.items()
        for policy in policies(trace)
        if policy.name in SHOWN
    }
    return [
        plot_scaling(clusters, folder / "autoscalers.png"),
        plot_front([s for s in found if s.trace == "long bursts"], folder / "autoscalers-front.png"),
    ]


def main(args: argparse.Namespace) -> int:
    found = summaries(compare(args.repeats, record=Path(args.record) if args.record else None))
    if args.json:
        print_json([asdict(each) for each in found])
    else:
        print(table(found))
    if args.markdown:
        Path(args.markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(args.markdown).write_text(table(found))
    if args.plot:
        for path in draw(found, Path(args.plot)):
            print(path, file=sys.stderr)
    return 0
