"""`GET /pageferry`: its events, who may have them, and the page itself in a real browser.

1. The page holds no data; the events are for administrators and bounded in number.
2. Every panel shows what the status says, as text: nothing of it becomes markup.
3. On a phone's width nothing runs over the edge; dark and light differ; p pauses, t changes the theme; Tab reaches each
   panel.
4. A controller that is away is said, and the page goes on when it is back.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from controller_driver import ControllerDriver
from fastapi import FastAPI
from fastapi.testclient import TestClient

from actors.controller import status as view
from actors.controller.history import POINTS_MAX, STEP_S, History
from app.api.keys import ADMIN_KEY, API_KEYS, KeyRing
from app.api.middleware import Access, RequestFilter
from app.api.page import VIEWERS_MAX, add_page
from ops.browser import CHROMIUM, TEXT, Browser

NASTY = "<img src=x onerror=\"document.title='caught'\">"


def a_status(decisions: int = 2) -> dict[str, Any]:
    """A real controller's status with two replicas, a request in flight, decisions and a fault."""
    driver = ControllerDriver()
    driver.prefill("p1")
    driver.decode("d1")
    found = view.status(driver.machine, driver.now)
    found["model"] = "smollm2"
    history = History()
    for n in range(POINTS_MAX + 5):
        found["pools"]["decode"]["replicas"][0]["blocks_held"] = n
        history.add(found | {"uptime_s": n * STEP_S})
    found["uptime_s"] = (POINTS_MAX + 4) * STEP_S
    found["pools"]["decode"]["replicas"][0]["blocks_quarantined"] = 1
    found["pools"]["decode"]["scaling"] = f"held {NASTY}"
    found["scaling"]["decisions"] = [
        {"s_ago": 30.0 * n, "pool": "decode", "current": n, "target": n + 1, "reason": f"reason {n}"}
        for n in range(decisions)
    ]
    found["page_faults"] = [
        {
            "uptime_s": 1.0,
            "pool": "decode",
            "replica_id": "d1",
            "request_id": NASTY,
            "detail": "page 9, expected 4",
        }
    ]
    found["engines_lost"]["decode"]["hung"] = 2
    return found | {"history": history.points()}


class Service:
    """The page behind the request filter, with a status that a test changes."""

    def __init__(self, access: Access | None = None) -> None:
        self.status: dict[str, Any] | None = a_status()
        self.routes = FastAPI()
        add_page(self.routes, self._status, every_s=0.2)
        self.app = RequestFilter(self.routes, access or Access())

    async def _status(self) -> dict[str, Any]:
        if self.status is None:
            raise ConnectionError("192.0.2.1:6379 is away")
        return self.status


def test_history_keeps_ten_minutes() -> None:
    points = a_status()["history"]
    assert len(points) == POINTS_MAX and points[-1]["uptime_s"] - points[0]["uptime_s"] == (POINTS_MAX - 1) * STEP_S
    assert points[-1]["occupancy"]["decode"] > points[0]["occupancy"]["decode"]


def test_the_page_is_open_and_its_events_are_not() -> None:
    client = TestClient(Service(Access(KeyRing(None, {API_KEYS: "acme=k", ADMIN_KEY: "secret"}), local=False)).app)
    page = client.get("/pageferry")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", page.text) and "https://" not in page.text
    for key in ({}, {"Authorization": "Bearer k"}):
        assert client.get("/pageferry/events", headers=key).status_code in (401, 403)


class Reader:
    """Reads the events of the app as a server would, without a socket; ends as a client that hangs up."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.head: dict[str, Any] = {}
        self.chunks: list[str] = []
        self.gone = asyncio.Event()

    async def run(self) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.head = message
            else:
                self.chunks.append(message.get("body", b"").decode())

        scope = {
            "type": "http", "method": "GET", "path": "/pageferry/events", "raw_path": b"/pageferry/events",
            "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80), "asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "",
        }  # fmt: skip
        await self.app(scope, receive, send)


async def test_events_come_until_the_viewer_leaves_and_viewers_are_bounded() -> None:
    service = Service()
    readers = [Reader(service.app) for _ in range(VIEWERS_MAX)]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    async with asyncio.timeout(30):
        while not all(len(reader.chunks) >= 2 for reader in readers):
            await asyncio.sleep(0.05)
        assert json.loads(readers[0].chunks[0].split("data: ")[1])["model"] == "smollm2"
        service.status = None
        while "away" not in readers[0].chunks[-1]:
            await asyncio.sleep(0.05)
        assert "192.0.2.1" not in "".join(readers[0].chunks)
        full = Reader(service.app)
        await full.run()
        assert full.head["status"] == 503
        for reader in readers[::2]:
            reader.gone.set()  # as uvicorn says it
        for task in tasks[1::2]:
            task.cancel()  # as Serve says it
        await asyncio.gather(*tasks, return_exceptions=True)
        again = Reader(service.app)
        task = asyncio.create_task(again.run())
        while not again.chunks:
            await asyncio.sleep(0.05)
        assert again.head["status"] == 200
        again.gone.set()
        await task


@pytest.fixture
def running() -> Iterator[tuple[Service, str]]:
    service = Service()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(service.app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield service, f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.force_exit = server.should_exit = True
        thread.join(20)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    made = Browser(tmp_path)
    yield made
    made.close()


def test_a_person_sees_the_service_in_a_browser(running: tuple[Service, str], browser: Browser, tmp_path: Path) -> None:
    service, url = running
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.width(1280)
    browser.call("Page.navigate", url=f"{url}/pageferry")
    browser.wait(f"{TEXT}.includes('up to date')")
    text = browser.value(TEXT)
    shown = ("smollm2", "decode d1 (ready)", "reason 1", "page 9, expected 4", "10 min ago", "0 done", "2 decode hung")
    for word in shown:
        assert word in text, f"{word!r} is not in {text}"
    assert NASTY in text and browser.value("document.title") == "pageferry", "it is text, not markup"
    assert browser.value("document.querySelectorAll('#maps .map i').length") == 200
    assert browser.value("document.querySelectorAll('#maps i.quarantined').length") == 1
    assert browser.value("document.querySelectorAll('#history polyline').length") == 2
    browser.picture(tmp_path / "page-light.png")
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != light
    browser.picture(tmp_path / "page-dark.png")

    browser.press("p")
    browser.wait(f"{TEXT}.includes('paused')")
    assert service.status is not None
    service.status = {**service.status, "model": "another"}
    time.sleep(0.6)
    assert "another" not in browser.value(TEXT)
    browser.press("p")
    browser.wait(f"{TEXT}.includes('another')")

    before, service.status = service.status, None
    browser.wait(f"{TEXT}.includes('the controller does not answer')")
    service.status = before
    browser.wait(f"{TEXT}.includes('up to date')")

    browser.width(360)
    browser.wait("document.documentElement.scrollWidth <= 360")
    browser.picture(tmp_path / "page-phone.png")
    reached = set()
    for _ in range(14):
        browser.press("Tab")
        reached.add(
            browser.value("document.activeElement.getAttribute('aria-labelledby') || document.activeElement.id")
        )
    assert {
        "h-pools",
        "h-history",
        "h-tickets",
        "h-queue",
        "h-maps",
        "h-scaling",
        "h-faults",
        "pause",
        "theme",
    } <= reached
