"""A fixture that executes a table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedclade.reproduce.compare_to_paper import Outcome, outcome
from fedclade.reproduce.execute import Options, TableEntry, execute, plan
from fedclade.reproduce.spec import Table


@pytest.fixture
def done() -> Callable[..., tuple[Outcome, list[TableEntry]]]:
    """done(table, folder, **options): the outcome, and the entries that were started."""

    def do(table: Table, folder: Path, **options: Any) -> tuple[Outcome, list[TableEntry]]:
        started: list[TableEntry] = []
        planned = plan(table, Options(device="cpu", **options))
        results = execute(planned, folder, lambda entry, number, total: started.append(entry))
        return outcome(planned, results, "cpu"), started

    return do
