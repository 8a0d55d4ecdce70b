"""The vector files are what the reference makes, and every CPU backend makes what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.kernels import vectors


def arrays_as_bytes(value: Any) -> Any:
    """JSON with arrays decoded: the text of a zlib stream may differ between versions, its content may not."""
    if isinstance(value, dict):
        if set(value) == {"dtype", "shape", "zlib"}:
            tensor = vectors.decode(value)
            return (value["dtype"], value["shape"], bytes(tensor.flatten().view(torch.uint8).tolist()))
        return {name: arrays_as_bytes(each) for name, each in value.items()}
    return [arrays_as_bytes(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", list(vectors.FILES))
def test_files_hold_what_the_reference_makes(name: str) -> None:
    stored = json.loads((vectors.FOLDER / f"{name}.json").read_text())
    assert arrays_as_bytes(stored) == arrays_as_bytes(json.loads(vectors.text(name)))


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_backends_make_what_the_files_hold(backend: str) -> None:
    assert vectors.verify(backend) == []


def test_a_changed_byte_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in vectors.FOLDER.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    data = json.loads((tmp_path / "pages.json").read_text())
    pages = vectors.decode(data["cases"][1]["pages"])
    pages[0, 5] ^= 1
    data["cases"][1]["pages"] = vectors.encode(pages)
    (tmp_path / "pages.json").write_text(json.dumps(data))
    monkeypatch.setattr(vectors, "FOLDER", tmp_path)
    assert vectors.verify("numba") == ["numba: pages 1: bytes", "numba: pages 1: verdicts", "numba: pages 1: opened"]
