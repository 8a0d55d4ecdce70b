"""A benchmark as a typed YAML file: arms that differ from a baseline by named changes, and the loads they get.

Each change is one factor (a KV format, a weight format, integrity, disaggregation, scaling, another system) and must
stand alone in an arm before it is combined with others. What no change names is the same for all arms and is recorded.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

PLANS = Path(__file__).parent / "plans"
BASELINE = "baseline"
AGAIN = "baseline-again"


System = Literal["pageferry", "vllm", "ray-llm", "router"]


class PlanError(ValueError):
    """A plan that cannot be run; the message names the file, the field and the way out."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompts(Strict):
    """Token ids drawn by seed. `tokens`: of a first turn. `prefix_tokens` of them are shared by all sessions of a
    group. `turns` > 1: each turn sends all before it, the answer included, and `turn_tokens` new ones (chat); with a
    long shared prefix and long turns (tool results) that is what an agent sends."""

    tokens: int = Field(default=256, ge=2)
    prefix_tokens: int = Field(default=0, ge=0)
    groups: PositiveInt = 1
    turns: PositiveInt = 1
    turn_tokens: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _prefix_is_a_part(self) -> Self:
        if self.prefix_tokens >= self.tokens:
            raise ValueError(f"prefix_tokens {self.prefix_tokens} must be below tokens {self.tokens}")
        return self


class Load(Strict):
    """`output_tokens` is the output cap, and reached: answers don't stop before it."""

    prompts: Prompts = Prompts()
    output_tokens: PositiveInt = 32

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """Of the rows that it gives."""
        return (self.name,)


class Closed(Load):
    """Keeps `concurrency` sessions running until `requests` sessions have ended."""

    kind: Literal["closed"]
    concurrency: PositiveInt
    requests: PositiveInt

    @property
    def name(self) -> str:
        return f"closed {self.concurrency}{_shape(self.prompts)}"


class Poisson(Load):
    """Sessions begin `rate` times a second on average, at random times."""

    kind: Literal["poisson"]
    rate: PositiveFloat
    requests: PositiveInt

    @property
    def name(self) -> str:
        return f"poisson {self.rate:g}/s{_shape(self.prompts)}"


class Objective(Strict):
    """What an answer must meet to count; at least `share` of all must."""

    ttft_s: PositiveFloat
    tpot_s: PositiveFloat
    share: float = Field(default=0.95, gt=0, le=1)


class Ramp(Load):
    """Closed loads of `start`, `start * factor`, ... up to `most` sessions, until one misses the objective. The
    largest that meets it is the goodput."""

    kind: Literal["ramp"]
    objective: Objective
    start: PositiveInt = 1
    factor: float = Field(default=2.0, gt=1)
    most: PositiveInt = 64
    requests_per_slot: PositiveInt = 4

    @property
    def name(self) -> str:
        return f"ramp to {self.objective.ttft_s:g}/{self.objective.tpot_s:g} s{_shape(self.prompts)}"

    @property
    def steps(self) -> list[int]:
        """The concurrencies, ascending."""
        found, at = [self.start], float(self.start)
        while round(at * self.factor) <= self.most:
            at *= self.factor
            found.append(max(round(at), found[-1] + 1))
        return found


class Replay(Load):
    """Requests of a trace: JSON lines with `at_s`, `prompt_tokens` and `output_tokens`, `speed` times as fast."""

    kind: Literal["replay"]
    trace: Path
    speed: PositiveFloat = 1.0

    @property
    def name(self) -> str:
        return f"replay {self.trace.stem}"


class Beside(Load):
    """`concurrency` streams run; a second after they began, prompts of `long_tokens` come one after another for as long
    as a stream runs. Two rows: the streams', and the long prompts' (whose answers have `long_output_tokens`)."""

    kind: Literal["beside"]
    concurrency: PositiveInt
    long_tokens: PositiveInt = 3000
    long_output_tokens: PositiveInt = 4

    @property
    def name(self) -> str:
        return f"{self.concurrency} streams beside prompts of {self.long_tokens}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"prompts of {self.long_tokens} beside {self.concurrency} streams")


AnyLoad = Annotated[Closed | Poisson | Ramp | Replay | Beside, Field(discriminator="kind")]


class Change(Strict):
    """One factor: another system, or overrides of the topology (`pools.decode.kv_dtype=bfloat16`)."""

    system: System | None = None
    engines: PositiveInt = 2  # of system router
    threads: PositiveInt | None = None  # instead of the plan's
    set: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.set and self.system is None:
            raise ValueError("a change needs `set` or `system`")
        return self


class PublishedRow(Strict):
    """A published ratio, and the arm, load and figure of this plan that answer it."""

    what: str
    ratio: PositiveFloat
    arm: str
    load: str
    figure: str


class Panel(Strict):
    """Of the page's picture: a figure by arm and load. No loads: all."""

    figure: str
    loads: tuple[str, ...] = ()


