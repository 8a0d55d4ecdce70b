"""What `pageferry serve` says and leaves while it starts a local Ray, and how other commands find the service."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.transfer.memory import socket_folder
from app.cli import main
from app.commands import running
from app.commands.local_ray import repeated_every, why_no_proxy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return socket_folder()


def test_a_wait_without_news_is_said() -> None:
    said: list[str] = []
    with repeated_every(said.append, "still starting", 0.05):
        time.sleep(0.3)
    count = len(said)
    time.sleep(0.15)
    assert count == len(said) >= 2 and said[0].endswith("s] still starting")


def test_a_proxy_that_does_not_start_is_explained_from_serves_log(tmp_path: Path) -> None:
    logs = tmp_path / "session_latest" / "logs" / "serve"
    logs.mkdir(parents=True)
    (logs / "proxy_127.0.0.1.log").write_text("INFO one\nERROR Failed to start HAProxy: no answer in 30 s\n")
    text = why_no_proxy(TimeoutError("ray::HAProxyManager.ready()\nHTTP proxies not available after 60s."), tmp_path)
    assert text.splitlines()[0] == "Serve's HTTP proxy did not start: HTTP proxies not available after 60s."
    assert "no answer in 30 s" in text and "RAY_SERVE_ENABLE_HA_PROXY=0" in text and "INFO" not in text
    assert "did not start" in why_no_proxy(TimeoutError(""), None)


def test_a_running_service_is_found_and_one_that_was_killed_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert running.find(None) == running.DEFAULT_URL and running.find("http://h:1") == "http://h:1"
    code = "from app.commands.running import Note; n = Note('http://127.0.0.1:9'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert running.find(None) == "http://127.0.0.1:9"
        assert main(["status"]) == 1
        assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
        mine = running.Note("http://127.0.0.1:8")
        assert main(["scale", "decode", "2"]) == 2
        assert "2 services run on this machine: http://127.0.0.1:" in capsys.readouterr().err
        other.kill()
    assert running.urls() == ["http://127.0.0.1:8"]
    mine.close()
    assert running.urls() == [] and not list(folder.glob("service-*"))
