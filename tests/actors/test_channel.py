"""The local socket: only what an honest peer would send is understood, and nothing is allocated on a peer's word."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import Opened, Role, Verdict
from actors.transfer.channel import (
    FRAME_BYTES_MAX,
    ChannelError,
    Frames,
    Hello,
    Offer,
    PagesOpened,
    PagesSealed,
    StagingMapped,
    WriterDone,
    decode_body,
    decode_offer,
    encode_frame,
    frame_length,
)
from actors.transfer.link import UNSENT_BYTES_MAX, WorkerLink
from actors.transfer.memory import StagingMemory

HELLO = Hello(engine="r#0", role=Role.PREFILL, pid=1)
MESSAGES: list[Any] = [
    HELLO,
    WriterDone(ticket_id=2**63, attempt=1),
    StagingMapped(segment="s", dropped=[(1, 2)]),
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
def test_a_message_survives_the_socket(message: Hello) -> None:
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


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 50))
def test_frames_come_out_whole_however_they_are_cut(sizes: list[int], cut: int) -> None:
    frames, bodies = Frames(), [bytes([i]) * size for i, size in enumerate(sizes)]
    data = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    out = [body for at in range(0, len(data), cut) for body in frames.feed(data[at : at + cut])]
    assert out == bodies


class Peer:
    """The other end, in a thread: what it got, and whether it reads at all."""

    def __init__(self, path: str, reads: bool = True) -> None:
        self.got: list[object] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        self._conn: socket.socket | None = None
        self._thread = threading.Thread(target=self._receive, args=(reads,), daemon=True)
        self._thread.start()

    def _receive(self, reads: bool) -> None:
        try:
            self._conn, _ = self._server.accept()
            frames = Frames()
            while reads and (data := self._conn.recv(1 << 16)):
                self.got += [decode_body(body) for body in frames.feed(data)]
        except OSError:
            pass

    def close(self) -> None:
        for sock in (self._conn, self._server):
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                sock.close()
        self._thread.join(5)


def until(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_the_link_connects_again_when_its_peer_is_back(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    link = WorkerLink(path, HELLO)
    link.RETRY_S = 0.05  # type: ignore[misc]
    assert link.send(MESSAGES[1]) is False and link.dropped == 1  # no peer: dropped, and at once
    for _ in range(2):
        connects_and_sends(link, Peer(path))
        os.unlink(path)
        until(lambda: not link.send(MESSAGES[2]))
    link.close()


def connects_and_sends(link: WorkerLink, peer: Peer) -> None:
    until(lambda: link.send(MESSAGES[1]))
    until(lambda: len(peer.got) >= 2)
    assert peer.got[:2] == [HELLO, MESSAGES[1]]
    peer.close()


def test_a_peer_that_does_not_read_costs_its_messages_and_no_time(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    peer = Peer(path, reads=False)
    link = WorkerLink(path, HELLO)
    message = MESSAGES[3]
    longest = 0.0
    for _ in range(2 * UNSENT_BYTES_MAX // len(encode_frame(message))):
        began = time.perf_counter()
        link.send(message)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 1.0
    assert link.dropped > 0 and link._unsent_bytes <= UNSENT_BYTES_MAX + FRAME_BYTES_MAX
    peer.close()
    link.close()


@pytest.mark.parametrize(("num_bytes", "sealed"), [(1 << 20, True), (4096, True), (1 << 20, False)])
def test_only_memory_of_a_size_that_cannot_change_is_mapped(tmp_path: Path, num_bytes: int, sealed: bool) -> None:
    good = StagingMemory(1 << 20)
    fd = good.fd if sealed else os.memfd_create("x", os.MFD_ALLOW_SEALING)
    if not sealed:
        os.ftruncate(fd, 1 << 20)
    peer = Peer(str(tmp_path / "s"))
    link = WorkerLink(str(tmp_path / "s"), HELLO)
    until(lambda: peer._conn is not None)
    assert peer._conn is not None
    offer = Offer(segment="s", num_bytes=num_bytes, revoked=[(1, 2)])
    socket.send_fds(peer._conn, [encode_frame(offer)], [fd])
    if sealed and num_bytes == 1 << 20:
        until(lambda: StagingMapped(segment="s", dropped=[(1, 2)]) in peer.got)
    else:
        until(lambda: not peer._thread.is_alive())
        assert link.staging._map is None
    peer.close()
    link.close()
    good.close()


def test_an_offer_survives_the_way() -> None:
    offer = Offer(segment="s", num_bytes=5, revoked=[(1, 2)])
    assert decode_offer(encode_frame(offer)[4:]) == offer
    with pytest.raises(ChannelError, match="not understood"):
        decode_offer(b"garbage")
