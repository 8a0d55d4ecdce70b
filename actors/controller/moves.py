"""What a node's staging has room for, and what moving pages to another node takes. Pure.

A link's rate is what the node at its end has measured; bytes that it waits for already go before.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.controller.forecast import SECOND
from actors.controller.journal import Tracked
from actors.controller.registry import Registry

UNMEASURED_BYTES_PER_S = 1_000_000_000  # of a link that has carried nothing yet


@dataclass(frozen=True, slots=True)
class Move:
    """`num_bytes` 0: they stay on their node."""

    num_bytes: int = 0
    queued_bytes: int = 0
    bytes_per_s: int = 0
    took_ns: int = 0

    def __str__(self) -> str:
        if not self.num_bytes:
            return "same node"
        queue = f" after {self.queued_bytes / 1e6:.1f} MB" if self.queued_bytes else ""
        measured = f"{self.bytes_per_s / 1e6:,.0f} MB/s" if self.bytes_per_s else "a link not measured yet"
        return f"{self.num_bytes / 1e6:.1f} MB between nodes in {self.took_ns / 1e6:,.1f} ms ({measured}{queue})"


@dataclass(slots=True)
class Staging(Tracked):
    """`bytes_max`: of a node that has not reported yet."""

    registry: Registry
    bytes_max: int

    def most(self, node_id: str) -> int:
        node = self.registry.nodes.get(node_id)
        return self.bytes_max if node is None else node.status.bytes_max

    def has(self, node_id: str, num_bytes: int) -> bool:
        taken = self.registry.staged.get(node_id, 0)
        return not taken or taken + num_bytes <= self.most(node_id)

    def move(self, num_bytes: int, source: str, target: str) -> Move:
        if source == target:
            return Move()
        node = self.registry.nodes.get(target)
        link = next((each for each in node.status.links if each.node_id == source), None) if node else None
        queued, rate, trip_ns = (link.queued_bytes, link.bytes_per_s, link.round_trip_s * SECOND) if link else (0, 0, 0)
        took_ns = trip_ns + (queued + num_bytes) * SECOND / (rate or UNMEASURED_BYTES_PER_S)
        return Move(num_bytes, queued, rate, int(took_ns))
