"""Markers follow folders, so that a test cannot be in the wrong class by forgetting a decorator.

`compiles` separates what waits for a compiler or for whole checkpoints from the rest of the pure tests: the folder
tests/kernels, and single files and tests that say so. A pure or simulated test fails on a warning.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run: a red test is red again. New examples are a person's choice: --hypothesis-profile.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile("fixed")

ROOT = Path(__file__).parent
BY_FOLDER = {"sim", "engine", "service", "gpu"}
ORDER = {"pure": 0, "sim": 1, "gpu": 2, "engine": 3, "service": 4}
# Warnings of other projects, each with its reason; every other one is an error in pure and sim tests.
ALLOWED_WARNINGS = (
    "ignore:`torch.jit.script:DeprecationWarning",  # torch warns of itself when it is imported
    "ignore:max_tokens is deprecated:DeprecationWarning",  # vLLM reads its own chat request's field
)


def _folder(item: pytest.Item) -> str:
    return Path(item.path).relative_to(ROOT).parts[0]


def _kind(item: pytest.Item) -> str:
    return _folder(item) if _folder(item) in BY_FOLDER else "pure"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = _kind(item)
        item.add_marker(kind)
        if _folder(item) == "kernels":
            item.add_marker("compiles")
        if kind in ("pure", "sim"):
            for rule in ("error", *ALLOWED_WARNINGS):
                item.add_marker(pytest.mark.filterwarnings(rule))
    # Cheap tests first: a broken unit shows before an engine has started.
    # Tests that start a service or a cluster of their own come before those that share one, which lives to the end.
    items.sort(key=lambda item: (ORDER[_kind(item)], "service" in getattr(item, "fixturenames", ())))
