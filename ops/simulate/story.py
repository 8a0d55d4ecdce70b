"""A run as lines to read: what struck, what the controller said, how every request ended, in order of time."""

from __future__ import annotations

from ops.simulate.cluster import BEGIN_NS, ClusterSim
from ops.simulate.world import SECOND


def story(cluster: ClusterSim) -> list[str]:
    """Each line begins with the time since the first request may come, seconds."""
    lines: list[tuple[int, str]] = [
        (
            BEGIN_NS + fault.at_ns,
            f"FAULT {fault.kind}" + (f" for {fault.duration_ns / SECOND:g} s" if fault.duration_ns else ""),
        )
        for fault in cluster.scenario.faults
    ]
    lines += cluster.controller.log
    for record in cluster.records:
        wanted = f"{record.prompt_tokens} + {record.output_tokens} tokens"
        lines.append((record.arrival_ns, f"{record.request_id} comes: {wanted}, {record.recovery}"))
        if record.ends:
            end = f"{record.request_id} {record.outcome} with {record.position} tokens"
            lines.append((record.end_ns, f"{end}: {record.detail}" if record.detail else end))
    return [f"{(at_ns - BEGIN_NS) / SECOND:8.3f} s  {text}" for at_ns, text in sorted(lines, key=lambda line: line[0])]


def missing(lines: list[str], expected: tuple[str, ...]) -> list[str]:
    """Expected texts that the story does not have after those before them."""
    found, at = [], 0
    for text in expected:
        here = next((i for i in range(at, len(lines)) if text in lines[i]), None)
        if here is None:
            found.append(f"the story does not say: {text}")
        else:
            at = here
    return found
