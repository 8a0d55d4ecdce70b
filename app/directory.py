"""Which replicas each deployment has, as the Serve routers of this process know it. Thread-safe.

Functions of a module and no object: Serve pickles a request router's module by value, and only a reference to this
module leads every router and the frontend of a process to the same state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Watcher = Callable[[str, frozenset[str], frozenset[str]], None]

_lock = threading.Lock()
_live: dict[str, frozenset[str]] = {}
_watchers: list[Watcher] = []


def live(deployment: str) -> frozenset[str]:
    return _live.get(deployment, frozenset())


def watch(watcher: Watcher) -> None:
    """`watcher(deployment, live, left)` is called at every change, from the thread of a router."""
    with _lock:
        _watchers.append(watcher)
        known = dict(_live)
    for deployment, replicas in known.items():
        watcher(deployment, replicas, frozenset())


def unwatch(watcher: Watcher) -> None:
    with _lock:
        _watchers.remove(watcher)


def update(deployment: str, replicas: frozenset[str]) -> None:
    with _lock:
        left = _live.get(deployment, frozenset()) - replicas
        _live[deployment] = replicas
        watchers = list(_watchers)
    for watcher in watchers:
        watcher(deployment, replicas, left)
