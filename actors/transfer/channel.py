"""How an engine's worker half and its node's transfer actor talk: typed, bounded messages over a local socket.

The bytes of the pages never pass here; they lie in shared memory that both have mapped. A frame is a big-endian
32-bit length and a MessagePack body; the length is checked before memory is taken for it, and the body is decoded
against the declared types.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec

from actors.messages import Lease, Opened, Role

FRAME_BYTES_MAX = 8 << 20
_LENGTH = struct.Struct(">I")
SHM = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"pageferry-[0-9a-f]{1,16}-[0-9]{1,10}")


class ChannelError(ValueError):
    """A frame or a name that no honest peer would send."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    engine: str  # "<replica id>#<rank>": who may touch leases
    role: Role
    pid: int


class PagesSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pages `first_page ...` of a ticket are in staging; `digests[i]` is the digest of page `first_page + i`."""

    ticket_id: int
    attempt: int
    shard: int
    num_shards: int
    first_page: int
    digests: list[int]
    layout_fingerprint: str
    num_tokens: int  # of the whole prompt
    last: bool


class WriterDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine will not write for the ticket any more, sealed or not."""

    ticket_id: int
    attempt: int


class PagesOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine has read what it wanted of the ticket's bytes and will not touch them again."""

    opened: Opened
    shard: int = 0
    num_shards: int = 1


class LeasesDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine touches the bytes of these (ticket_id, attempt) no more, as `Offer.revoked` asked."""

    keys: list[tuple[int, int]]


WorkerMessage = Hello | PagesSealed | WriterDone | PagesOpened | LeasesDropped

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerMessage)


def encode_frame(message: WorkerMessage) -> bytes:
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ChannelError(f"{type(message).__name__} of {len(body)} bytes; the most is {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > FRAME_BYTES_MAX:
        raise ChannelError(f"frame of {length} bytes announced; the most is {FRAME_BYTES_MAX}")
    return length


def decode_body(body: bytes) -> WorkerMessage:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ChannelError(f"message of {len(body)} bytes is not understood: {error}") from None


class WorkerLink:
    """The worker half's end: sends and never waits for an answer.

    A thread keeps the connection up, also while nothing is sent: from its end the peer learns that this process has
    died and can touch no bytes any more. A message that cannot be sent is dropped: the ticket's deadline covers it.
    Thread-safe.
    """

    RETRY_S = 0.5

    def __init__(self, path: str, hello: Hello) -> None:
        self._path = path
        self._hello = hello
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._next_try = 0.0
        self._closed = threading.Event()
        self.dropped = 0
        self._connect()
        threading.Thread(target=self._keep, name="pageferry-link", daemon=True).start()

    def _connect(self) -> bool:
        if time.monotonic() < self._next_try:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
            sock.sendall(encode_frame(self._hello))
        except OSError:
            sock.close()
            self._next_try = time.monotonic() + self.RETRY_S
            return False
        self._socket = sock
        return True

    def _keep(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                sock = self._socket if self._socket is not None or self._connect() else None
            if sock is None:
                self._closed.wait(max(0.01, self.RETRY_S))
                continue
            try:
                over = not sock.recv(1)  # the peer never sends: this returns when the connection ends
            except OSError:
                over = True
            if over:
                with self._lock:
                    self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        if self._socket is sock:
            self._socket = None
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        sock.close()

    def send(self, message: WorkerMessage) -> bool:
        frame = encode_frame(message)
        with self._lock:
            for _ in range(2):
                if self._socket is None and not self._connect():
                    break
                assert self._socket is not None
                try:
                    self._socket.sendall(frame)
                    return True
                except OSError:
                    self._drop(self._socket)
            self.dropped += 1
            return False

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                self._drop(self._socket)


class Segments:
    """Shared memory files mapped into this process, by name; each at most once."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, lease: Lease) -> memoryview | None:
        """The lease's bytes, writable; None when the segment is gone or does not reach that far."""
        mapped = self._maps.get(lease.segment) or self._map(lease.segment)
        end = lease.offset + lease.num_bytes
        if mapped is None or lease.offset < 0 or lease.num_bytes <= 0 or end > len(mapped):
            return None
        return memoryview(mapped)[lease.offset : end]

    def _map(self, name: str) -> mmap.mmap | None:
        if not SEGMENT_NAME.fullmatch(name):
            raise ChannelError(f"segment name {name!r} is not one of ours")
        try:
            handle = os.open(SHM / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            # Populated at once: a first touch of each page inside a step would cost a fault a page.
            mapped = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(handle)
        # One live segment a node: whatever was mapped before belonged to a transfer actor that is gone.
        # The old map is not closed here, since a reader thread may still look at it; it goes with its last view.
        self._maps = {name: mapped}
        return mapped


def create_segment(node_tag: str, num_bytes: int) -> tuple[str, mmap.mmap]:
    """A fresh shared memory file of this process, with its memory really reserved (no SIGBUS later).

    Its owner holds a lock on it for life (the map keeps the descriptor), so whoever comes next can tell a segment
    whose owner was killed, whatever its pid namespace, and takes it away.
    """
    sweep_segments()
    name = f"pageferry-{node_tag}-{os.getpid()}"
    path, unborn = SHM / name, SHM / f".{name}"
    handle = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.posix_fallocate(handle, 0, num_bytes)
        mapped = mmap.mmap(handle, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.rename(unborn, path)
        return name, mapped
    except OSError as error:
        unborn.unlink(missing_ok=True)
        raise ChannelError(
            f"transfer.staging_bytes_max {num_bytes} cannot be reserved in {SHM} ({error.strerror}); "
            "lower it or give the machine (or container: --shm-size) more shared memory"
        ) from None
    finally:
        os.close(handle)


def sweep_segments() -> list[str]:
    """Unlinks segments whose owner is gone and returns their names."""
    swept = []
    for file in SHM.glob("pageferry-*"):
        if not SEGMENT_NAME.fullmatch(file.name):
            continue
        try:
            handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)
            swept.append(file.name)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(handle)
    return swept
