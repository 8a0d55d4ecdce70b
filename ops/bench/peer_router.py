"""A plain router over n servers, as a process of its own: a peer to be measured.

Settings come as one JSON argument: `port`, the servers' `ports` and their command lines `servers`. HAProxy sends each
request to the server with the fewest connections that is healthy. SIGTERM ends all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

CONFIG = """
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
frontend in
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance leastconn
    option httpchk GET /health
{servers}
"""


def config(port: int, ports: list[int]) -> str:
    servers = "\n".join(f"    server s{each} 127.0.0.1:{each} check inter 1s" for each in ports)
    return CONFIG.format(port=port, servers=servers)


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="pfb-router-") as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(config(settings["port"], settings["ports"]))
        haproxy = Path(__file__).parents[2] / "app" / "commands" / "haproxy"
        commands = [*settings["servers"], [str(haproxy), "-db", "-f", str(file)]]
        children = [subprocess.Popen(command) for command in commands]
        while not stop.wait(0.5) and all(child.poll() is None for child in children):
            pass
        for child in children:
            child.terminate()
        for child in children:
            child.wait(30)


if __name__ == "__main__":
    main()
