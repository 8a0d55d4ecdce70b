"""What a cluster is: one typed, frozen `ClusterSpec`, read from YAML and overridable on the command line.

An unknown key is an error that names the nearest known one; a value out of range names its field, itself and the
way out. What can be derived is a property, never a second setting.
"""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from cluster.engine_args import GROUP_GPUS_MAX, problem, sampling_problem
from cluster.fault_kinds import PageFault
from cluster.frontend_spec import FrontendSpec, Section, TracingSpec

KvDtype = Literal["bfloat16", "fp8_e4m3"]
TOPOLOGIES = Path(__file__).parent / "topologies"


class SpecError(ValueError):
    """A configuration that cannot be used; the message is for the person who wrote it."""


class ModelSpec(Section):
    path: str = Field(description="Hugging Face checkpoint: a folder, or a name in the local hub cache")
    name: str = Field(default="", description="name that clients use; default: the last part of `path`")
    revision: str | None = None
    tokenizer: str | None = Field(default=None, description="default: the tokenizer in `path`")
    max_model_len: int | None = Field(default=None, gt=0, description="tokens; default: what the model declares")
    trust_remote_code: bool = False
    chat_template: str | None = None

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


class PoolSpec(Section):
    """One pool of replicas. A replica is one vLLM engine on one GPU group."""

    replicas: int = Field(default=1, ge=0, description="replicas at start")
    min_replicas: int | None = Field(default=None, ge=0, description="default: `replicas`")
    max_replicas: int | None = Field(default=None, ge=1, description="default: `replicas`")
    gpus_per_replica: int = Field(default=0, ge=0, description="0: CPU replicas")
    tensor_parallel: int = Field(default=1, ge=1)
    executor: Literal["mp", "ray"] = Field(
        default="mp",
        description="of several GPUs: processes of the replica (`mp`), or Ray actors in a placement group (`ray`)",
    )
    cpus_per_replica: float | None = Field(
        default=None,
        ge=0,
        description="CPUs that Ray reserves, and threads of a CPU engine (at least one). Default: 1 on GPUs; 0.25 on "
        "CPU, where engines share the cores of a small machine",
    )
    kv_dtype: KvDtype = "bfloat16"
    kv_cache_gib: float | None = Field(default=None, gt=0, description="CPU replicas: GiB of KV cache")
    weights: str | None = Field(default=None, description="checkpoint of this pool; default: model.path")
    weights_quality: Literal["require", "check", "ignore"] = Field(
        default="check",
        description="of a compressed checkpoint at start. check: refuse one that was found bad, warn of one without a "
        "verdict; require: refuse both; ignore: serve anything",
    )
    block_tokens: int = Field(default=32, ge=1, description="tokens a page; the same in both pools")
    max_num_seqs: int = Field(default=32, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    enable_prefix_caching: bool = True
    kv_scales: tuple[float, float] = Field(default=(1.0, 1.0), description="K and V scale of an FP8 cache")
    engine_args: dict[str, Any] = Field(default={}, description="further vLLM engine arguments, as they are")
    env: dict[str, str] = Field(default={}, description="environment of the engine processes")
    resources: dict[str, float] = Field(default={}, description="Ray custom resources a replica needs")
    surge_percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="replicas that a rolling update may start before it ends old ones, percent; needs as much room. "
        "Default: 100 on CPU, 0 on GPUs, where the old replica must leave its GPUs first",
    )

    @property
    def cpus(self) -> float:
        """CPUs a replica reserves in Ray."""
        if self.cpus_per_replica is not None:
            return self.cpus_per_replica
        return 1.0 if self.gpus_per_replica else 0.25

    @property
    def surge(self) -> int:
        if self.surge_percent is not None:
            return self.surge_percent
        return 0 if self.gpus_per_replica else 100

    @property
    def bounds(self) -> tuple[int, int]:
        low = self.replicas if self.min_replicas is None else self.min_replicas
        high = max(self.replicas, 1) if self.max_replicas is None else self.max_replicas
        return low, high

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"min_replicas {low} is above max_replicas {high}")
        if not low <= self.replicas <= high:
            raise ValueError(f"replicas {self.replicas} is outside min_replicas {low} .. max_replicas {high}")
        if self.gpus_per_replica and self.tensor_parallel > self.gpus_per_replica:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} needs more than gpus_per_replica {self.gpus_per_replica}"
            )
        if self.gpus_per_replica == 0 and self.tensor_parallel != 1:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} on a CPU pool; set gpus_per_replica or tensor_parallel: 1"
            )
        if self.gpus_per_replica > GROUP_GPUS_MAX:
            raise ValueError(
                f"gpus_per_replica {self.gpus_per_replica} is more than one node's {GROUP_GPUS_MAX}: the workers of a "
                "replica share one node's staging memory; set replicas instead"
            )
        if wrong := problem(self.engine_args):
            raise ValueError(wrong)
        if self.kv_dtype == "bfloat16" and self.kv_scales != (1.0, 1.0):
            raise ValueError(f"kv_scales {self.kv_scales} on a bfloat16 cache; only an fp8_e4m3 cache has scales")
        if min(self.kv_scales) <= 0:
            raise ValueError(f"kv_scales {self.kv_scales}: both must be above 0")
        return self


