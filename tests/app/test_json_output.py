"""`--json`: standard output is one JSON document, whatever engines and libraries write to it besides."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOISY = """
import logging, os, subprocess, sys
log = logging.StreamHandler(sys.stdout)  # vLLM's logging holds on to the stream like this
from cluster.json_output import print_json, run

def main(argv):
    print("a print")
    log.handle(logging.makeLogRecord({"msg": "a log line"}))
    os.write(1, b"<jemalloc>: a line of the C library\\n")
    subprocess.run(["echo", "a child"])
    print_json({"answer": 42})
    print("after it")
    return 3

code = run(main, sys.argv[1:])
print("stdout is back" if "--json" not in sys.argv else "", end="")
sys.exit(code)
"""


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == code, done.stderr
    return done


def test_everything_but_the_document_goes_to_standard_error() -> None:
    done = run(["-c", NOISY, "--json"], 3)
    assert json.loads(done.stdout) == {"answer": 42}
    for line in ("a print", "a log line", "a line of the C library", "a child", "after it"):
        assert line in done.stderr


def test_without_json_nothing_is_redirected() -> None:
    done = run(["-c", NOISY], 3)
    assert done.stderr == "" and "a child" in done.stdout and done.stdout.endswith("stdout is back")


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "kimi-k2.6", "--gpu", "H200", "--count", "8"],
        ["plan", "--published"],
        pytest.param(["simulate", "--seed", "3", "--seeds", "20"], marks=pytest.mark.compiles, id="simulate"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_prints_one_document(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *command, "--json"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode in (0, 1), done.stderr
    assert isinstance(json.loads(done.stdout), dict | list)


def offers_json(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == "--json" for node in ast.walk(tree))


def prints_json_itself(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
        return False
    return any(isinstance(part, ast.Attribute) and part.attr == "dumps" for part in ast.walk(node))


def sources() -> list[tuple[Path, Any]]:
    files = [path for folder in ("app", "cluster", "ops") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in files if "results" not in path.parts}
    return [(path.relative_to(ROOT), ast.parse(text)) for path, text in texts.items() if '"--json"' in text]


def test_who_offers_json_prints_it_by_the_one_function() -> None:
    offering = [(path, tree) for path, tree in sources() if offers_json(tree) and path.name != "json_output.py"]
    assert len(offering) > 10
    wrong = [str(path) for path, tree in offering if any(prints_json_itself(node) for node in ast.walk(tree))]
    assert not wrong, "print_json keeps the document apart from what libraries write"
