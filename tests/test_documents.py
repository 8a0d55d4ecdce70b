"""What README, DESIGN and CONTRIBUTING say of the repository is so.

1. The folder map names every package and nothing that is not there.
2. The command table is the command line's; commands in blocks are accepted by their parsers; make targets exist.
3. Files, modules and tests that are named exist, and links lead somewhere.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from app.cli import COMMANDS
from cluster.spec import parse_overrides

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "ops/page-integrity.md")
FOLDERS = ("app", "actors", "kernels", "cluster", "ops", "tests")


def text(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    return text(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(name: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text(name), re.S | re.M)


def test_the_map_is_the_tree() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("README.md", "What lies where"), re.M)
    named = {folder for row in rows for folder in re.findall(r"`([\w/]+)/`", row)}
    assert [folder for folder in sorted(named) if not (ROOT / folder).is_dir()] == []
    packages = {
        str(file.parent.relative_to(ROOT)) for top in FOLDERS[:5] for file in (ROOT / top).glob("**/__init__.py")
    }
    # A package two levels down goes with the one that it is in.
    assert sorted(p for p in packages if p.count("/") < 2 and p not in named) == []


def test_the_command_table_is_the_command_line() -> None:
    rows = re.findall(r"^\| `pageferry (\w+)", section("README.md", "Commands"), re.M)
    assert sorted(rows) == sorted(COMMANDS)


def shell_lines() -> list[str]:
    return [line.split("#")[0].strip() for block in blocks("README.md") for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith("pageferry ")])
def test_commands_in_blocks_are_accepted(line: str) -> None:
    _, name, *arguments = line.split()
    parser = importlib.import_module(COMMANDS[name].module).parser()
    args = parser.parse_intermixed_args(arguments)
    if overrides := getattr(args, "overrides", []):
        assert parse_overrides(overrides)


def test_make_targets_exist() -> None:
    named = set(re.findall(r"`?make ([a-z-]+)", "".join(text(name) for name in DOCUMENTS)))
    assert {"serve", "test", "check", "unit", "aot", "soak"} <= named
    for target in sorted(named):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_named_exists(name: str) -> None:
    said = text(name)
    paths = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", said))
    paths |= {str(Path(name).parent / link) for link in re.findall(r"\]\((?!http)([^)#]+)\)", said)}
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    for module in re.findall(r"python -m ([\w.]+)", said):
        if module.split(".")[0] in FOLDERS:
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    results = set(re.findall(r"`([\w-]+\.md)`", said))
    assert (
        sorted(page for page in results if not any((ROOT / folder / page).exists() for folder in ("", "ops/results")))
        == []
    )