class PoolsSpec(Section):
    prefill: PoolSpec = PoolSpec(replicas=0, max_replicas=1)
    decode: PoolSpec

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if self.decode.bounds[1] < 1:
            raise ValueError("pools.decode.max_replicas is 0; decode serves every request, so it needs at least 1")
        if self.prefill.bounds[1] and self.prefill.block_tokens != self.decode.block_tokens:
            raise ValueError(
                f"pools.prefill.block_tokens {self.prefill.block_tokens} differs from pools.decode.block_tokens "
                f"{self.decode.block_tokens}; pages move whole, so set both to the same"
            )
        if self.prefill.bounds[1] and self.prefill.tensor_parallel != self.decode.tensor_parallel:
            raise ValueError(
                f"pools.prefill.tensor_parallel {self.prefill.tensor_parallel} differs from "
                f"pools.decode.tensor_parallel {self.decode.tensor_parallel}; each rank moves its own shard, "
                "so set both to the same"
            )
        if self.prefill.bounds[1] and (self.prefill.kv_dtype, self.decode.kv_dtype) == ("fp8_e4m3", "bfloat16"):
            raise ValueError(
                "pools.prefill.kv_dtype fp8_e4m3 with pools.decode.kv_dtype bfloat16 has no codec; "
                "use bfloat16 on prefill"
            )
        if self.prefill.bounds[1] and (wrong := sampling_problem(self.decode.engine_args, self.prefill.engine_args)):
            raise ValueError(f"pools.prefill.{wrong}")
        return self


class TransferSpec(Section):
    staging_bytes_max: int = Field(default=1 << 30, ge=1 << 20, description="staging memory a node, bytes")
    lease_s: float = Field(default=60.0, gt=0, description="staging is given back after this if no reader came for it")
    hand_over_s: float = Field(
        default=30.0,
        gt=0,
        description="least time from admission to pages opened; more for long prompts, busy prefill and many bytes",
    )

    @model_validator(mode="after")
    def _leases_last(self) -> Self:
        if self.lease_s < self.hand_over_s:
            raise ValueError(
                f"lease_s {self.lease_s:g} is below hand_over_s {self.hand_over_s:g}: staging would be given back "
                "before its reader may come; raise lease_s"
            )
        return self


class IntegritySpec(Section):
    mode: Literal["off", "check"] = "off"
    policy: Literal["fail", "retry"] = Field(
        default="fail",
        description="a request whose block table named a page that is not its own. fail: ends with HTTP 500, type "
        "page_integrity_error; retry: is run again elsewhere from its tokens so far, at most once",
    )
    seals: Literal["off", "sampled", "full"] = "full"
    sample_rate: float = Field(default=0.1, gt=0, le=1, description="share of pages verified when seals: sampled")


class AdmissionSpec(Section):
    queue_max: int = Field(default=256, ge=0, description="requests that may wait for room")
    queue_wait_s: float = Field(
        default=600.0,
        ge=0,
        description="seconds that a request may wait for room; one that would wait longer is refused at once",
    )
    occupancy_limit: float = Field(
        default=0.95, gt=0, le=1, description="predicted KV occupancy above which decode is full"
    )
    local_prefill_max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="prompts up to this length are computed by decode itself; default: those that decode computes in "
        "less time, its other streams' loss counted, than a hand-over was seen to take",
    )
    stale_after_s: float = Field(default=5.0, ge=1, description="a replica silent for this long counts as full")
    fence_after_s: float = Field(
        default=15.0, ge=2, description="a replica silent for this long is fenced and replaced"
    )
    hung_after_s: float = Field(
        default=300.0,
        ge=5,
        description="an engine that runs requests and ends no step for this long has hung and is replaced; sooner, "
        "from a fifth of this on, where that is 20 times its longest step",
    )


class ScalingSpec(Section):
    mode: Literal["off", "occupancy"] = "off"
    target_low: float = Field(default=0.45, gt=0, lt=1)
    target_high: float = Field(default=0.80, gt=0, lt=1)
    look_back_s: float = Field(default=10.0, ge=0)
    up_hold_s: float = Field(default=5.0, ge=0)
    down_hold_s: float = Field(default=60.0, ge=0)
    step_up_max: int = Field(default=4, ge=1)
    step_down_max: int = Field(default=1, ge=1)
    warm_up_s: float = Field(default=30.0, ge=0)
    prefill_queue_tokens: int = Field(
        default=16384, ge=1, description="queued prompt tokens a prefill replica should have at most"
    )
    gpu_budget: int | None = Field(default=None, ge=1, description="GPUs both pools may use together")
    drain_deadline_s: float | None = Field(
        default=None, gt=0, description="hand over what still runs after this; default: wait"
    )

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.target_low >= self.target_high:
            raise ValueError(f"target_low {self.target_low} must be below target_high {self.target_high}")
        return self


