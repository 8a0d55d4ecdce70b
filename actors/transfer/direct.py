"""Pages over a TCP connection between two transfer actors, straight from staging memory into staging memory.

Threads move the bytes, never an event loop. Who connects proves that it was invited, as on the link between frontend
and replica: the secret came over Ray, for one connection. Requests are bounded MessagePack; an answer is a head, the
bytes and their checksum. The bytes are copied into the socket, not lent to it (`sendfile` would leave pages of
staging in its queue): once a chunk is sent, its region may be lent again.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import socket
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from actors import link
from actors.messages import Lease
from actors.transfer import chunks

logger = logging.getLogger("pageferry.transfer")

REQUEST_BYTES_MAX = 4096
SLICE_BYTES = 1 << 20
GREETING_S = 10.0
SEND_S = 10.0  # for a slice: a peer that takes nothing for so long is given up
CONNECT_S = 3.0
CONNECTIONS_MAX = 256
PROBE_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">?I")  # whether the bytes follow, and how many
_CHECKSUM = struct.Struct(">I")


class ReadChunk(msgspec.Struct, frozen=True):
    """`lease` None: a probe, answered with zeros."""

    lease: Lease | None
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Bytes that may be sent until `done` is called. `stopped`: they are not wanted any more."""

    view: memoryview
    stopped: Callable[[], bool]
    done: Callable[[], None]


_encoder = msgspec.msgpack.Encoder()
_request = msgspec.msgpack.Decoder(ReadChunk)
_challenge = msgspec.msgpack.Decoder(link.Challenge)
_hello = msgspec.msgpack.Decoder(link.Hello)


