"""Several models behind one address, as a typed YAML file: for each its application and its topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.spec import ClusterSpec, SpecError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelEntry(_Section):
    application: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="of Serve; also its route prefix")
    topology: str = Field(description="a file, from this file's folder on, or the name of a shipped one")
    settings: dict[str, Any] = Field(default={}, description="dotted settings that override the topology's")


class ModelsSpec(_Section):
    name: str = Field(default="models", description="of the application that leads requests to the others")
    replicas: int = Field(default=1, ge=1, description="of that application")
    models: tuple[ModelEntry, ...] = Field(min_length=1)

    @staticmethod
    def is_one(path: str | Path) -> bool:
        """Whether this is a file of several models, and no topology."""
        file = Path(path)
        try:
            tree = yaml.safe_load(file.read_text()) if file.is_file() else None
        except (OSError, yaml.YAMLError):
            return False
        return isinstance(tree, dict) and "models" in tree

    @classmethod
    def load(cls, path: str | Path) -> tuple[ModelsSpec, dict[str, ClusterSpec]]:
        """The file, and the topology of each application. Raises `SpecError`."""
        file = Path(path)
        try:
            spec = cls.model_validate(yaml.safe_load(file.read_text()))
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, ValidationError) as error:
            raise SpecError(f"{path}: {_words(error)}") from None
        topologies: dict[str, ClusterSpec] = {}
        for entry in spec.models:
            beside = file.parent / entry.topology
            topology = ClusterSpec.load(beside if beside.is_file() else entry.topology, entry.settings)
            if entry.application in (*topologies, spec.name):
                raise SpecError(f"{path}: models: application {entry.application!r} is named twice")
            topologies[entry.application] = topology
        _refuse_unlike(str(path), topologies)
        return spec, topologies


def _refuse_unlike(path: str, topologies: dict[str, ClusterSpec]) -> None:
    """One Serve listens at one address, and a name leads to one model."""
    names: dict[str, str] = {}
    first_name, first = next(iter(topologies.items()))
    for name, topology in topologies.items():
        served = topology.model.served_name
        if served in names:
            raise SpecError(
                f"{path}: {names[served]} and {name} both serve {served!r}; give one another `model.name` in settings"
            )
        names[served] = name
        for field in ("host", "port"):
            mine, other = getattr(topology.frontend, field), getattr(first.frontend, field)
            if mine != other:
                raise SpecError(
                    f"{path}: frontend.{field} is {mine} in {name} and {other} in {first_name}; one Serve has one, "
                    "so set both to the same"
                )


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors())
    return str(error)
