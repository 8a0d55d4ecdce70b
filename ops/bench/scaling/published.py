"""The published decode curve of Kimi K2.6 on 8 H200, from geometry and the planner's roofline, in the simulator.

One decode replica, the real controller: 40 (80) requests that reserve 21,400 tokens arrive together. With a BF16 pool
32 come in and the 33rd waits; an FP8 pool of the same bytes takes 64. Throughput is counted from the first step with
the full batch to the first request's end.

Taken as given: the pool, 686,000 BF16 tokens; FP8 rows are half as long, so the same bytes hold twice that. The
constants are the planner's (`cluster.plan.roofline`), with the share of its reservation that a request holds on average
(`CONTEXT_SHARE`, fitted with them). How much that share matters for the gain is in the table of `held`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.messages import AdmitRequest, Role
from cluster.json_output import print_json
from cluster.plan.published import CONTEXT_SHARE, REQUEST_TOKENS, published_pool
from cluster.plan.roofline import Roofline
from ops.simulate.cluster import ClusterSim
from ops.simulate.costs import LinearCosts, RooflineCosts
from ops.simulate.decode import DecodeSim
from ops.simulate.scenario import SPEC, Scenario, Shape
from ops.simulate.traces import Arrival
from ops.simulate.world import SECOND

BF16_TOKENS = 686_000
PAGE_TOKENS = 32
PROMPT_TOKENS = 1_024
# Published: tokens a second, by (KV format, concurrent requests).
PUBLISHED = {("bf16", 1): 137.0, ("fp8", 1): 125.0, ("bf16", 32): 1555.0, ("fp8", 64): 2192.0}
PUBLISHED_GAIN = 0.41


@dataclass(frozen=True, slots=True)
class Point:
    kv: str
    offered: int
    admitted: int
    queued: int
    tokens_per_s: float
    published: float | None


def measure(kv: str, offered: int, held: float = CONTEXT_SHARE) -> Point:
    """One run with `offered` requests at once, each of which holds `held` of its reservation on average: a prompt of
    1,024 tokens (less where `held` leaves less) and an answer that ends when the mean has been reached."""
    plan = published_pool("kimi-k2.6", "int4", kv)
    costs = RooflineCosts(Roofline.of(plan.arch, plan.settings))
    tokens = BF16_TOKENS * (2 if kv == "fp8" else 1)
    mean = round(REQUEST_TOKENS * held)
    prompt_tokens = max(PROMPT_TOKENS, 2 * mean - REQUEST_TOKENS)
    output, reserved = 2 * (mean - prompt_tokens), REQUEST_TOKENS - prompt_tokens
    scenario = Scenario(
        seed=0,
        arrivals=tuple(
            Arrival(at_ns=0, prompt_tokens=prompt_tokens, output_tokens=output, max_tokens=reserved)
            for _ in range(offered)
        ),
        spec=_spec(),
        shape=Shape(
            nodes=1,
            frontends=1,
            decode_blocks=tokens // PAGE_TOKENS,
            max_seqs=1024,
            staging_bytes=1 << 24,
            ledger=False,
        ),
        limit_s=6_000.0,
        settle_s=0.0,
    )
    # The prompt is there at once: what is measured is decode.
    cluster = ClusterSim(scenario, {Role.PREFILL: LinearCosts(1), Role.DECODE: _Decode(costs)}, quantum=32)
    _teach(cluster, prompt_tokens, reserved)
    with closing(cluster):
        return _watch(cluster, kv, offered)


def _spec() -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    for pool in ("prefill", "decode"):
        spec["pools"][pool] = {"replicas": 1, "min_replicas": 1, "max_replicas": 1}
    spec["admission"] = {"queue_max": 1000, "queue_wait_s": 100_000.0, "occupancy_limit": 1.0}
    return spec


@dataclass(frozen=True, slots=True)
class _Decode:
    """Decode steps from the roofline; the few rows that decode computes itself cost nothing."""

    costs: RooflineCosts

    def prefill_ns(self, tokens: int) -> int:
        return 0

    def step_ns(self, batch: int, context_tokens: int) -> int:
        return self.costs.step_ns(batch, context_tokens)


def _teach(cluster: ClusterSim, prompt: int, output: int) -> None:
    """The controller has seen answers as long as the reservation, so it keeps all of it for each request."""
    request = AdmitRequest(request_id="", frontend_id="", num_prompt_tokens=prompt, max_tokens=output)
    for _ in range(10):
        cluster.controller.machine.forecast.learn(request, output, output * SECOND // 40)


def _watch(cluster: ClusterSim, kv: str, offered: int) -> Point:
    """Looks every 50 ms of virtual time, from the full batch to the first end."""
    seen: list[tuple[int, int]] = []
    most = [0, 0]

    def look() -> None:
        engines = [r for r in cluster.replicas.values() if isinstance(r, DecodeSim)]
        running = len(engines[0].running) if engines else 0
        live = len(cluster.controller.machine.registry.tickets)
        if live > most[0]:
            most[0], most[1] = live, len(cluster.controller.machine.queue)
        ended = any(record.ends for record in cluster.records)
        if running and running == most[0] and not ended:
            seen.append((cluster.world.now_ns, engines[0].tokens_generated))
        if not ended:
            cluster.world.at(SECOND // 20, look)

    cluster.world.at(SECOND // 20, look)
    cluster.run(stop=lambda: any(record.ends for record in cluster.records))
    (begin_ns, first), (end_ns, last) = seen[0], seen[-1]
    rate = (last - first) * SECOND / (end_ns - begin_ns)
    return Point(kv, offered, most[0], most[1], rate, PUBLISHED.get((kv, most[0])))


def curve() -> list[Point]:
    points = [measure("bf16", n) for n in (1, 4, 8, 16, 32, 40)]
    return points + [measure("fp8", n) for n in (1, 4, 8, 16, 32, 64, 80)]


def gain(held: float = CONTEXT_SHARE) -> float:
    """Peak of the FP8 pool over peak of the BF16 pool, less one."""
    bf16, fp8 = measure("bf16", 40, held), measure("fp8", 80, held)
    return fp8.tokens_per_s / bf16.tokens_per_s - 1


def table(points: list[Point], held: dict[float, float]) -> str:
    lines = [
        "| KV | offered | admitted | waiting | tok/s | published | difference |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for point in points:
        known = f"{point.published:,.0f}" if point.published else ""
        off = f"{point.tokens_per_s / point.published - 1:+.1%}" if point.published else ""
        count = f"{point.offered} | {point.admitted} | {point.queued}"
        lines.append(f"| {point.kv} | {count} | {point.tokens_per_s:,.0f} | {known} | {off} |")
    lines += ["", "| share of 21,400 tokens held on average | FP8 peak over BF16 peak |", "|---:|---:|"]
    lines += [f"| {share:.0%} | {value:+.1%} |" for share, value in held.items()]
    lines += ["", f"Published: {PUBLISHED_GAIN:+.0%}."]
    return "\n".join(lines) + "\n"


def main(args: argparse.Namespace) -> int:
    points = curve()
    held = {share: gain(share) for share in (CONTEXT_SHARE, 0.4, 0.69)}
    if args.json:
        print_json({"points": [asdict(point) for point in points], "gain_by_held": held})
    else:
        print(table(points, held))
    if args.markdown:
        Path(args.markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(args.markdown).write_text(table(points, held))
    if args.plot:
        from ops.bench.scaling.plots import plot_curve

        print(plot_curve(points, Path(args.plot) / "published-curve.png"))
    return 0
