"""The engine's end of the link to its node's transfer actor: messages out, staging memory in.

Nothing here waits in the engine's step. A thread keeps the connection and sends; what it cannot send, since the actor
hangs or is away, is dropped after a bound: the hand-overs concerned fail, the engine goes on.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator

from actors.messages import Lease
from actors.transfer.channel import (
    ChannelError,
    Frames,
    Goodbye,
    Hello,
    Offer,
    StagingMapped,
    WorkerMessage,
    decode_offer,
    encode_frame,
)
from actors.transfer.memory import MemoryRefused, map_offered
from actors.transfer.staging import Key

logger = logging.getLogger("pageferry.worker")

UNSENT_BYTES_MAX = 4 << 20
CLOSE_S = 1.0
REVOKED_REMEMBERED = 10_000


class StagingMap:
    """The node's staging memory as this process has it mapped, and what of it must not be touched any more."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._segment = ""
        self._map: mmap.mmap | None = None
        self._revoked: dict[Key, None] = {}
        self._in_use: Counter[Key] = Counter()

    @contextlib.contextmanager
    def bytes_of(self, lease: Lease) -> Iterator[memoryview | None]:
        """The lease's bytes, writable; None when they are not here, or not this lease's any more.

        Inside the block the actor does not lend them again.
        """
        key = (lease.ticket_id, lease.attempt)
        with self._lock:
            view = self._view(lease)
            if view is not None:
                self._in_use[key] += 1
        try:
            yield view
        finally:
            if view is not None:
                with self._lock:
                    self._in_use[key] -= 1
                    self._lock.notify_all()

    def _view(self, lease: Lease) -> memoryview | None:
        end = lease.offset + lease.num_bytes
        if self._map is None or lease.segment != self._segment or (lease.ticket_id, lease.attempt) in self._revoked:
            return None
        if lease.offset < 0 or lease.num_bytes <= 0 or end > len(self._map):
            return None
        return memoryview(self._map)[lease.offset : end]

    def replace(self, segment: str, mapped: mmap.mmap, revoked: list[Key]) -> None:
        """Other memory than before, or the same on another link."""
        with self._lock:
            if segment != self._segment:
                self._revoked.clear()
            self._segment, self._map = segment, mapped
        self.revoke(revoked)

    def revoke(self, keys: list[Key]) -> None:
        """This process has said, or is about to say, that it touches the bytes of these keys no more."""
        with self._lock:
            self._revoked.update(dict.fromkeys(keys))
            while len(self._revoked) > REVOKED_REMEMBERED:
                del self._revoked[next(iter(self._revoked))]

    def drop(self) -> None:
        """The memory may be that of an actor which has died: it goes with the last view that is in use."""
        with self._lock:
            self._map = None

    def wait_unused(self, keys: list[Key], timeout_s: float) -> bool:
        """True when nothing in this process touches the bytes of these keys any more."""
        with self._lock:
            return self._lock.wait_for(lambda: not any(self._in_use[key] for key in keys), timeout_s)


class WorkerLink:
    """Sends and never waits for an answer. Thread-safe.

    A thread keeps the connection up, also while nothing is sent: from its end, and from the end of the process, the
    actor learns that this engine can touch no bytes any more. A message that cannot be sent is dropped: the ticket's
    deadline covers it.
    """

    RETRY_S = 0.5

    def __init__(self, path: str, hello: Hello) -> None:
        self.staging = StagingMap()
        self.dropped = 0
        self._path = path
        self._hello = encode_frame(hello)
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._socket: socket.socket | None = None
        self._broken = False  # more is unsent than may be: this connection is given up
        self._closing = threading.Event()
        self._close_by = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connect()
        self._thread = threading.Thread(target=self._run, name="pageferry-link", daemon=True)
        self._thread.start()

    def send(self, message: WorkerMessage) -> bool:
        """False: dropped, since there is no connection or too much is unsent. Returns at once in every case."""
        frame = encode_frame(message)
        with self._lock:
            if self._socket is None or self._broken or self._closing.is_set():
                self.dropped += 1
                return False
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
            self._broken = self._unsent_bytes > UNSENT_BYTES_MAX
        os.eventfd_write(self._wake, 1)
        return True

    def close(self) -> None:
        """Sends what is unsent for `CLOSE_S` at most, and that this engine touches no bytes any more."""
        self.send(Goodbye())
        self._close_by = time.monotonic() + CLOSE_S
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * CLOSE_S)
        self.staging.drop()

    # -- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket is None and not self._connect():
                self._closing.wait(self.RETRY_S)
                continue
            try:
                self._carry()
            except (OSError, ChannelError) as error:
                logger.warning("the link to the transfer actor has ended: %s", error)
            except Exception:
                logger.exception("the link to the transfer actor has failed")
            self._disconnect()

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._path)  # never waits: a full queue of a hung actor is an error
        except OSError:
            sock.close()
            return False
        with self._lock:
            self._unsent = deque([self._hello])
            self._unsent_bytes, self._broken, self._socket = len(self._hello), False, sock
        return True

    def _disconnect(self) -> None:
        with self._lock:
            sock, self._socket = self._socket, None
            self.dropped += len(self._unsent)
            self._unsent.clear()
        self.staging.drop()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # also for processes that inherited it
            sock.close()

    def _carry(self) -> None:
        """Until the connection ends."""
        sock = self._socket
        assert sock is not None
        incoming, fds = Frames(), deque[int]()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            try:
                while True:
                    closing = self._closing.is_set()
                    if closing and (not self._unsent or time.monotonic() > self._close_by):
                        return
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                    selector.modify(sock, events)
                    for key, ready in selector.select(CLOSE_S if closing else None):
                        if key.fileobj is self._wake:
                            os.eventfd_read(self._wake)
                            continue
                        if ready & selectors.EVENT_WRITE:
                            self._write(sock)
                        if ready & selectors.EVENT_READ and not self._read(sock, incoming, fds):
                            return
                    if self._broken:
                        raise ChannelError(f"it has not taken {self._unsent_bytes} bytes of messages")
            finally:
                for fd in fds:
                    os.close(fd)

    def _write(self, sock: socket.socket) -> None:
        with self._lock:
            while self._unsent:
                try:
                    sent = sock.send(self._unsent[0])
                except BlockingIOError:
                    return
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                    return
                self._unsent.popleft()

    def _read(self, sock: socket.socket, incoming: Frames, fds: deque[int]) -> bool:
        data, got, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        fds.extend(got)
        for body in incoming.feed(data):
            self._take(decode_offer(body), fds.popleft())
        return bool(data)

    def _take(self, offer: Offer, fd: int) -> None:
        try:
            mapped = map_offered(fd, offer.num_bytes)
        except (OSError, MemoryRefused) as error:
            raise ChannelError(f"the staging memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        revoked = [(ticket_id, attempt) for ticket_id, attempt in offer.revoked]
        self.staging.replace(offer.segment, mapped, revoked)
        while not self.staging.wait_unused(revoked, CLOSE_S):
            if self._closing.is_set():
                return
        self.send(StagingMapped(segment=offer.segment, dropped=revoked))