class FaultSpec(Section):
    """Faults to inject, for `pageferry chaos` only. Off unless `kinds` names some."""

    kinds: tuple[str, ...] = ()
    seed: int = 0

    @model_validator(mode="after")
    def _known(self) -> Self:
        for kind in self.kinds:
            if kind not in list(PageFault):
                raise ValueError(
                    f"kinds: {kind!r} is no kind of fault; {_nearest(kind, list(map(str, PageFault)), 'there are')}"
                )
        return self


class ClusterSpec(Section):
    model: ModelSpec
    pools: PoolsSpec
    transfer: TransferSpec = TransferSpec()
    integrity: IntegritySpec = IntegritySpec()
    admission: AdmissionSpec = AdmissionSpec()
    scaling: ScalingSpec = ScalingSpec()
    frontend: FrontendSpec = FrontendSpec()
    tracing: TracingSpec = TracingSpec()
    faults: FaultSpec = FaultSpec()

    @property
    def has_prefill(self) -> bool:
        """Whether there is a prefill pool: one with replicas now, or one that the controller may scale up."""
        pool = self.pools.prefill
        return pool.replicas > 0 or (self.scaling.mode != "off" and pool.max_replicas is not None)

    @classmethod
    def load(cls, topology: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ClusterSpec:
        """A YAML file, or its content. `overrides` maps dotted keys to values: {"pools.decode.replicas": 2}."""
        if isinstance(topology, Mapping):
            tree, source = copy.deepcopy(dict(topology)), "configuration"
        else:
            file = find_topology(topology)
            source = str(file)
            try:
                tree = yaml.safe_load(file.read_text())
            except yaml.YAMLError as error:
                raise SpecError(f"{file} is not YAML: {error}") from None
            if not isinstance(tree, dict):
                raise SpecError(f"{file} must hold a mapping with the keys {', '.join(cls.model_fields)}")
        for dotted, value in (overrides or {}).items():
            _put(tree, dotted, value)
        return cls.parse(tree, source)

    @classmethod
    def parse(cls, tree: Mapping[str, Any], source: str = "configuration") -> ClusterSpec:
        unknown = list(_unknown_keys(cls, tree, ""))
        if unknown:
            raise SpecError(f"{source}: " + "; ".join(unknown))
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            lines = [_explain(item) for item in error.errors()]
            raise SpecError(f"{source}: " + "; ".join(lines)) from None


def find_topology(path: str | Path) -> Path:
    """A path as given, or the name of a topology that ships with the product."""
    file = Path(path)
    if file.is_file():
        return file
    shipped = TOPOLOGIES / (file.name if file.suffix else f"{file.name}.yaml")
    if shipped.is_file():
        return shipped
    known = ", ".join(sorted(p.stem for p in TOPOLOGIES.glob("*.yaml")))
    raise SpecError(f"no topology file {str(path)!r}; give a YAML file or one of: {known}")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["pools.decode.replicas=2"]` -> `{"pools.decode.replicas": 2}`; values are YAML."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        dotted, sign, text = pair.partition("=")
        if not sign or not dotted:
            raise SpecError(f"override {pair!r} is not KEY=VALUE, such as pools.decode.replicas=2")
        overrides[dotted] = yaml.safe_load(text)
    return overrides


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise SpecError(f"override {dotted}: {key} is {branch!r}, not a section")
        tree = branch
    tree[last] = value


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (types.UnionType,):
        return next((found for part in get_args(annotation) if (found := _section_of(part))), None)
    return None


def _unknown_keys(section: type[BaseModel], tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        field = section.model_fields.get(str(key))
        if field is None:
            yield f"unknown key {prefix}{key}; {_nearest(str(key), section.model_fields, 'known here', prefix)}"
        elif inner := _section_of(field.annotation):
            yield from _unknown_keys(inner, value, f"{prefix}{key}.")


def _nearest(name: str, known: Collection[str], all_of_them: str, prefix: str = "") -> str:
    """The way out for a name that is none of `known`: the nearest one, or all."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {prefix}{near[0]}?" if near else f"{all_of_them}: {', '.join(known)}"


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "configuration"
    if item["type"] == "missing":
        return f"{where} is missing; it has no default"
    shown = "" if isinstance(item.get("input"), dict | BaseModel) else f" (got {item.get('input')!r})"
    return f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}"
