"""Which replicas each deployment has, as the Serve routers of this process know it. Thread-safe.

Functions of a module and no object: Serve pickles a request router's module by value, and only a reference to this
module leads every router and the frontend of a process to the same state.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from app.rpc.ports import ReplicaGone


@dataclass(frozen=True, slots=True)
class Replicas:
    """`live` may get new tickets; `leaving` can be called too; a call to one that is `dead` will never be answered."""

    live: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()


Watcher = Callable[[str, frozenset[str], frozenset[str]], None]

_lock = threading.Lock()
_replicas: dict[str, Replicas] = {}
_watchers: list[Watcher] = []
_waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()  # of `wait_until_known`


def live(deployment: str) -> frozenset[str]:
    return _replicas.get(deployment, Replicas()).live


def watch(watcher: Watcher) -> None:
    """`watcher(deployment, live, left)` is called at every change of `live`, from the thread of a router."""
    with _lock:
        _watchers.append(watcher)
        known = dict(_replicas)
    for deployment, replicas in known.items():
        watcher(deployment, replicas.live, frozenset())


def update(deployment: str, replicas: Replicas) -> None:
    with _lock:
        before = _replicas.get(deployment, Replicas())
        _replicas[deployment] = replicas
        watchers, waiting = list(_watchers), list(_waiting)
    if replicas.live != before.live:
        for watcher in watchers:
            watcher(deployment, replicas.live, before.live - replicas.live)
    for loop, changed in waiting:
        try:
            loop.call_soon_threadsafe(changed.set)
        except RuntimeError:
            pass  # that loop has been closed


async def wait_until_known(deployment: str, replica_id: str, timeout_s: float) -> None:
    """Returns once a call to this replica finds its way. Raises `ReplicaGone` when it is dead, or after `timeout_s`.

    A replica joins the controller a moment before Serve tells the routers of it. A call waits for that here: inside
    Serve it would take part in the routing of every other call.
    """
    entry = (asyncio.get_running_loop(), asyncio.Event())
    with _lock:
        _waiting.add(entry)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                replicas = _replicas.get(deployment, Replicas())
                if replica_id in replicas.live or replica_id in replicas.leaving:
                    return
                if replica_id in replicas.dead:
                    raise ReplicaGone(replica_id, "it died")
                await entry[1].wait()
                entry[1].clear()
    except TimeoutError:
        raise ReplicaGone(replica_id, f"Serve has not known it for {timeout_s:g} s") from None
    finally:
        with _lock:
            _waiting.discard(entry)
