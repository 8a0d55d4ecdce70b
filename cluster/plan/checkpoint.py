"""What a checkpoint folder really holds, read from its safetensors headers; no tensor is loaded."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.plan.architecture import Architecture
from cluster.plan.facts import GIB, PlanError

# A header is JSON; a checkpoint with a million tensors stays below this.
HEADER_BYTES_MAX = 1 << 28


@dataclass(frozen=True)
class Stored:
    """Names and bytes of every tensor on disk."""

    bytes_by_name: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_by_name.values())

    def has_layer(self, layer: int) -> bool:
        return any(f"layers.{layer}." in name for name in self.bytes_by_name)

    def without_mtp(self, arch: Architecture) -> Architecture:
        """The config may announce prediction layers that were not saved."""
        return replace(arch, mtp_layers=0)

    def describe(self, planned: int) -> str:
        return (
            f"on disk: {len(self.bytes_by_name):,} tensors, {self.total / GIB:.4f} GiB, "
            f"{planned / self.total - 1:+.2%} planned"
        )


def stored(folder: Path) -> Stored | None:
    """The tensors of all `*.safetensors` in `folder`; None if there are none. Raises PlanError for a broken file."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                sizes[name] = int(end) - int(start)
    return Stored(sizes) if sizes else None


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > HEADER_BYTES_MAX:
                raise PlanError(f"{file}: header of {size:,} bytes; not a safetensors file")
            header = json.loads(stream.read(size))
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise PlanError(f"{file} is not a safetensors file: its header is {type(header).__name__}")
    return header
