"""`pageferry serve` and `pageferry status` as far as they go without a service, and ending marked processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from actors.controller import status as view
from actors.controller.machine import Machine
from actors.transfer.memory import socket_folder
from app.cli import main
from app.commands import own_http
from app.commands.own_http import DIRECT, opener
from app.commands.serve import Service
from app.commands.status import audit_lines, audit_table, engine_lines, size, table
from app.processes import MARK, end_marked, marked, sweep
from cluster.spec import ClusterSpec


def status() -> dict[str, Any]:
    """What a controller without replicas says."""
    return view.status(Machine(ClusterSpec.load("local-cpu"), 1, 0), 1)


def replica(**more: Any) -> dict[str, Any]:
    counts = {"blocks_total": 2911, "blocks_free": 2000, "blocks_held": 900, "blocks_quarantined": 11}
    return {"replica_id": "abc", "state": "ready", "running": 3, "waiting": 1, "tokens_per_s": 81.4, **counts, **more}


class Handler(BaseHTTPRequestHandler):
    audit: ClassVar[dict[str, Any]] = {}
    sizes: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        body = json.dumps(self.audit if self.path.endswith("audit") else status()).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        size = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sizes.append(size)
        good = size["replicas"] < 5
        self.send_response(200 if good else 409)
        self.end_headers()
        refusal = {"error": {"message": "9 decode replicas are outside pools.decode.min_replicas 1 .. max_replicas 4"}}
        self.wfile.write(json.dumps(size if good else refusal).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_status_is_a_table_and_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "smollm2" in shown and "no replica" in shown and "0 in flight" in shown
    assert main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tickets"]["in_flight"] == 0


def test_a_row_a_replica_fits_a_terminal() -> None:
    found = status()
    found["pools"]["decode"]["replicas"] = [replica()]
    console = Console(width=80, record=True)
    console.print(table(found))
    [row] = [line for line in console.export_text().splitlines() if "abc" in line]
    assert row.split() == ["decode", "abc", "ready", "900", "/", "2,911", "11", "30.9%", "3", "1", "81"]


def test_what_engines_run_on_is_a_line_a_pool_or_one_a_kind() -> None:
    facts = {
        "device": "NVIDIA H200", "attention_backend": "FLASHMLA", "kv_dtype": "fp8_e4m3", "kv_cache_layout": "LBNHC",
        "model_runner": "V2", "cuda_graphs": "FULL_AND_PIECEWISE", "async_scheduling": True,
    }  # fmt: skip
    found = status()
    found["pools"]["decode"]["replicas"] = [replica(engine=facts), replica(engine=facts)]
    found["pools"]["prefill"]["replicas"] = [replica(), replica(engine={"kv_dtype": "bfloat16", "pid": 7})]
    whole = "NVIDIA H200, FLASHMLA, pages fp8_e4m3 LBNHC, runner V2, graphs FULL_AND_PIECEWISE, asynchronous scheduling"
    assert engine_lines(found) == ["prefill   pages bfloat16", f"decode    {whole}"]
    found["pools"]["decode"]["replicas"].append(replica(engine=facts | {"cuda_graphs": "NONE"}))
    assert engine_lines(found)[1:] == [
        f"decode    {whole} (2 of 3)",
        f"decode    {whole.replace('graphs FULL_AND_PIECEWISE', 'no graphs')} (1 of 3)",
    ]
    console = Console(width=160, record=True)
    console.print(table(found))
    assert whole in console.export_text()


def test_audit_names_what_is_broken(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "audit", view.audit(Machine(ClusterSpec.load("local-cpu"), 1, 0)))
    assert main(["status", "--url", url, "--audit"]) == 0
    assert "all laws hold" in capsys.readouterr().out
    monkeypatch.setattr(Handler, "audit", {"breaches": ["free 1 + held 2 != 4"]})
    assert main(["status", "--url", url, "--audit"]) == 1
    assert "free 1 + held 2 != 4" in capsys.readouterr().out


def test_audit_is_a_row_a_replica_with_the_history_of_each_page() -> None:
    found = view.audit(Machine(ClusterSpec.load("local-cpu"), 1, 0))
    record = {"state": "ready", "blocks_held": 900, "blocks_total": 2911, "blocks_quarantined": 11}
    found["replicas"] = {
        "abc": {"pool": "decode", "laws_broken": [], **record},
        "def": {"pool": "prefill", "laws_broken": ["def: free 1 + held 2 != total 4"], **record},
        "ghi": {"pool": "decode", "laws_broken": [], **record},
    }
    breach = {"law": "sharing", "page": 7, "text": "2 claims on 1 references", "history": ["step 3 allocated tag 0x1"]}
    verdict = {"request_id": "r1", "text": "page 9 in the place of page 7", "history": ["step 4 freed tag 0x1"]}
    scheduler = {"counters": {"integrity_rows_checked": 1234, "integrity_requests_ended": 1}}
    broken = {"mode": "check", "laws_broken": ["x", "y"], "breaches": [breach], "verdicts": [verdict]}
    found["engines"] = {
        "abc": {"scheduler": scheduler, "integrity": broken},
        "def": {"scheduler": {"counters": {}}, "integrity": {"mode": "off"}},
    }
    found["silent"] = {"ghi": "no answer within 4 s"}
    found["breaches"] = ["abc: x", "abc: y", *found["replicas"]["def"]["laws_broken"]]
    console = Console(width=80, record=True)
    console.print(audit_table(found))
    shown = console.export_text()
    rows = {line.split()[1]: line.split()[2:7] for line in shown.splitlines() if "ready" in line}
    assert rows == {
        "abc": ["ready", "check", "ok", "2", "broken"],
        "def": ["ready", "off", "1", "broken", "-"],
        "ghi": ["ready", "?", "ok", "?", "900"],
    }
    assert "3 laws are broken" in shown and "1,234" in shown and "…" not in shown
    assert audit_lines(found) == [
        "broken now: abc: x",
        "broken now: abc: y",
        "broken now: def: free 1 + held 2 != total 4",
        "not checked: ghi does not answer: no answer within 4 s",
        "was broken: abc: sharing: page 7: 2 claims on 1 references",
        "    step 3 allocated tag 0x1",
        "tag mismatch: abc: request r1: page 9 in the place of page 7",
        "    step 4 freed tag 0x1",
    ]


def test_a_service_on_this_machine_is_not_asked_through_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(own_http, "_BY_ENVIRONMENT", urllib.request.build_opener())  # as in a process that starts so
    spec = ClusterSpec.load("local-cpu", {"frontend.port": int(url.rpartition(":")[2])})
    assert Service(spec, None)._healthy()
    assert main(["status", "--url", url]) == 0
    assert main(["status", "--url", url.replace("127.0.0.1", "localhost")]) == 0


def test_another_machine_is_asked_through_the_proxy_of_the_environment() -> None:
    assert opener("http://127.0.0.1:1") is opener("http://localhost:2") is opener("http://[::1]:3") is DIRECT
    assert opener("http://10.0.0.1:1") is opener("http://service.example") is not DIRECT


def test_a_pool_is_scaled_by_hand(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "decode", "2", "--hold", "10m", "--url", url]) == 0
    assert Handler.sizes[-1] == {"pool": "decode", "replicas": 2, "hold_s": 600.0}
    assert main(["scale", "decode", "9", "--hold", "90", "--url", url]) == 1
    assert "9 decode replicas are outside" in capsys.readouterr().err
    assert Handler.sizes[-1]["hold_s"] == 90.0
    with pytest.raises(SystemExit):
        main(["scale", "decode", "2", "--hold", "soon", "--url", url])
    assert "'soon' is no time such as 90s, 10m or 2h" in capsys.readouterr().err


def test_no_service_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5,120.0 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_a_configuration_that_cannot_be_used_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "local-cpu", "pools.decode.replicsa=2"]) == 2
    assert "did you mean pools.decode.replicas?" in capsys.readouterr().err
    assert main(["serve", "local-cpu", "--port", "1", "pools.decode.replicsa=2"]) == 2
    assert "did you mean pools.decode.replicas?" in capsys.readouterr().err
    assert main(["serve", "no-such-topology"]) == 2
    assert "local-cpu" in capsys.readouterr().err


def test_a_second_service_on_the_machine_takes_other_ports() -> None:
    """Ray refuses a dashboard port that is named and taken, such as that of a Ray which runs here already."""
    made = [Service(ClusterSpec.load("local-cpu"), None) for _ in range(2)]
    ports = [8265, *(service._ray_options()["dashboard_port"] for service in made)]
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", ports[1]))
        second.bind(("127.0.0.1", made[1]._ray_options()["dashboard_port"]))
    assert 8265 not in ports[1:]


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def stubborn(mark: str) -> subprocess.Popen[bytes]:
    made = subprocess.Popen([sys.executable, "-c", STUBBORN], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE)
    assert made.stdout is not None and made.stdout.readline() == b"up\n"
    made.stdout.close()
    return made


def test_marked_processes_end_even_when_they_do_not_want_to() -> None:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    mine, other = stubborn(mark), stubborn(mark + "-other")
    try:
        assert marked(mark) == [mine.pid]
        assert end_marked(mark, grace_s=0.5) == []
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_shared_memory_of_processes_that_had_to_be_killed_is_taken_away() -> None:
    """By Python's resource tracker of each, which is therefore ended last."""
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    code = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        file = Path("/dev/shm", process.stdout.readline().strip())
        assert file.exists()
        assert end_marked(mark, grace_s=0.3) == []
    assert not file.exists()


def test_sockets_without_a_listener_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        dead, alive = (socket_folder() / f"transfer-x-{name}.sock" for name in ("dead", "alive"))
        with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as listens:
            gone.bind(str(dead))
            listens.bind(str(alive))
            listens.listen()
            sweep()
            assert not dead.exists() and alive.exists()
