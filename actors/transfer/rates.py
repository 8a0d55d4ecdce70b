"""What the links to other nodes carry, as fetches and a probe have measured it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.messages import LinkStatus
from actors.transfer.events import LinkProbed, Measured

KEEPS = 0.8  # of what was measured before, at each new fetch
BYTES_MIN = 1 << 20  # a smaller fetch measures the round trip, not the rate


@dataclass(slots=True)
class _Link:
    way: str = ""
    num_bytes: float = 0.0  # decaying sums
    busy_ns: float = 0.0
    round_trip_ns: int = 0
    fetches: int = 0
    failed: int = 0
    chunks_again: int = 0
    reason: str = ""  # of the latest failure


class LinkRates:
    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def probed(self, event: LinkProbed) -> None:
        link = self._links.setdefault(event.node_id, _Link())
        link.way, link.reason = event.way, event.reason
        link.round_trip_ns = event.round_trip_ns
        self._learn(link, event.num_bytes, event.busy_ns)

    def moved(self, measured: Measured) -> None:
        link = self._links.setdefault(measured.node_id, _Link())
        link.fetches += 1
        link.chunks_again += measured.asked_again
        if measured.complete:
            link.way = measured.way
            self._learn(link, measured.num_bytes, measured.busy_ns)
        elif measured.reason:
            link.failed, link.reason = link.failed + 1, measured.reason

    @staticmethod
    def _learn(link: _Link, num_bytes: int, busy_ns: int) -> None:
        if num_bytes >= BYTES_MIN and busy_ns > 0:
            link.num_bytes = KEEPS * link.num_bytes + num_bytes
            link.busy_ns = KEEPS * link.busy_ns + busy_ns

    def status(self, queued: Mapping[str, int]) -> tuple[LinkStatus, ...]:
        """`queued`: bytes that are wanted from a node and not there."""
        return tuple(
            LinkStatus(
                node_id=node_id,
                way=link.way,
                bytes_per_s=round(link.num_bytes / link.busy_ns * 1e9) if link.busy_ns else 0,
                round_trip_s=link.round_trip_ns / 1e9,
                queued_bytes=queued.get(node_id, 0),
                fetches=link.fetches,
                failed=link.failed,
                chunks_again=link.chunks_again,
                reason=link.reason,
            )
            for node_id, link in sorted((self._links | {n: _Link() for n in queued if n not in self._links}).items())
        )
