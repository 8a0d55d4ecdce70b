"""Where a transfer actor has its memory and its socket, and what settings change of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from live_transfer import MIB, Node, until

from actors.transfer import memory
from actors.transfer.actor import KVTransfer
from actors.transfer.memory import MemoryRefused


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.transfer.start()
    try:
        yield made
    finally:
        await made.close()


async def test_a_changed_setting_takes_effect_and_engines_follow(node: Node) -> None:
    link = await node.link()
    first = await node.lease(1)
    await node.transfer.start(4 * MIB, 30.0)
    waiting = asyncio.ensure_future(node.transfer.lease(2, 1, 3 * MIB, ["p#0"], 20.0))
    await asyncio.sleep(0.05)
    assert not waiting.done() and node.transfer.status().bytes_max == MIB, "the old one is in use"
    await node.transfer.drop_writer(1, 1, ["p#0"])
    lease = await waiting
    assert lease is not None and lease.segment != first.segment
    assert node.transfer.status().bytes_max == 4 * MIB and node.machine.lease_ns == 30 * 10**9
    with link.staging.bytes_of(lease) as view:
        assert view is not None and len(view) == 3 * MIB
        view[-1] = 7
    assert node.transfer.memory.map[lease.offset + 3 * MIB - 1] == 7
    with link.staging.bytes_of(first) as view:
        assert view is None


async def test_a_size_that_is_not_there_leaves_the_old_one_working(node: Node) -> None:
    link = await node.link()
    await node.transfer.start(1 << 50, 30.0)
    await until(lambda: node.transfer.status().bytes_max == MIB and not node.machine._making)
    lease = await node.lease(1)
    with link.staging.bytes_of(lease) as view:
        assert view is not None


def test_more_memory_than_the_machine_has_is_refused_at_once() -> None:
    with pytest.raises(MemoryRefused, match=r"transfer\.staging_bytes_max .* bytes of memory are left"):
        KVTransfer("n", 1 << 50, 1.0, "")


def test_huge_pages_are_used_only_where_the_kernel_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    free = int(next(Path("/sys/kernel/mm/hugepages").glob("hugepages-2048kB")).joinpath("free_hugepages").read_text())
    staging = memory.StagingMemory(4 * MIB)
    assert staging.huge_pages == (free >= 2)
    staging.close()


async def test_a_long_temporary_folder_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems have paths that are too long for a Unix socket."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    node = Node()
    await node.transfer.start()
    try:
        await node.link()
    finally:
        await node.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_folder_that_others_can_enter_is_refused(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folder = short_path / f"pageferry-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(MemoryRefused, match="mode 755: remove it or set TMPDIR"):
        KVTransfer("n", MIB, 1.0, "")
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(MemoryRefused, match="must be a folder of user"):
        KVTransfer("n", MIB, 1.0, "")
