"""One simulated run as data: cluster shape, trace, faults. Written to JSON and read back, it does the same again."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.spec import ClusterSpec
from ops.simulate.faults import Fault, FaultKind, plan
from ops.simulate.traces import Arrival, Lengths, bursts, poisson
from ops.simulate.world import SECOND

# Small and quick, so that a run of a minute shows every time-out.
SPEC: dict[str, Any] = {
    "model": {"path": "simulated"},
    "pools": {
        "prefill": {"replicas": 2, "min_replicas": 1, "max_replicas": 4},
        "decode": {"replicas": 3, "min_replicas": 1, "max_replicas": 6},
    },
    "transfer": {"lease_s": 12.0, "hand_over_s": 6.0},
    "admission": {"queue_max": 24, "queue_wait_s": 12.0, "stale_after_s": 2.0, "fence_after_s": 5.0},
    "scaling": {"mode": "off", "drain_deadline_s": 3.0},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of the simulated machines."""

    nodes: int = 2
    frontends: int = 2
    decode_blocks: int = 256
    prefill_blocks: int = 512
    block_tokens: int = 32
    max_seqs: int = 16
    staging_bytes: int = 64 * 4096
    start_s: float = 1.5  # a new replica needs this long
    costs: str = "linear"
    ledger: bool = True  # decode's blocks are pages under the real ledger; off for large pools


@dataclass(frozen=True)
class Scenario:
    seed: int
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    spec: dict[str, Any] = field(default_factory=lambda: SPEC)
    shape: Shape = Shape()
    settle_s: float = 30.0  # after the last end: everything must be given back by then
    limit_s: float = 240.0  # a request that has not ended by then is lost

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec.parse(self.spec, "scenario")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        data = json.loads(text)
        arrivals = tuple(
            Arrival(**{**row, "prefix_hashes": tuple(row["prefix_hashes"])}) for row in data.pop("arrivals")
        )
        faults = tuple(
            Fault(**{**row, "kind": FaultKind(row["kind"]), "only": tuple(row["only"])}) for row in data.pop("faults")
        )
        shape = Shape(**data.pop("shape"))
        return cls(arrivals=arrivals, faults=faults, shape=shape, **data)

    def save(self, folder: str | Path) -> Path:
        path = Path(folder) / f"scenario-{self.seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())
        return path


def random_scenario(seed: int, kinds: tuple[FaultKind, ...]) -> Scenario:
    """A small cluster with some load and some faults; everything from the seed."""
    dice = random.Random(seed)
    spec = json.loads(json.dumps(SPEC))
    spec["pools"]["prefill"]["replicas"] = dice.choice((1, 1, 2, 2, 3))
    spec["pools"]["decode"]["replicas"] = dice.choice((1, 2, 2, 3, 4))
    spec["admission"]["local_prefill_max_tokens"] = dice.choice((0, 0, 64))
    if dice.random() < 0.3:
        spec["scaling"] |= {
            "mode": "occupancy",
            "look_back_s": 2.0,
            "up_hold_s": 1.0,
            "down_hold_s": 6.0,
            "warm_up_s": 1.0,
        }
        if dice.random() < 0.5:
            spec["pools"]["decode"] |= {"replicas": 1, "min_replicas": 0}
    lengths = Lengths(
        prompt_median=dice.choice((40, 200, 600)),
        prompt_sigma=0.9,
        output_median=dice.choice((8, 30, 80)),
        output_sigma=0.8,
        prompt_max=2_000,
        output_max=300,
    )
    seconds = dice.choice((3.0, 6.0))
    if dice.random() < 0.5:
        arrivals = poisson(dice, dice.choice((2.0, 5.0, 8.0)), seconds, lengths)
    else:
        arrivals = bursts(dice, 1.0, dice.choice((10.0, 25.0)), seconds, seconds / 4, seconds, lengths)
    shape = Shape(
        nodes=dice.choice((1, 2)),
        frontends=dice.choice((1, 2)),
        decode_blocks=dice.choice((96, 256)),
        staging_bytes=dice.choice((64, 256)) * 4096,
        max_seqs=dice.choice((4, 16)),
    )
    faults = plan(dice, kinds, int((seconds + 4.0) * SECOND))
    return Scenario(seed=seed, arrivals=tuple(arrivals), faults=faults, spec=spec, shape=shape)


def without_faults(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=())
