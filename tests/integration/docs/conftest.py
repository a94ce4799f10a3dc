"""The tests of this folder have the marker `docs`: `make test-docs` runs them, `make test` does
not. test_language.py is quick and reads code too, so `make test` runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents and item.path.name != "test_language.py":
            item.add_marker(pytest.mark.docs)
