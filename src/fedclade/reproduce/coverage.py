"""What of the papers is reproduced: their tables and figures, and the cells with a number."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import NamedTuple

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from fedclade.reproduce.compare_to_paper import Outcome
from fedclade.reproduce.spec import Table, tables

PAPERS = {
    "flt": "FLT",
    "flt_w": "FLT, workshop version",
    "flis": "FLIS",
    "fedgmcc": "FedGMCC",
    "cfl": "CFL",
}


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of a paper.

    Args:
        paper: a key of PAPERS.
        name: "Table 1" or "Figure 2", with an Arabic number.
        tables: the tables here that reproduce it; by default those whose name is made from paper
            and name.
        reason: why there is none.
    """

    paper: str
    name: str
    tables: tuple[str, ...] = ()
    reason: str = ""

    def found(self) -> list[str]:
        """The names of the tables that reproduce it."""
        if self.tables:
            return [name for name in self.tables if name in tables()]
        kind, number = self.name.lower().split()
        stem = self.paper if self.paper.endswith("_w") else f"{self.paper}_"
        base = f"{stem}{'' if kind == 'table' else kind}{number}"
        return [name for name in tables() if name == base or name.startswith(f"{base}_")]


@cache
def paper_items() -> tuple[PaperItem, ...]:
    """Every table and figure of the papers."""
    text = resources.files("fedclade.reproduce").joinpath("papers.toml").read_text()
    return TypeAdapter(tuple[PaperItem, ...]).validate_python(tomllib.loads(text)["items"])


class CellCount(NamedTuple):
    """The cells with a number of the paper, and how many of them are measured."""

    total: int
    measured: int

    def __str__(self) -> str:
        return f"{self.measured} of {self.total}"


def cells_with_number(table: Table, metric: str = "") -> set[tuple[str, str]]:
    """Row and column of the cells for which the paper has a number or a formula.

    Args:
        table: the table.
        metric: a regular expression that matches the start of the counted metrics.
    """
    return {
        (row.name, column.name)
        for row in table.rows
        for column in table.columns
        if column.name not in row.skip
        and re.match(metric, table.metric_of(column))
        and (column.name in row.paper or (bool(row.formula) and table.metric_of(column) == "bytes"))
    }


def count(table: Table, outcome: Outcome | None, metric: str = "") -> CellCount:
    """The cells of one table.

    Args:
        table: the table.
        outcome: its results; None if there are none.
        metric: as in `cells_with_number`.
    """
    cells = cells_with_number(table, metric)
    runs = set() if outcome is None else {(cell.row, cell.column) for cell in outcome.cells}
    return CellCount(len(cells), len(cells & runs))


def total(outcomes: Iterable[Outcome], metric: str = "") -> CellCount:
    """The cells of all tables of the papers. A table that repeats cells of another table does not
    count, nor does one of a benchmark.

    Args:
        outcomes: the results.
        metric: as in `cells_with_number`.
    """
    by_name = {outcome.table: outcome for outcome in outcomes}
    counts = [
        count(table, by_name.get(name), metric)
        for name, table in tables().items()
        if not table.repeats and not table.benchmark
    ]
    return CellCount(*map(sum, zip(*counts, strict=True)))
