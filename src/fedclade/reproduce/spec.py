"""A table of a paper: the run of each cell, and the number that the paper prints there. Tables are
TOML files in tables/.

title, paper: what the table is, and where it is printed.
metric, tolerance: the compared number (of summary.json, or see `paper_metrics`), and the allowed
    difference from the paper's.
seeds, notes: the number of runs of a cell; what a reader of the table must know.
[experiment]: the experiment file that all cells share.
[quick] set, samples: what --quick changes, and how many training samples of a data set it uses.
[[columns]]: name; data: data sets, of which the first available one is used; set: what the column
    changes.
[[rows]]: name; method; set: what the row changes; paper: numbers by column; why: the reason of a
    difference.
[[claims]]: rows in rising order: what the paper claims in words.

part_of, columns: instead of all this, some columns of another table as their own table.

study: what is done with [experiment] if a cell is no training run (see `studies`); rows then have
    no method, and a study that makes its own data has the data set "synthetic".
at: of a row, the round whose numbers it shows instead of the last.
formula, besides: of a row, the paper's number as an expression, and the bytes beyond it (see
    `evaluate_cost`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from fedclade.core.cost_formula import SYMBOLS, evaluate_cost
from fedclade.errors import InvalidInputError, nearest
from fedclade.reproduce.studies import STUDIES

_STRICT = ConfigDict(extra="forbid")
Sets = tuple[str, ...]
T = TypeVar("T")
SYNTHETIC = "synthetic"


@dataclass(frozen=True, config=_STRICT)
class Column:
    """A data set or a setting. `metric` and `tolerance` are the table's unless given; `like` takes
    data and settings from another one.
    """

    name: str
    data: tuple[str, ...] = ()
    set: Sets = ()
    quick: Sets = ()
    metric: str | None = None
    tolerance: float | None = None
    like: str | None = None


@dataclass(frozen=True, config=_STRICT)
class Row:
    """A method with its settings; in `sets`, those that hold in one column only. `encoder` names,
    by column, the data set that FLT's encoder is trained on. A row without a number of the paper is
    ours, for comparison. With a `formula` the paper's number is what it comes to in this run, and
    ours must be that and `besides` more, to the byte.
    """

    name: str
    method: str = ""
    set: Sets = ()
    sets: dict[str, Sets] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    why: str | dict[str, str] = ""
    encoder: dict[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    at: int | None = None
    formula: str = ""
    besides: str = "0"

    def __post_init__(self) -> None:
        for expression in (self.formula or "0", self.besides):
            evaluate_cost(expression, dict.fromkeys(SYMBOLS, 1))

    def only(self, columns: Sequence[str]) -> Row:
        """What it says of these columns."""

        def among(found: dict[str, T]) -> dict[str, T]:
            return {column: value for column, value in found.items() if column in columns}

        why = self.why if isinstance(self.why, str) else among(self.why)
        skip = tuple(column for column in self.skip if column in columns)
        return replace(
            self,
            sets=among(self.sets),
            paper=among(self.paper),
            why=why,
            encoder=among(self.encoder),
            skip=skip,
        )

    def reason(self, column: str) -> str:
        return self.why if isinstance(self.why, str) else self.why.get(column, "")


@dataclass(frozen=True, config=_STRICT)
class Claim:
    """Rows whose numbers rise in this order, in these columns (none named: all); each may lie
    `slack` under the one before.

    With a `row` it is about that row, and `rising` names columns."""

    rising: tuple[str, ...]
    columns: tuple[str, ...] = ()
    row: str = ""
    slack: float = 0.0


@dataclass(frozen=True, config=_STRICT)
class Quick:
    set: Sets = ()
    samples: int | None = None


@dataclass(frozen=True, config=_STRICT)
class Table:
    title: str
    paper: str
    experiment: dict[str, dict[str, Any]]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    name: str = ""
    study: str = ""
    metric: str = "accuracy"
    tolerance: float = 1.0
    seeds: int = 3
    notes: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    quick: Quick = Quick()

    def __post_init__(self) -> None:
        if self.study and self.study not in STUDIES:
            raise ValueError(
                f"study '{self.study}': there is no such study.{nearest(self.study, STUDIES)}"
            )
        for row in self.rows:
            if bool(row.method) == bool(self.study):
                raise ValueError(
                    f"row '{row.name}':"
                    f" {'a study has no methods' if self.study else 'it needs a method'}"
                )

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def settings_of(self, column: Column) -> Column:
        """The column whose data and settings this one has."""
        return column if column.like is None else self.column(column.like)

    def metric_of(self, column: Column) -> str:
        return column.metric or self.metric

    def tolerance_of(self, column: Column) -> float:
        return self.tolerance if column.tolerance is None else column.tolerance


@cache
def tables() -> dict[str, Table]:
    """All tables by name."""
    found = {}
    parts = {}
    for file in sorted(
        resources.files("fedclade.reproduce").joinpath("tables").iterdir(),
        key=lambda file: file.name,
    ):
        if file.name.endswith(".toml"):
            name, content = file.name.removesuffix(".toml"), tomllib.loads(file.read_text())
            if "part_of" in content:
                parts[name] = content
            else:
                found[name] = TypeAdapter(Table).validate_python({**content, "name": name})
    found |= {
        name: _part(name, found[content["part_of"]], content) for name, content in parts.items()
    }
    return dict(sorted(found.items()))


def _part(name: str, whole: Table, content: dict[str, Any]) -> Table:
    """Columns of another table that stand as a table of their own elsewhere."""
    names = content["columns"]
    rows = tuple(row.only(names) for row in whole.rows)
    claims = tuple(
        replace(claim, columns=tuple(column for column in claim.columns if column in names))
        for claim in whole.claims
    )
    columns = tuple(whole.column(column) for column in names)
    return replace(
        whole,
        name=name,
        title=content["title"],
        paper=content["paper"],
        columns=columns,
        rows=rows,
        claims=claims,
    )


def find(name: str) -> Table:
    if name not in tables():
        raise InvalidInputError(
            f"reproduce '{name}': there is no such table.{nearest(name, tables())} `fedclade list"
            " tables` names them all."
        )
    return tables()[name]
