"""The transfer actor's end of the links: accepts the node's engines, and sees when one of them has ended.

Whose process has ended can touch no bytes any more; the kernel says so (pidfd), also where a child of it has inherited
the connection. Only processes of the same user are heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from actors.transfer import events as ev
from actors.transfer.channel import ChannelError, Frames, Goodbye, Hello, Offer, decode_body, encode_frame

logger = logging.getLogger("pageferry.transfer")

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
LAST_WORDS_S = 0.2  # for what a process sent before it ended


class LinkServer:
    """`on_event` hears of `EngineConnected`, `EngineDetached`, `EngineGone` and `FromEngine`."""

    def __init__(self, path: str, on_event: Callable[[ev.Event], None]) -> None:
        self.path = path
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._sockets: dict[int, socket.socket] = {}
        self._watched: dict[int, int] = {}  # pidfd by link
        self._engines: dict[int, str] = {}  # by link, of those that are watched
        self._latest: dict[str, int] = {}  # link of each engine
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listener.listen(128)
        self._listen()

    def offer(self, link: int, offer: Offer, fd: int) -> None:
        """Hands the memory's descriptor over. An engine that does not read is disconnected."""
        sock = self._sockets.get(link)
        if sock is None:
            return
        frame = encode_frame(offer)
        with contextlib.suppress(OSError):
            if socket.send_fds(sock, [frame], [fd]) == len(frame):
                return
        self._end(sock)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for link in list(self._watched):
            self._unwatch(link)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for sock in self._sockets.values():
            self._end(sock)
            sock.close()
        Path(self.path).unlink(missing_ok=True)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Takes one engine in. A callback and no task: cancelling a task could lose a socket that it just accepted."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # such as too many open files
            logger.error("cannot accept an engine: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(0.5, self._listen)
            return
        sock.setblocking(False)
        link = next(self._numbers)
        self._sockets[link] = sock  # before its task runs, which `close` may cancel first
        self._spawn(self._serve(sock, link))

    async def _serve(self, sock: socket.socket, link: int) -> None:
        loop, frames, engine = asyncio.get_running_loop(), Frames(), ""
        try:
            while data := await loop.sock_recv(sock, 1 << 16):
                for body in frames.feed(data):
                    message = decode_body(body)
                    if isinstance(message, Hello):
                        pid, engine = self._peer(sock), message.engine
                        self._latest[engine] = link
                        self._on_event(ev.EngineConnected(engine, link))
                        self._watch(engine, link, pid)
                    elif not engine:
                        raise ChannelError("the first message must be Hello")
                    elif self._latest.get(engine) != link:
                        return  # it has another link by now, and can rely on nothing that it said here
                    elif isinstance(message, Goodbye):
                        self._gone(engine, link)
                    else:
                        self._on_event(ev.FromEngine(engine, message))
        except OSError:
            pass  # the peer has gone
        except ChannelError as error:
            logger.error("engine %s: %s; connection closed", engine or "unknown", error)
        except Exception:
            logger.exception("engine %s: its message has failed; connection closed", engine)
        finally:
            self._sockets.pop(link, None)
            self._end(sock)
            sock.close()
            if engine:
                self._on_event(ev.EngineDetached(engine, link))

    @staticmethod
    def _end(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # -- processes

    @staticmethod
    def _peer(sock: socket.socket) -> int:
        """The process that connected, as the kernel knows it."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid() or pid <= 0:
            raise ChannelError(f"process {pid} of user {uid} is not of this user, or of another process namespace")
        return int(pid)

    def _watch(self, engine: str, link: int, pid: int) -> None:
        for earlier in [other for other, name in self._engines.items() if name == engine]:
            self._unwatch(earlier)  # it lives, as it has connected again
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(engine, link)
            return
        self._watched[link], self._engines[link] = pidfd, engine
        asyncio.get_running_loop().add_reader(pidfd, self._ended, engine, link)

    def _unwatch(self, link: int) -> None:
        self._engines.pop(link, None)
        pidfd = self._watched.pop(link, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _ended(self, engine: str, link: int) -> None:
        self._unwatch(link)
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._gone, engine, link)

    def _gone(self, engine: str, link: int) -> None:
        self._unwatch(link)
        if self._latest.get(engine) == link:
            del self._latest[engine]
        self._on_event(ev.EngineGone(engine, link))
        sock = self._sockets.get(link)
        if sock is not None:
            self._end(sock)
