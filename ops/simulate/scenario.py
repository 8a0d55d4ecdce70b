"""One simulated run as data: cluster, load, faults. From a seed, or from a short file that a person writes.

A file is YAML. `spec` and `shape` say what differs from `SPEC` and `Shape()`; a request and a fault are a line each:

    seed: 7
    spec: {pools.prefill.replicas: 2, admission.queue_max: 8}
    shape: {nodes: 2}
    requests:
      - 0.08 s, prompt 196, output 47
      - 0.30 s, prompt 325, output 228, num_sequences 2, recovery replay
    faults:
      - 2.03 s, hang_prefill, for 12 s
      - 2.50 s, drop, for 1 s, amount 0.2, only admit
    expect:                       # texts of the story, in this order
      - the controller itself was away
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

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
    "integrity": {"mode": "check"},
}


class ScenarioError(ValueError):
    """A scenario file that cannot be used; the message is for the person who wrote it."""


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
    prefill_token_ns: int = 100_000
    open_page_ns: int = 50_000  # from staging into decode's cache, a page
    start_s: float = 1.5  # a new replica needs this long
    watched: bool = True  # the platform tells the controller of processes that die; else it learns by their silence
    ledger: bool = True  # decode's blocks are pages under the shipped ledger; off for large pools


@dataclass(frozen=True)
class Scenario:
    seed: int
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    spec: dict[str, Any] = field(default_factory=lambda: SPEC)
    shape: Shape = Shape()
    settle_s: float = 25.0  # after the last end: everything must be given back by then
    limit_s: float = 240.0  # a request that has not ended by then is lost
    expect: tuple[str, ...] = ()  # texts of the story, in this order

    def cluster_spec(self) -> ClusterSpec:
        spec: dict[str, Any] = json.loads(json.dumps(self.spec))
        spec["pools"]["decode"].setdefault("max_num_seqs", self.shape.max_seqs)  # what its engines announce
        return ClusterSpec.parse(spec, "scenario")


def random_scenario(seed: int, kinds: tuple[FaultKind, ...]) -> Scenario:
    """A small cluster with some load and some faults; everything from the seed."""
    dice = random.Random(seed)
    spec = json.loads(json.dumps(SPEC))
    spec["pools"]["prefill"]["replicas"] = dice.choice((1, 1, 2, 2, 3))
    spec["pools"]["decode"]["replicas"] = dice.choice((1, 2, 2, 3, 4))
    spec["integrity"] = {"policy": dice.choice(("fail", "retry"))}
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
        watched=dice.random() < 0.5,
        nodes=dice.choice((1, 2)),
        frontends=dice.choice((1, 2)),
        decode_blocks=dice.choice((96, 256)),
        staging_bytes=dice.choice((64, 256)) * 4096,
        max_seqs=dice.choice((4, 16)),
        prefill_token_ns=dice.choice((100_000, 100_000, 500_000)),
        open_page_ns=dice.choice((50_000, 5_000_000)),
    )
    arrivals = [_form(dice, arrival) for arrival in arrivals]
    faults = plan(dice, kinds, int((seconds + 4.0) * SECOND))
    return Scenario(seed=seed, arrivals=tuple(arrivals), faults=faults, spec=spec, shape=shape)


def _form(dice: random.Random, arrival: Arrival) -> Arrival:
    """One of the request forms that go different ways through the service."""
    return replace(
        arrival,
        num_sequences=dice.choice((1, 1, 1, 1, 2, 3)),
        recovery=dice.choice(("resume", "resume", "resume", "replay", "replay", "none")),
        ending=dice.choice(("eos", "eos", "length", "stop")),
    )


# -- files


def load(path: str | Path) -> Scenario:
    """Reads a scenario file. Raises `ScenarioError`."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
        unknown = set(tree) - {"seed", "spec", "shape", "requests", "faults", "expect"}
        if unknown:
            raise ScenarioError(f"unknown keys {sorted(unknown)}")
        return Scenario(
            seed=int(tree.get("seed", 0)),
            arrivals=tuple(_request(line) for line in tree["requests"]),
            faults=tuple(_fault(line) for line in tree.get("faults", ())),
            spec=_spec(tree.get("spec", {})),
            shape=Shape(**tree.get("shape", {})),
            expect=tuple(tree.get("expect", ())),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ScenarioError(f"{path}: {error!r}; the form is described in ops/simulate/scenario.py") from None


def _spec(changes: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        branch = spec
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = value
    return spec


def _words(line: str) -> tuple[int, list[str]]:
    """The time that a line begins with, nanoseconds, and its other parts."""
    first, *parts = [part.strip() for part in line.split(",")]
    number, unit = first.split()
    if unit != "s":
        raise ScenarioError(f"{line!r} must begin with a time such as 0.5 s")
    return round(float(number) * SECOND), parts


def _request(line: str) -> Arrival:
    at_ns, parts = _words(line)
    fields = dict(part.split(maxsplit=1) for part in parts)
    prompt, output = int(fields.pop("prompt")), int(fields.pop("output"))
    most = int(fields.pop("max_tokens", 2 * output))
    forms: dict[str, Any] = {key: int(text) if text.isdigit() else text for key, text in fields.items()}
    return Arrival(at_ns=at_ns, prompt_tokens=prompt, output_tokens=output, max_tokens=most, **forms)


def _fault(line: str) -> Fault:
    at_ns, (kind, *parts) = _words(line)
    fields = dict(part.split(maxsplit=1) for part in parts)
    return Fault(
        FaultKind(kind),
        at_ns,
        target=int(fields.pop("target", 0)),
        duration_ns=round(float(fields.pop("for", "0 s").removesuffix("s")) * SECOND),
        amount=float(fields.pop("amount", 0.5)),
        only=tuple(fields.pop("only", "").split()),
    )
