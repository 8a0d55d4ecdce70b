"""What vLLM's engine processes leave when they are killed: named shared memory in /dev/shm, and sockets.

vLLM's queues between an engine core and its workers are files there, unlinked by their creator when it ends by itself.
Its sockets, which nothing unlinks, get a folder for each process that has engines. Each replica notes the files of its
engine's processes; each start and end of a replica removes files and folder whose noted processes are all dead. A file
that no note names is never touched, since it may be another program's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from actors.transfer.memory import socket_folder

SHM = Path("/dev/shm")
SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder in which vLLM makes its sockets, named by UUIDs
_NAME = re.compile(r"/dev/shm/((?:psm_|sem\.)\S+)$")


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Names of the files that these processes have mapped now."""
    mapped = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it has ended
        mapped |= {match[1] for line in maps.splitlines() if (match := _NAME.search(line)) is not None}
    return mapped


def descendants(pid: int) -> set[int]:
    """The process and its children, theirs included."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    processes, ahead = set(), [pid]
    while ahead:
        processes.add(one := ahead.pop())
        ahead += parents.get(one, [])
    return processes


def begin() -> None:
    """Before this process's first engine: removes what is left of others, and makes a folder for its sockets."""
    sweep()
    folder = socket_folder() / f"zmq-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[SOCKETS] = str(folder)
    _write(os.getpid(), [[os.getpid(), _started(os.getpid())]], set())


def note(pid: int) -> None:
    """Writes down what the children of the process have mapped, for the next process on this machine."""
    mapped = {child: mapped_by([child]) for child in sorted(descendants(pid) - {pid})}
    owners = [[child, started] for child, files in mapped.items() if files and (started := _started(child))]
    _write(pid, owners, set().union(*mapped.values()))


def _write(pid: int, owners: list[list[int]], files: set[str]) -> None:
    content = {"namespace": _namespace(), "owners": owners, "files": sorted(files)}
    path = socket_folder() / f"shm-{pid}.json"
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


def sweep() -> list[str]:
    """Unlinks the files and the folder of every note whose processes are all dead. Returns the files' names."""
    swept = []
    for path in socket_folder().glob("shm-*.json"):
        try:
            content = json.loads(path.read_text())
            owners = [(int(pid), int(started)) for pid, started in content["owners"]]
            names = [str(name) for name in content["files"] if "/" not in str(name)]
            if content["namespace"] != _namespace():
                continue  # those process ids mean nothing here
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another process was faster, or wrote it
        if any(_started(pid) == started for pid, started in owners):
            continue
        for name in names:
            if (SHM / name).exists():
                (SHM / name).unlink(missing_ok=True)
                swept.append(name)
        shutil.rmtree(path.with_name(f"zmq-{path.stem.removeprefix('shm-')}"), ignore_errors=True)
        path.unlink(missing_ok=True)
    return swept


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when the process is gone or only waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _started(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 when it is gone. Tells it from a later one of its number."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _namespace() -> str:
    return f"{os.readlink('/proc/self/ns/pid')} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
