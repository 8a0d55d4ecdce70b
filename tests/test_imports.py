"""Who may import whom: the layers, and the packages that only some places may touch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("app", "actors", "kernels", "cluster", "ops")
# The ladder: kernels <- cluster <- actors <- app <- ops.
ALLOWED = {
    "kernels": {"kernels"},
    "cluster": {"cluster", "kernels.layout"},
    "actors": {"actors", "cluster", "kernels"},
    "app": {"app", "actors", "cluster", "kernels.layout", "kernels"},
    "ops": set(OURS),
}
RAY_ALSO = ("actors/engine/replica.py", "actors/logs.py", "actors/controller/serve_policy.py")
HEAVY = {
    "ray": lambda p: p.startswith(("app/", "ops/")) or p.endswith("/actor.py") or p in RAY_ALSO,
    "vllm": lambda p: p.startswith(("app/", "ops/", "actors/engine/")),
    "torch": lambda p: p.startswith(("kernels/", "actors/engine/", "ops/")),
}
# The pure part: decides from (state, event, now) alone.
IMPURE = {"time", "random", "socket", "os", "asyncio", "threading", "requests"}


def sources() -> list[Path]:
    return [file for top in OURS for file in sorted((ROOT / top).rglob("*.py")) if "results" not in file.parts]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def is_pure(path: str) -> bool:
    return path.startswith(("actors/controller/", "actors/transfer/")) and not path.endswith(
        ("actor.py", "channel.py", "serve_policy.py")
    )


@pytest.mark.parametrize("file", sources(), ids=lambda f: str(f.relative_to(ROOT)))
def test_layers(file: Path) -> None:
    path = str(file.relative_to(ROOT))
    top = path.split("/")[0]
    for name in imports(file):
        head = name.split(".")[0]
        if head in OURS:
            assert any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[top]), f"{path} imports {name}"
        if head in HEAVY:
            assert HEAVY[head](path), f"{path} imports {name}"
        if is_pure(path):
            assert head not in IMPURE, f"{path} is pure and imports {name}"
    assert "ray.llm" not in set(imports(file))


def test_the_top_level_is_what_the_map_says() -> None:
    found = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and "egg-info" not in p.name}
    assert found - {"build", "__pycache__"} == {*OURS, "tests"}
