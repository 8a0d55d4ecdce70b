"""The local socket: only what an honest peer would send is understood, and nothing is allocated on a peer's word."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import Lease, Opened, Role, Verdict
from actors.transfer.channel import (
    FRAME_BYTES_MAX,
    ChannelError,
    Hello,
    PagesOpened,
    PagesSealed,
    Segments,
    WorkerLink,
    WriterDone,
    create_segment,
    decode_body,
    encode_frame,
    frame_length,
    sweep_segments,
)

HELLO = Hello(engine="r#0", role=Role.PREFILL, pid=1)
MESSAGES: list[Any] = [
    HELLO,
    WriterDone(ticket_id=2**63, attempt=1),
    PagesSealed(
        ticket_id=1,
        attempt=1,
        shard=0,
        num_shards=1,
        first_page=0,
        digests=[2**64 - 1],
        layout_fingerprint="f",
        num_tokens=3,
        last=True,
    ),
    PagesOpened(
        opened=Opened(
            ticket_id=1,
            attempt=1,
            replica_id="d",
            num_pages=2,
            num_bytes=8,
            num_tokens=3,
            verdicts={Verdict.OK: 2},
            seconds=0.1,
        )
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_road(message: Hello) -> None:
    frame = encode_frame(message)
    assert frame_length(frame[:4]) == len(frame) - 4
    assert decode_body(frame[4:]) == message


@given(st.binary(max_size=200))
def test_garbage_is_an_error_and_never_anything_else(body: bytes) -> None:
    try:
        decode_body(body)
    except ChannelError:
        pass


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "Hello", "engine": 3, "role": "prefill", "pid": 1},
        {"type": "Hello", "engine": "x", "role": "boss", "pid": 1},
        {"type": "WriterDone", "ticket_id": "1", "attempt": 1},
        {"type": "Unknown"},
        {"type": "PagesSealed", "ticket_id": 1},
    ],
)
def test_wrong_types_are_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ChannelError, match="not understood"):
        decode_body(msgspec.msgpack.encode(tree))


def test_a_long_frame_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ChannelError, match="the most is"):
        frame_length(struct.pack(">I", FRAME_BYTES_MAX + 1))
    with pytest.raises(ChannelError, match="the most is"):
        encode_frame(Hello(engine="x" * (FRAME_BYTES_MAX + 1), role=Role.DECODE, pid=1))


def test_the_link_connects_again_when_its_peer_is_back(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def receive(server: socket.socket, count: int, into: list[object]) -> None:
        conn, _ = server.accept()
        with conn:
            for _ in range(count):
                head = conn.recv(4, socket.MSG_WAITALL)
                into.append(decode_body(conn.recv(frame_length(head), socket.MSG_WAITALL)))

    def serve(count: int) -> tuple[socket.socket, threading.Thread, list[object]]:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        got: list[object] = []
        thread = threading.Thread(target=receive, args=(server, count, got))
        thread.start()
        return server, thread, got

    link = WorkerLink(path, HELLO)
    assert link.send(MESSAGES[1]) is False and link.dropped == 1  # nobody there: dropped, never blocked
    link.RETRY_S = 0.0  # type: ignore[misc]
    link._next_try = 0.0
    server, thread, got = serve(2)
    assert link.send(MESSAGES[1])
    thread.join(5)
    server.close()
    os.unlink(path)
    assert got == [HELLO, MESSAGES[1]]
    server, thread, got = serve(2)
    for _ in range(3):  # the first send may still go into the dead socket's buffer
        link.send(MESSAGES[2])
    thread.join(5)
    server.close()
    link.close()
    assert got[0] == HELLO and got[1] == MESSAGES[2]


def lease(segment: str, offset: int, num_bytes: int) -> Lease:
    return Lease(ticket_id=1, attempt=1, node_id="n", segment=segment, offset=offset, num_bytes=num_bytes)


def test_segments_are_mapped_by_name_and_bounded() -> None:
    name, memory = create_segment("a1", 1 << 20)
    try:
        segments = Segments()
        view = segments.view(lease(name, 4096, 10))
        assert view is not None
        view[:3] = b"abc"
        assert memory[4096:4099] == b"abc"
        assert segments.view(lease(name, (1 << 20) - 5, 10)) is None
        assert segments.view(lease(name, -1, 10)) is None
        assert segments.view(lease(name, 0, 0)) is None
        assert segments.view(lease("pageferry-b2-1", 0, 10)) is None  # no such file
        for evil in ("../../etc/passwd", "pageferry-/x-1", "other"):
            with pytest.raises(ChannelError, match="not one of ours"):
                segments.view(lease(evil, 0, 1))
    finally:
        Path("/dev/shm", name).unlink()


def test_segments_of_dead_processes_are_swept() -> None:
    dead = Path("/dev/shm/pageferry-a2-4194304")  # nobody holds its lock
    dead.write_bytes(b"x")
    alive, memory = create_segment("a4", 1 << 20)
    name, other = create_segment("a2", 1 << 20)
    try:
        assert not dead.exists() and Path("/dev/shm", alive).exists()
        memory.close()
        assert alive in sweep_segments()
    finally:
        other.close()
        sweep_segments()
    assert not Path("/dev/shm", name).exists()


def test_more_than_the_machine_has_is_refused_at_once() -> None:
    with pytest.raises(ChannelError, match="staging_bytes_max"):
        create_segment("a3", 1 << 50)
    assert not list(Path("/dev/shm").glob("pageferry-a3-*"))
