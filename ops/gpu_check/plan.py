"""The stages of `make gpu-check`, in order, and what a stage is given. Limits are in seconds of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOT_S = 900
"""A GPU is lent for 15 minutes. What the limits leave of it is for starting the machine and copying the results."""
DRY_FACTOR = 20
"""A dry run is of the code's path, on a machine that may be busy; its limits only end what hangs."""
CALL_S = 600
"""The longest single command there: all stages but the last fit into one."""

Row = dict[str, Any]
"""One result. `ok` False: the stage has failed; without `ok` it is a figure only."""


@dataclass(frozen=True)
class Stage:
    """`module`: has `run(options) -> Iterator[Row]`. `needs`: packages without which the stage is skipped. `after`:
    stages that must have passed, since figures of wrong kernels are worth nothing."""

    name: str
    limit_s: int
    module: str
    needs: tuple[str, ...] = ("torch", "triton")
    after: tuple[str, ...] = ()

    def seconds(self, dry: bool) -> int:
        return self.limit_s * (DRY_FACTOR if dry else 1)


_ENGINE = ("torch", "triton", "vllm", "ray")
STAGES = (
    Stage("environment", 20, "ops.gpu_check.environment"),
    Stage("kernels", 170, "ops.gpu_check.kernels"),
    Stage("writers", 60, "ops.gpu_check.writers"),
    Stage("copies", 50, "ops.gpu_check.copies"),
    Stage("tag_check", 45, "ops.gpu_check.tag_check", needs=_ENGINE),
    Stage("worker_halves", 60, "ops.gpu_check.worker_halves", needs=_ENGINE, after=("kernels",)),
    Stage("rates", 130, "ops.gpu_check.rates", after=("kernels",)),
    Stage("engines", 270, "ops.gpu_check.engines", needs=_ENGINE, after=("kernels",)),
)


@dataclass(frozen=True)
class Options:
    """`dry`: small, on CPU tensors, without figures that mean anything. `writers`: vLLM's extension with its CUDA cache
    writers, where vLLM is not installed. `folder`: for what a stage writes."""

    folder: Path
    dry: bool = False
    writers: Path | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


def chosen(names: str) -> tuple[Stage, ...]:
    """By name, in the order of the plan; all of them for an empty string. Raises ValueError for a name that is none."""
    wanted = names.replace(",", " ").split()
    if unknown := set(wanted) - {stage.name for stage in STAGES}:
        raise ValueError(
            f"stages {', '.join(sorted(unknown))} are unknown; there are {', '.join(stage.name for stage in STAGES)}"
        )
    return tuple(stage for stage in STAGES if not wanted or stage.name in wanted)