class Plan(Strict):
    """`together`: all arms run side by side and take turns load by load, so that both sides of a pair see the same
    moment; for arms that are idle without requests, and fit into memory together. Otherwise each arm is started anew in
    each round."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    question: str
    config: str = "local-cpu"
    system: System = "pageferry"  # of arms whose changes name none
    set: tuple[str, ...] = ()
    changes: dict[str, Change] = {}
    arms: tuple[tuple[str, ...], ...] = ((),)
    loads: tuple[AnyLoad, ...] = Field(min_length=1)
    rounds: int = Field(default=8, ge=1)
    warm_up_requests: PositiveInt = 3
    seed: int = 1
    threads: PositiveInt = 1
    together: bool = False
    again: bool = False  # an A/A arm: the baseline a second time
    machine_price: PositiveFloat | None = None  # per hour, all of a system's devices
    margin: float = Field(
        default=0.05, gt=0, lt=1
    )  # a difference below this is called equal when the interval lies inside
    picture: tuple[Panel, ...] = (Panel(figure="tokens_per_s"), Panel(figure="ttft_p95"), Panel(figure="gap_p99"))
    published: tuple[PublishedRow, ...] = ()
    shows: str = ""  # in words, what a run on this kind of machine can show of the published claim
    cannot_show: str = ""

    @model_validator(mode="after")
    def _one_factor_then_combined(self) -> Self:
        if self.arms[0] != ():
            raise ValueError("the first arm must be [] (the baseline): the others are compared with it")
        known = [name for load in self.loads for name in load.names]
        if len(set(known)) != len(known):
            raise ValueError(f"two loads are the same: {'; '.join(known)}")
        for row in self.published:
            if row.arm not in self.names or row.load not in known:
                raise ValueError(
                    f"published row {row.what!r}: arms are {', '.join(self.names)}; loads {'; '.join(known)}"
                )
        if strange := {load for panel in self.picture for load in panel.loads} - set(known):
            raise ValueError(f"picture: loads are {'; '.join(known)}; not {'; '.join(sorted(strange))}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"two arms are the same: {', '.join(self.names)}")
        for arm in self.arms:
            for change in arm:
                if change not in self.changes:
                    raise ValueError(
                        f"arm [{', '.join(arm)}]: no change {change!r}; there are {', '.join(self.changes)}"
                    )
                if (change,) not in self.arms:
                    raise ValueError(f"arm [{', '.join(arm)}] combines {change!r}, which needs an arm [{change}] alone")
            if sum(self.changes[change].system is not None for change in arm) > 1:
                raise ValueError(f"arm [{', '.join(arm)}] names two systems")
        return self

    @property
    def names(self) -> list[str]:
        """The arms' names in order; `baseline-again` last where there is one."""
        found = ["+".join(arm) or BASELINE for arm in self.arms]
        return [*found, AGAIN] if self.again else found

    def changes_of(self, arm: str) -> list[Change]:
        return [] if arm in (BASELINE, AGAIN) else [self.changes[name] for name in arm.split("+")]

    def digest(self) -> str:
        """Names everything that the plan fixes."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]


def _shape(prompts: Prompts) -> str:
    parts = [f"{prompts.tokens} in"]
    parts += [f"{prompts.prefix_tokens} shared"] if prompts.prefix_tokens else []
    parts += [f"{prompts.turns} turns"] if prompts.turns > 1 else []
    return f", {', '.join(parts)}"


def read(where: str, small: bool = False) -> Plan:
    """A plan file, or a shipped one by name. `small`: two rounds and a quarter of the requests, for a look.

    PlanError names the file, the field and what is wrong with it.
    """
    file = Path(where) if where.endswith((".yaml", ".yml")) else PLANS / f"{where}.yaml"
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError:
        shipped = ", ".join(sorted(path.stem for path in PLANS.glob("*.yaml")))
        raise PlanError(f"{where}: no such plan file; shipped plans are {shipped}") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{file}: not YAML: {error}") from None
    try:
        plan = Plan.model_validate(tree)
    except ValidationError as error:
        words = "; ".join(
            f"{'.'.join(str(part) for part in e['loc']) or 'the plan'}: {e['msg']}"
            + ("" if e["type"] in ("extra_forbidden", "missing") else f" (is {_short(e['input'])})")
            for e in error.errors()
        )
        raise PlanError(f"{file}: {words}") from None
    for load in plan.loads:
        if isinstance(load, Replay) and not (file.parent / load.trace).is_file():
            raise PlanError(f"{file}: loads.trace: no file {file.parent / load.trace}")
    if any(isinstance(load, Replay) for load in plan.loads):
        plan = plan.model_copy(update={"loads": tuple(_beside(load, file.parent) for load in plan.loads)})
    return smaller(plan) if small else plan


def _beside(load: Any, folder: Path) -> Any:
    return load.model_copy(update={"trace": folder / load.trace}) if isinstance(load, Replay) else load


def smaller(plan: Plan) -> Plan:
    """Two rounds and a quarter of the requests."""

    def less(load: Any) -> Any:
        if isinstance(load, Closed | Poisson):
            slots = load.concurrency if isinstance(load, Closed) else 1
            return load.model_copy(update={"requests": max(slots, load.requests // 4, 2)})
        if isinstance(load, Ramp):
            return load.model_copy(update={"requests_per_slot": 1, "most": min(load.most, 4)})
        if isinstance(load, Beside):
            return load.model_copy(update={"output_tokens": max(8, load.output_tokens // 4)})
        return load

    return plan.model_copy(update={"rounds": min(plan.rounds, 2), "loads": tuple(less(load) for load in plan.loads)})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
