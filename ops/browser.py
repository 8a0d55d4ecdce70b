"""A real browser for the page that people look at: one tab of a headless Chromium, driven over its own protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import websockets.sync.client

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TEXT = "(document.body || {innerText: ''}).innerText"


class Browser:
    """One tab; `folder` is for its profile and its log. Ends with `close`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        self._log = (folder / "chromium.log").open("w+")
        self._process = subprocess.Popen([*command, f"--user-data-dir={folder}", "about:blank"], stderr=self._log)
        port = self._port(folder)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            tab = next(each for each in json.load(answer) if each["type"] == "page")
        self._open = contextlib.ExitStack()
        connection = websockets.sync.client.connect(tab["webSocketDebuggerUrl"], max_size=None)
        self._socket = self._open.enter_context(connection)
        self._last = 0

    @staticmethod
    def _port(folder: Path) -> int:
        file = folder / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not file.exists() or not file.read_text():
            assert time.monotonic() < until, "Chromium has not started within 60 s"
            time.sleep(0.1)
        return int(file.read_text().split()[0])

    def call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, (
                f"{expression} is not so after {seconds:g} s: {self.value('document.body.innerText')}"
            )
            time.sleep(0.1)

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def width(self, pixels: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=height, deviceScaleFactor=1, mobile=pixels < 600
        )

    def picture(self, file: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(20)
        self._log.close()
