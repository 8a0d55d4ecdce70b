"""A node's staging memory: anonymous (memfd), so that it has no name that can leak, collide or be taken away.

The transfer actor makes it and hands its descriptor to the node's engines over the local socket. The kernel frees it
when the last process that has it open or mapped has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path

SOCKET_PATH_MAX = 107  # bytes; the kernel's limit for the address of a Unix socket
SOCKET_NAME_MAX = 50  # bytes of it for the file, whose tag has 20 at most
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryRefused(ValueError):
    """Staging memory or its socket cannot be had here; the message names the setting and the way out."""


class StagingMemory:
    """`num_bytes` of shared memory, really reserved (no SIGBUS later), of a size that cannot be changed."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd, self.huge_pages = _reserve(num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def give_back(self) -> None:
        """Frees the memory now, also where engines still have it mapped: there it reads as zeros."""
        self.map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_offered(fd: int, num_bytes: int) -> mmap.mmap:
    """The staging memory that a transfer actor offers, mapped into this process. Raises when it is not as said."""
    if os.fstat(fd).st_size != num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise MemoryRefused(
            f"staging memory of {num_bytes} bytes was offered; the descriptor is of another size or open"
        )
    # Populated at once: a first touch of each page inside a step would cost a fault a page.
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _reserve(num_bytes: int) -> tuple[int, bool]:
    """A descriptor, and whether its pages are huge ones."""
    if num_bytes % _huge_page_bytes() == 0:
        try:
            return _allocate(num_bytes, os.MFD_HUGETLB), True
        except OSError:
            pass  # the kernel has none left, or none at all
    available = available_bytes()
    if num_bytes <= available:
        try:
            return _allocate(num_bytes, 0), False
        except OSError:
            pass
    raise MemoryRefused(
        f"transfer.staging_bytes_max {num_bytes} cannot be reserved: {available} bytes of memory are left here; "
        "lower it or give the machine (or container) more memory"
    )


def _allocate(num_bytes: int, flags: int) -> int:
    fd = os.memfd_create("pageferry-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _huge_page_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # none


def available_bytes() -> int:
    """Memory that can be had without swapping, and not more than the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue  # another cgroup version, or "max"
    return available


def socket_path(tag: str, node_id: str) -> str:
    """Where engines find the transfer actor of a node. The same in every life of the actor."""
    return str(socket_folder() / f"transfer-{tag}-{node_id[:12]}.sock")


def socket_folder() -> Path:
    """The folder of this user's sockets and notes, which no other user can enter.

    In TMPDIR, or in /tmp where TMPDIR (as of a batch system) is too long for a socket's path.
    """
    name = f"pageferry-{os.getuid()}"
    folder = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(folder)) + SOCKET_NAME_MAX > SOCKET_PATH_MAX:
        folder = Path("/tmp", name)
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise MemoryRefused(
            f"{folder} must be a folder of user {os.getuid()} that no other user can enter (mode 700); "
            f"it is of user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):o}: remove it or set TMPDIR"
        )
    return folder
