"""The laws of `actors.transfer.machine`, checked on its state. Pure.

1. `bytes_free + bytes_held == bytes_max`, and no two regions overlap.
2. A key that has ended holds bytes only while an engine or a copy may still touch them, and they are released.
3. A seal that stands for its reader has bytes that are not released.
4. A fetch that runs is a writer of its region; every writer and reader is an engine that lives or a copy that runs.
5. A key waits for bytes once, or has them, never both.
6. Half a seal and half an opening are kept only while their bytes are.
7. The stretch kept for the front of the queue is not lent to a lease that came after it.
8. Bytes that are not released are being written, being read, or sealed: nothing waits for a seal that cannot come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.messages import StagingStatus
from actors.transfer.peers import copy_name, fetch_name

if TYPE_CHECKING:
    from actors.transfer.machine import TransferMachine


def violations(machine: TransferMachine) -> list[str]:
    """Broken laws in plain words; empty when all hold."""
    return [*(f"{text} (law 1)" for text in machine.staging.breaches()), *_of_regions(machine), *_of_tables(machine)]


def _of_regions(machine: TransferMachine) -> Iterator[str]:
    users = {
        *machine.engines.links,
        *(fetch_name(fetch_id) for fetch_id in machine.fetches.running),
        *(copy_name(call_id) for call_id in machine.copies),
    }
    for region in machine.staging:
        if region.released and not region.in_use:
            yield f"{region.key} has ended, its bytes are not in use, and they are held (law 2)"
        if region.key in machine.ended and not region.released:
            yield f"{region.key} has ended and its bytes are not released (law 2)"
        if not (region.released or region.in_use or region.key in machine.outbox.standing):
            yield f"the bytes of {region.key} have neither writer, reader nor seal (law 8)"
        if strangers := (region.writers | region.readers) - users:
            yield f"{sorted(strangers)} may touch the bytes of {region.key} and are not here (law 4)"
    for fetch_id, key in machine.fetches.running.items():
        held = machine.staging.get(key)
        if held is None or fetch_name(fetch_id) not in held.writers:
            yield f"fetch {fetch_id} writes {key} without a claim to its bytes (law 4)"


def _of_tables(machine: TransferMachine) -> Iterator[str]:
    regions = {region.key: region for region in machine.staging}
    for key in machine.outbox.standing:
        if key not in regions or regions[key].released:
            yield f"the seal of {key} stands without bytes (law 3)"
    waiting = [w.key for w in machine.queue]
    for key in waiting:
        if key in regions:
            yield f"{key} waits for bytes that it has (law 5)"
        if waiting.count(key) > 1:
            yield f"{key} waits twice (law 5)"
    for key in machine.opening:
        if key not in regions:
            yield f"half an opening of {key} is kept (law 6)"
    for key in machine.seals:
        if key not in regions or regions[key].released:
            yield f"half a seal of {key} is kept (law 6)"
    if (kept := machine.queue.kept) is not None:
        _, offset, size = kept
        for region in machine.queue.came_later(regions.values()):
            if region.offset < offset + size and offset < region.offset + region.size:
                yield f"{region.key} came later and has bytes that are kept for {kept[0]} (law 7)"


def status(machine: TransferMachine) -> StagingStatus:
    """The node's staging and links as the controller hears of them, with every law that is broken."""
    return StagingStatus(
        node_id=machine.node_id,
        incarnation=machine.incarnation,
        bytes_held=machine.staging.bytes_held,
        bytes_max=machine.staging.bytes_max,
        leases=len(machine.staging),
        held=tuple(region.key for region in machine.staging if not region.released),
        bytes_moved=machine.bytes_moved,
        tokens_moved=machine.tokens_moved,
        breaches=tuple(machine.violations()),
        links=machine.links.status(machine.fetches.queued()),
    )
