"""Doing a table's runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedclade.reproduce.compare_to_paper import Outcome, outcome
from fedclade.reproduce.execute import Options, TableEntry, execute, plan
from fedclade.reproduce.spec import Table


@pytest.fixture
def done() -> Callable[..., tuple[Outcome, list[TableEntry]]]:
    """done(table, folder, **options): what came out, and the entries that were begun for it."""

    def do(table: Table, folder: Path, **options: Any) -> tuple[Outcome, list[TableEntry]]:
        begun: list[TableEntry] = []
        planned = plan(table, Options(device="cpu", **options))
        found = execute(planned, folder, lambda entry, number, total: begun.append(entry))
        return outcome(planned, found, "cpu"), begun

    return do