def _tune(sock: socket.socket) -> None:
    """No waiting for more to send, and an idle connection whose other end has vanished ends within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(sock: socket.socket, message: msgspec.Struct) -> None:
    body = _encoder.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        data = sock.recv(num_bytes - len(parts))
        if not data:
            raise EOFError("the connection has ended")
        parts += data
    return bytes(parts)


def _receive_message(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if length > REQUEST_BYTES_MAX:
        raise link.LinkError(f"a frame of {length} bytes is announced; at most {REQUEST_BYTES_MAX} are taken")
    return _receive(sock, length)


class PageServer:
    """`grant(lease, first, num_bytes)` is called in a thread of the connection; None: there are no such bytes."""

    def __init__(self, host: str, grant: Callable[[Lease, int, int], Grant | None]) -> None:
        self._grant = grant
        self._numbers = itertools.count(1)
        self._invited: dict[int, bytes] = {}
        self.sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="pages-accept", daemon=True).start()

    def invite(self) -> link.Address:
        """An address and a secret for one connection."""
        number, secret = next(self._numbers), os.urandom(link.SECRET_BYTES)
        self._invited[number] = secret
        while len(self._invited) > CONNECTIONS_MAX:
            self._invited.pop(next(iter(self._invited)), None)
        return link.Address(self.host, self.port, number, secret)

    def close(self) -> None:
        self._closed = True
        for sock in (self._listener, *tuple(self.sockets)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("connections of other nodes are taken no more: %s", error)
                return
            if self._closed or len(self.sockets) >= CONNECTIONS_MAX:
                sock.close()
                continue
            self.sockets.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="pages", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            _tune(sock)
            sock.settimeout(GREETING_S)
            self._greet(sock)
            while True:
                sock.settimeout(None)  # an idle connection stands until its peer ends it
                request = _request.decode(_receive_message(sock))
                sock.settimeout(SEND_S)
                self._answer(sock, request)
        except (OSError, EOFError):
            pass  # the other node asks again, on another connection
        except (link.LinkError, msgspec.DecodeError) as error:
            logger.warning("a connection of another node was refused: %s", error)
        finally:
            self.sockets.discard(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        nonce = os.urandom(link.NONCE_BYTES)
        _send(sock, link.Challenge(nonce))
        hello = _hello.decode(_receive_message(sock))
        secret = self._invited.pop(hello.invitation, b"")
        if not secret or not hmac.compare_digest(hello.proof, link.proof(secret, nonce)):
            raise link.LinkError("who connected was not invited")

    def _answer(self, sock: socket.socket, request: ReadChunk) -> None:
        if not 0 < request.num_bytes <= chunks.CHUNK_BYTES:
            raise link.LinkError(f"a chunk of {request.num_bytes} bytes was asked for")
        if request.lease is None:
            _send_bytes(sock, memoryview(bytes(request.num_bytes)), lambda: False)
            return
        grant = self._grant(request.lease, request.first, request.num_bytes)
        if grant is None:
            sock.sendall(_HEAD.pack(False, 0))
            return
        try:
            _send_bytes(sock, grant.view, grant.stopped)
        finally:
            grant.done()


def _send_bytes(sock: socket.socket, view: memoryview, stopped: Callable[[], bool]) -> None:
    checksum = 0
    sock.sendall(_HEAD.pack(True, len(view)))
    for first in range(0, len(view), SLICE_BYTES):
        if stopped():
            raise EOFError("its ticket has ended")  # who waits for the rest has been stopped as well
        part = view[first : first + SLICE_BYTES]
        checksum = zlib.crc32(part, checksum)
        sock.sendall(part)
    sock.sendall(_CHECKSUM.pack(checksum))


class DirectStream:
    """One connection to another node's `PageServer`. Raises `OSError`, `EOFError` or `LinkError` where it breaks."""

    def __init__(self, address: link.Address) -> None:
        self._waiting: deque[tuple[chunks.Ask, memoryview]] = deque()
        self._part, self._num_come, self._checksum = bytearray(), 0, 0
        self.sock = socket.create_connection((address.host, address.port), CONNECT_S)
        try:
            _tune(self.sock)
            nonce = _challenge.decode(_receive_message(self.sock)).nonce
            _send(self.sock, link.Hello(address.invitation, link.proof(address.secret, nonce)))
        except BaseException:
            self.sock.close()
            raise

    def ask(self, lease: Lease | None, ask: chunks.Ask, into: memoryview) -> None:
        self._waiting.append((ask, into))
        self.sock.settimeout(CONNECT_S)
        _send(self.sock, ReadChunk(lease, ask.first, ask.num_bytes))

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def poll(self, timeout_s: float) -> chunks.Event:
        """What has come within `timeout_s`; `Tick`: nothing."""
        if not self._waiting:
            return chunks.Tick()
        self.sock.settimeout(timeout_s)
        try:
            return self._more()
        except TimeoutError:
            return chunks.Tick()

    def _more(self) -> chunks.Event:
        ask, into = self._waiting[0]
        if self._num_come == 0 and len(self._part) < _HEAD.size:
            if not self._fill(_HEAD.size):
                return chunks.Moved(ask.stream)
            follows, num_bytes = _HEAD.unpack(self._part)
            if not follows:
                return chunks.Gone(ask.stream)
            if num_bytes != ask.num_bytes:
                raise link.LinkError(f"{num_bytes} bytes came where {ask.num_bytes} were asked for")
        if self._num_come < ask.num_bytes:
            took = self.sock.recv_into(into[self._num_come : self._num_come + SLICE_BYTES])
            if not took:
                raise EOFError("the connection has ended")
            self._checksum = zlib.crc32(into[self._num_come : self._num_come + took], self._checksum)
            self._num_come += took
            return chunks.Moved(ask.stream)
        if not self._fill(_HEAD.size + _CHECKSUM.size):
            return chunks.Moved(ask.stream)
        (checksum,) = _CHECKSUM.unpack(self._part[_HEAD.size :])
        intact = checksum == self._checksum
        self._waiting.popleft()
        self._part, self._num_come, self._checksum = bytearray(), 0, 0
        return chunks.Came(ask.stream, ask.index, intact)

    def _fill(self, num_bytes: int) -> bool:
        """Whether head and checksum together have so many bytes now."""
        data = self.sock.recv(num_bytes - len(self._part))
        if not data:
            raise EOFError("the connection has ended")
        self._part += data
        return len(self._part) == num_bytes

    def close(self) -> None:
        self.sock.close()
