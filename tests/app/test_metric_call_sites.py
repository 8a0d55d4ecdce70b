"""Each metric of the table is emitted by the product: found by walking its source, not by calling the emitter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster.metrics import ENGINE, ENGINE_COUNTERS, TABLE

ROOT = Path(__file__).parents[2]
EMITS = {"count", "set", "observe", "_total", "_gauge"}


def trees(*folders: str) -> Iterator[ast.AST]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def emitted() -> set[str]:
    """First arguments of the calls that emit a metric."""
    return {
        str(node.args[0].value)
        for node in trees("app", "actors")
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in EMITS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("pageferry_")
    }


def engine_counters() -> set[str]:
    """Names that stand in an engine's source as a counter's: a key, a subscript, or a field of a class of counters."""
    found = set()
    for node in trees("actors/engine"):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ClassDef) and node.name in ("Counters", "EngineCounters"):
            found |= {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
    return found


def test_every_metric_of_the_table_has_a_call_site() -> None:
    assert emitted() == {metric.name for metric in TABLE} - {metric.name for metric in ENGINE}


def test_every_engine_counter_of_the_table_is_counted_in_an_engine() -> None:
    assert set(ENGINE_COUNTERS) <= engine_counters()
