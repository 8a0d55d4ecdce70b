"""Who may know whom: `kernels <- cluster <- actors <- app <- ops`.

1. No module imports one of a folder to its right, and none names one in a string.
2. Import statements make no circle, those inside functions included.
3. What decides is pure: no clock, random numbers, sockets, environment or threads; neither Ray, vLLM nor torch comes in
   through what it imports.
4. Ray, vLLM and torch are imported only where they are carried.
5. No file has more than 400 lines, but tables and what is named here.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LADDER = ("kernels", "cluster", "actors", "app", "ops")
# A string that is a module of ours, or an attribute of one: `app.main:build`.
REFERENCE = re.compile(rf"(?:{'|'.join(LADDER)})(?:\.\w+)+(?::\w+)?")
# The command line imports the module of a command when it is asked for.
DECLARED_UPWARDS = {"app/cli.py": "ops."}
CARRIERS = {
    "ray": r"app/.*|ops/.*|actors/(controller|transfer)/actor\.py|actors/engine/replica\.py"
    r"|actors/logs\.py|actors/controller/serve_policy\.py",
    "vllm": r"app/.*|ops/.*|actors/engine/.*",
    "torch": r"kernels/.*|actors/engine/.*|ops/.*",
}
PURE = re.compile(
    r"actors/messages\.py|actors/controller/(?!(actor|gc_tuning|serve_policy)\.py).*|actors/transfer/(?!(actor|direct|fetch|host_calls|link|link_server|memory|spans|ways)\.py).*"
    r"|actors/engine/(integrity/ledger|staging_ring)\.py|app/request/(state|events)\.py"
    r"|cluster/plan/(?!(cli|preflight|render|checkpoint|facts)\.py).*"
)
IMPURE = {
    "time",
    "random",
    "secrets",
    "uuid",
    "datetime",
    "socket",
    "os",
    "asyncio",
    "threading",
    "subprocess",
    "requests",
}
HEAVY = {"ray", "vllm", "torch"}


@dataclass(frozen=True)
class Module:
    path: str
    imports: frozenset[str]  # dotted names as written; `from a import b` gives a.b
    references: frozenset[str]  # strings that look like a module of ours
    run: frozenset[str]  # of the imports, those that are not for type checkers alone
    at_start: frozenset[str]  # of these, those that run when the module is imported


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide who is meant"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run(node: ast.AST, in_functions: bool) -> Iterator[str]:
    """Names that are imported when the code runs."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if not in_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    yield from _names(node)
    for child in ast.iter_child_nodes(node):
        yield from _run(child, in_functions)


@cache
def modules() -> dict[str, Module]:
    """Dotted name -> module, of every source file."""
    found = {}
    for top in LADDER:
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            tree = ast.parse(file.read_text())
            nodes = list(ast.walk(tree))
            strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(
                str(path),
                frozenset(name for node in nodes for name in _names(node)),
                frozenset(text for text in strings if REFERENCE.fullmatch(text)),
                frozenset(_run(tree, in_functions=True)),
                frozenset(_run(tree, in_functions=False)),
            )
    return found


@cache
def ours(name: str) -> str | None:
    """The module of ours that an imported name or a string means, None for a foreign one."""
    name = name.partition(":")[0]
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


def rung(name: str) -> int:
    return LADDER.index(name.split(".")[0])


def test_nothing_is_imported_or_named_upwards() -> None:
    wrong = []
    for name, module in modules().items():
        for other in sorted(module.imports | module.references):
            meant = ours(other)
            if meant is None or rung(meant) <= rung(name):
                continue
            declared = DECLARED_UPWARDS.get(module.path)
            if not (declared and other in module.references and meant.startswith(declared)):
                wrong.append(f"{module.path} names {other}")
    assert wrong == []


def test_imports_make_no_circle() -> None:
    graph = {
        name: {meant for other in module.run if (meant := ours(other)) and meant != name}
        for name, module in modules().items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_what_decides_is_pure() -> None:
    wrong = []
    for name, module in modules().items():
        if not PURE.fullmatch(module.path):
            continue
        wrong += [f"{module.path} imports {other}" for other in module.imports if other.split(".")[0] in IMPURE | HEAVY]
        for far in reached(name):
            wrong += [
                f"{module.path} reaches {other} through {far}"
                for other in modules()[far].at_start
                if other.split(".")[0] in HEAVY
            ]
    assert wrong == []
    assert sum(bool(PURE.fullmatch(module.path)) for module in modules().values()) >= 35


@cache
def reached(name: str) -> frozenset[str]:
    """Modules of ours that are imported when this one is."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in modules()[todo.pop()].at_start:
            meant = ours(other)
            if meant and meant not in found:
                found.add(meant)
                todo.append(meant)
    return frozenset(found)


def test_ray_vllm_and_torch_are_where_they_are_carried() -> None:
    wrong = [
        f"{module.path} imports {other}"
        for module in modules().values()
        for other in sorted(module.imports)
        if other.split(".")[0] in CARRIERS and not re.fullmatch(CARRIERS[other.split(".")[0]], module.path)
    ]
    assert wrong == []
    # Ray's own LLM package is what this project is compared with.
    assert [m.path for m in modules().values() if any(n.startswith("ray.llm") for n in m.imports)] == []


def test_nothing_is_unpickled() -> None:
    """Bytes of another process are decoded against declared types; what Ray does with its own messages is Ray's."""
    loaders = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = [m.path for m in modules().values() if any(name.split(".")[0] in loaders for name in m.imports)]
    assert wrong == []


def test_the_folders_are_what_the_map_says() -> None:
    found = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and "egg-info" not in p.name}
    assert found - {"build", "__pycache__"} == {*LADDER, "tests"}


MOST_LINES = 400
# Tables of one thing after another; and what is still to be split, which must not grow much.
LONGER = {
    "actors/messages.py": 520,
}


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for top in (*LADDER, "tests")
        for file in sorted((ROOT / top).rglob("*.py"))
    }
    assert {path: length for path, length in lengths.items() if length > LONGER.get(path, MOST_LINES)} == {}
