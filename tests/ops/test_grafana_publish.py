"""`pageferry dashboards` against a server that is as strict as Grafana about path, method, token and body."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app.cli import main
from ops.grafana.dashboards import DASHBOARDS

TOKEN = "glsa_of_a_service_account"
PREFIX = "/behind/a/proxy"
DATASOURCE_KEYS = {"uid", "name", "type", "access", "url", "isDefault", "jsonData"}


class Grafana:
    """What a Grafana would hold. Whatever it would not take is written down in `wrong`."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.datasources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.wrong: list[str] = []
        self.token = TOKEN

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method in ("POST", "PUT"):
            self.writes.append(f"{method} {path}")
        for pattern, handler in self.ROUTES.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                status, tree = handler(self, body, *found.groups())
                return status, tree
        self.wrong.append(f"{method} {path}")
        return 405, {"message": "no such route"}

    def _get_folder(self, body: Any, uid: str) -> tuple[int, Any]:
        return (200, self.folders[uid]) if uid in self.folders else (404, {"message": "folder not found"})

    def _new_folder(self, body: Any) -> tuple[int, Any]:
        if set(body) != {"title", "uid"} or body["uid"] in self.folders:
            self.wrong.append(f"folder {body}")
            return 412, {"message": "a folder with that uid exists"}
        self.folders[body["uid"]] = {"id": 7, "version": 1, **body}
        return 200, self.folders[body["uid"]]

    def _get_datasource(self, body: Any, name: str) -> tuple[int, Any]:
        found = next((each for each in self.datasources.values() if each["name"] == name), None)
        return (200, found) if found else (404, {"message": "Data source not found"})

    def _put_datasource(self, body: Any, uid: str | None = None) -> tuple[int, Any]:
        if (
            set(body) != DATASOURCE_KEYS
            or uid not in (None, body["uid"])
            or (uid is None) == (body["uid"] in self.datasources)
        ):
            self.wrong.append(f"data source {uid} {body}")
            return 409, {"message": "data source with the same name already exists"}
        self.datasources[body["uid"]] = {"id": 3, "orgId": 1, "readOnly": False, **body}
        return 200, {"datasource": self.datasources[body["uid"]], "id": 3, "message": "Datasource added"}

    def _get_dashboard(self, body: Any, uid: str) -> tuple[int, Any]:
        return (200, self.dashboards[uid]) if uid in self.dashboards else (404, {"message": "Dashboard not found"})

    def _put_dashboard(self, body: Any) -> tuple[int, Any]:
        board = body.get("dashboard", {})
        ok = set(body) == {"dashboard", "folderUid", "overwrite", "message"} and body["overwrite"] is True
        if not ok or body["folderUid"] not in self.folders or not board.get("title") or "id" in board:
            self.wrong.append(f"dashboard {set(body)}")
            return 400, {"message": "bad request data"}
        version = self.dashboards.get(board["uid"], {"dashboard": {"version": 0}})["dashboard"]["version"] + 1
        stored = {**json.loads(json.dumps(board)), "id": 11, "version": version}
        self.dashboards[board["uid"]] = {"dashboard": stored, "meta": {"folderUid": body["folderUid"]}}
        return 200, {"uid": board["uid"], "status": "success", "version": version}

    ROUTES: ClassVar[dict[str, Any]] = {
        r"GET /api/folders/([\w-]+)": _get_folder,
        r"POST /api/folders": _new_folder,
        r"GET /api/datasources/name/([\w-]+)": _get_datasource,
        r"POST /api/datasources": _put_datasource,
        r"PUT /api/datasources/uid/([\w-]+)": _put_datasource,
        r"GET /api/dashboards/uid/([\w-]+)": _get_dashboard,
        r"POST /api/dashboards/db": _put_dashboard,
    }


@pytest.fixture
def grafana() -> Iterator[tuple[Grafana, str]]:
    state = Grafana()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {state.token}":
                status, tree = 401, {"message": "Invalid API key"}
            elif raw and self.headers.get("Content-Type") != "application/json":
                status, tree = 415, {"message": "wants JSON"}
            elif not self.path.startswith(PREFIX):
                state.wrong.append(self.path)
                status, tree = 404, {"message": "Not found"}
            else:
                status, tree = state.answer(
                    self.command, self.path.removeprefix(PREFIX), json.loads(raw) if raw else None
                )
            payload = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_port}{PREFIX}/"
    server.shutdown()
    thread.join()
    server.server_close()
    assert not state.wrong


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return str(file)


def run(capsys: pytest.CaptureFixture[str], url: str, token: str, *more: str) -> dict[str, str]:
    assert main(["dashboards", "--url", url, "--token-file", token, "--json", *more]) == 0
    return {row["what"]: row["change"] for row in json.loads(capsys.readouterr().out)}


def test_first_everything_is_created_then_nothing_changes(
    grafana: tuple[Grafana, str], token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state, url = grafana
    assert set(run(capsys, url, token, "--dry-run").values()) == {"created"} and not state.writes
    assert set(run(capsys, url, token).values()) == {"created"}
    assert state.dashboards.keys() == {board.uid for board in DASHBOARDS}
    assert len(state.writes) == 2 + len(DASHBOARDS)
    state.writes.clear()
    assert set(run(capsys, url, token).values()) == {"unchanged"} and not state.writes


def test_what_was_changed_there_is_put_right_and_the_rest_is_left(
    grafana: tuple[Grafana, str], token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state, url = grafana
    run(capsys, url, token)
    state.writes.clear()
    state.dashboards["pageferry-fleet"]["dashboard"]["panels"][0]["title"] = "mine"
    state.dashboards["pageferry-engines"]["meta"]["folderUid"] = "elsewhere"
    done = run(capsys, url, token, "--prometheus", "http://other:9090")
    changed = {what for what, change in done.items() if change == "updated"}
    assert changed == {
        "data source pageferry-prometheus",
        "dashboard pageferry: fleet",
        "dashboard pageferry: engines",
    }
    assert sorted(state.writes) == [
        "POST /api/dashboards/db",
        "POST /api/dashboards/db",
        "PUT /api/datasources/uid/pageferry-prometheus",
    ]
    assert state.datasources["pageferry-prometheus"]["url"] == "http://other:9090"
    assert state.dashboards["pageferry-fleet"]["dashboard"]["version"] == 2


def test_what_goes_wrong_is_said_in_one_line(
    grafana: tuple[Grafana, str], token: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, url = grafana
    state.token = "another"
    for arguments, said in (
        (["--url", url, "--token-file", token], "Unauthorized"),
        (["--url", "http://127.0.0.1:9/", "--token-file", token], "refused"),
        (["--url", "grafana:3000", "--token-file", token], "write http://HOST:PORT"),
        (["--url", url, "--token-file", str(tmp_path / "none")], "No such file"),
    ):
        assert main(["dashboards", *arguments]) in (1, 2)
        out = capsys.readouterr()
        assert said in out.err and out.err.count("\n") == 1 and TOKEN not in out.err + out.out
