"""Shared memory that killed engine processes leave behind: taken away by who comes next, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine import engine_shm
from actors.transfer.memory import socket_folder

# As vLLM's engine core does it, and with the resource tracker killed as well: no process is left to unlink.
ENGINE = """
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield


def engine() -> tuple[subprocess.Popen[str], Path, int]:
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, tracker = process.stdout.readline().split()
    process.stdout.close()
    return process, Path("/dev/shm", name), int(tracker)


def test_files_go_when_every_process_that_had_them_is_dead() -> None:
    process, file, tracker = engine()
    other, others_file, _ = engine()
    try:
        engine_shm.note(process.pid)  # of its children: it has none
        engine_shm.note(os.getpid())
        assert {file.name, others_file.name} <= engine_shm.mapped_by([process.pid, other.pid])
        os.kill(tracker, 9)
        process.kill()
        process.wait()
        assert file.name not in engine_shm.sweep() and file.exists(), "the other engine of the note lives"
        stranger = Path("/dev/shm", f"psm_{os.getpid()}_{time.monotonic_ns()}")
        stranger.write_bytes(b"x")
        other.terminate()
        other.wait()
        assert file.name in engine_shm.sweep()
        assert not file.exists() and stranger.exists()
        assert engine_shm.sweep() == []
        stranger.unlink()
    finally:
        for each in (process, other):
            each.kill()
            each.wait()
        file.unlink(missing_ok=True)


def test_sockets_of_a_killed_engine_go_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_shm.SOCKETS, "/tmp")
    engine_shm.begin()
    folder = Path(os.environ[engine_shm.SOCKETS])
    assert folder.parent == socket_folder() and folder.stat().st_mode & 0o777 == 0o700
    (folder / "43a30d4f-0a0e-4d6f-a2b1-3b1a6f9a2c11").touch()
    assert engine_shm.sweep() == [] and folder.exists(), "this process lives"
    process, file, tracker = engine()
    try:
        engine_shm.note(os.getpid())
        assert engine_shm.sweep() == [] and folder.exists()
        os.kill(tracker, 9)
        process.kill()
        process.wait()
        assert engine_shm.sweep() == [file.name]
        assert list(socket_folder().iterdir()) == []
    finally:
        file.unlink(missing_ok=True)


def test_a_later_process_of_the_same_number_is_another_one() -> None:
    process, file, tracker = engine()
    try:
        engine_shm.note(os.getpid())
        os.kill(tracker, 9)
        process.kill()
        process.wait()
        [note] = socket_folder().glob("shm-*.json")
        # As if its number had been given to this process, which began at another time.
        note.write_text(note.read_text().replace(f"[[{process.pid},", f"[[{os.getpid()},"))
        assert engine_shm.sweep() == [file.name]
    finally:
        file.unlink(missing_ok=True)


def test_notes_of_another_namespace_or_that_are_damaged_are_left_alone() -> None:
    folder = socket_folder()
    (folder / "shm-1.json").write_text('{"namespace": "other", "owners": [], "files": ["psm_x"]}')
    (folder / "shm-2.json").write_text("{")
    assert engine_shm.sweep() == []
    assert len(list(folder.iterdir())) == 2
