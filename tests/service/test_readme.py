"""What the README tells people to run works as it stands, on this service's port."""

from __future__ import annotations

import io
import re
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from app.commands.serve import Service

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _(quiet: Any) -> None:
    """Every test of this module leaves nothing behind."""


def here(block: str, service: Service) -> str:
    host = service.url.removeprefix("http://")
    assert "localhost:8000" in block or "get_app_handle" in block
    return block.replace("localhost:8000", host)


def test_the_python_blocks(service: Service) -> None:
    assert blocks("python")
    for block in blocks("python"):
        shown = io.StringIO()
        with redirect_stdout(shown):
            exec(compile(here(block, service), "README.md", "exec"), {"__name__": "readme"})
        assert len(shown.getvalue().split()) > 5, shown.getvalue()


def test_the_curl_block(service: Service) -> None:
    (block,) = [block for block in blocks("") if block.startswith("curl")]
    done = subprocess.run(["sh", "-c", here(block, service)], capture_output=True, text=True, timeout=120, check=True)
    assert '"finish_reason"' in done.stdout, done.stdout
