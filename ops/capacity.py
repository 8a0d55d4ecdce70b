"""What a shipped topology asks of the one controller and of the links, from 2 to 1,000 nodes: plain arithmetic.

    python -m ops.capacity --gpu H200

A unit is the topology as shipped; its requests a second are the planner's roofline, the slower pool's. CPU of the
controller actor is measured (`ops/results/controller.json`, and what a call costs it from `controller.md`). It is one
process: above one core it cannot keep up.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.plan.facts import gpu
from cluster.plan.from_spec import plan_spec
from cluster.plan.service import ServicePlan, Workload
from cluster.spec import ClusterSpec

RESULTS = Path(__file__).parent / "results"
TOPOLOGIES = (("one-node", "glm-4.5-air", 1), ("two-node", "kimi-k2.6", 2))
NODES = (2, 8, 32, 100, 316, 1000)
OUTPUT_TOKENS = 500
# Messages a second that come in any case: a busy replica's, a transfer actor's, a frontend's.
REPLICA_S, TRANSFER_S, FRONTEND_S = 2.0, 2.0, 1.0
CALL_S = 0.00045  # of the controller's CPU, a call of a Ray actor: 0.35 to 0.55 ms


@cache
def hand_over_s() -> float:
    """CPU of the controller actor, a hand-over with all its calls: the row with the most of them."""
    rows = json.loads((RESULTS / "controller.json").read_text())["rows"]
    return float(max(rows, key=lambda row: row["per_second"])["cpu_us"]) / 1e6


@dataclass(frozen=True)
class Unit:
    """A topology as shipped: `nodes` machines, half of them with prefill replicas where there are several."""

    name: str
    model: str
    nodes: int
    requests_per_s: float
    calls_per_s: float
    bytes_per_request: int
    compute_s: float  # of one prompt on prefill

    @classmethod
    def of(cls, name: str, model: str, nodes: int, input_tokens: int, device: str) -> Unit:
        spec = ClusterSpec.load(name)
        # A decode pool's own checkpoint is not here: INT4 as `pageferry compress` makes it.
        weights = {"decode": "int4"} if spec.pools.decode.weights else {}
        plans = plan_spec(spec, gpu(device), model, weights)
        plan = ServicePlan(plans["prefill"], plans["decode"], Workload(input_tokens, OUTPUT_TOKENS))
        prefill, decode = spec.pools.prefill.replicas, spec.pools.decode.replicas
        return cls(
            name,
            model,
            nodes,
            min(plan.prefill_requests_s * prefill, plan.decode_tokens_s / OUTPUT_TOKENS * decode),
            (prefill + decode) * REPLICA_S + nodes * TRANSFER_S + spec.frontend.replicas * FRONTEND_S,
            plan.wire_bytes_request_ranks,
            plan.prefill_cost.seconds,
        )

    def cores(self, nodes: float) -> tuple[float, float]:
        """Of the controller: for hand-overs, and for messages that come in any case."""
        units = nodes / self.nodes
        return units * self.requests_per_s * hand_over_s(), units * self.calls_per_s * CALL_S

    @property
    def moves(self) -> str:
        """What leaves a prefill node."""
        if self.nodes == 1:
            return "none of it leaves the node"
        steady = self.requests_per_s / (self.nodes / 2) * self.bytes_per_request / 1e9
        one = self.bytes_per_request / self.compute_s / 1e9
        return (
            f"{steady:,.1f} GB/s out of a prefill node, {one:,.1f} GB/s for a prompt to move as fast as it is computed"
        )

    def page(self, input_tokens: int) -> str:
        lines = [
            f"### {self.name}, {self.model}: prompts of {input_tokens:,} tokens, {OUTPUT_TOKENS} out",
            "",
            f"A prompt's pages: {self.bytes_per_request / 1e6:,.0f} MB (all ranks), computed in "
            f"{self.compute_s * 1e3:,.0f} ms; {self.moves}.",
            "",
            "| nodes | requests/s | tokens/s out | controller, cores for hand-overs | for standing messages |",
            "|---:|---:|---:|---:|---:|",
        ]
        for nodes in NODES:
            requests = self.requests_per_s * nodes / self.nodes
            busy, standing = self.cores(nodes)
            lines.append(
                f"| {nodes:,} | {requests:,.0f} | {requests * OUTPUT_TOKENS:,.0f} | {busy:.2f} | {standing:.2f} |"
            )
        return "\n".join([*lines, "", f"One controller is full at {1 / sum(self.cores(1)):,.0f} nodes.", ""])


def main(argv: list[str] | None = None) -> int:
    make = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    make.add_argument("--gpu", default="H200")
    args = make.parse_args(argv)
    for name, model, nodes in TOPOLOGIES:
        for input_tokens in (1000, 4000):
            print(Unit.of(name, model, nodes, input_tokens, args.gpu).page(input_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
