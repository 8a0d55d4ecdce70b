"""Markers follow folders, so that a test cannot be in the wrong class by forgetting a decorator."""

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


def _kind(item: pytest.Item) -> str:
    top = Path(item.path).relative_to(ROOT).parts[0]
    return top if top in BY_FOLDER else "pure"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(_kind(item))
    # Cheap tests first: a broken unit shows before an engine has started.
    items.sort(key=lambda item: ORDER[_kind(item)])
