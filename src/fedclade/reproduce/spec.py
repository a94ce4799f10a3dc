"""A table of a paper: the run of each cell, and the number that the paper prints there. Tables are
TOML files in tables/.

title, paper: what the table is, and where it is printed.
metric, tolerance: the compared number (of summary.json, or see `paper_metrics`), and the allowed
    difference from the paper's.
seeds, notes: the number of runs of a cell; remarks for the reader of the table.
[experiment]: the experiment file that all cells share.
[quick] set, samples: what --quick changes, and how many training samples of a data set it uses.
[[columns]]: name; data: data sets, of which the first available one is used; set: what the column
    changes.
[[rows]]: name; method; set: what the row changes; paper: numbers by column; why: the reason of a
    difference.
[[claims]]: rows in rising order, for a claim in the paper's text.
[[pictures]]: name: of the file, if there are several; title; kind: "curves", a metric of the rounds
    with one panel per column, one line per row and a band from the lowest to the highest seed,
    "rows", the cells over the numbers in the rows' names ("β=0.3") with one panel per data set and
    one line per column, or "study", the panels that a study returns for its first seed; metric;
    columns, rows: empty for all; series: of a study, the one series to show, with the lines of all
    rows in one panel; reading: what the paper's figure shows, in our words.

repeats: the name of another table that has the same cells; they count once.
benchmark: the name of the benchmark that published the numbers, if it is none of the four papers;
    its cells are counted apart from theirs.
part_of, columns: instead of all this, some columns of another table as their own table.

study: what is done with [experiment] if a cell is not a training run (see `studies`); rows then
    have no method, and a study that generates its data has the data set "synthetic"; "heart" comes
    with fedclade.
at: of a row, the round whose numbers it shows instead of the last.
imported: of a row, whether its numbers come from a protocol that does not compare with ours.
formula, besides: of a row, the paper's number as an expression, and the bytes beyond it (see
    `evaluate_cost`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from fedclade.core.cost_formula import SYMBOLS, evaluate_cost
from fedclade.errors import InvalidInputError, nearest
from fedclade.reproduce.studies import STUDIES

_STRICT = ConfigDict(extra="forbid")
Sets = tuple[str, ...]
T = TypeVar("T")
SYNTHETIC = "synthetic"
STUDY_DATA = (SYNTHETIC, "heart")
"""Data that a study makes, or reads from the package."""


@dataclass(frozen=True, config=_STRICT)
class Column:
    """A data set or a setting. `metric` and `tolerance` default to those of the table; `like` uses
    the data and settings of another column.
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
    """A method with its settings; `sets` has those for one column only. `encoder` has, by column,
    the data set on which FLT's encoder is trained. A row without a number of the paper is ours, for
    comparison. An `imported` number comes from another protocol than ours, because the paper took
    it from elsewhere or has other test data: it is printed and not judged. With a `formula`, the
    paper's number is its value in this run, and ours must be exactly that plus `besides`.
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
    imported: bool = False
    formula: str = ""
    besides: str = "0"

    def __post_init__(self) -> None:
        for expression in (self.formula or "0", self.besides):
            evaluate_cost(expression, dict.fromkeys(SYMBOLS, 1))

    def only(self, columns: Sequence[str]) -> Row:
        """The row with only these columns."""

        def only(values: dict[str, T]) -> dict[str, T]:
            return {column: value for column, value in values.items() if column in columns}

        why = self.why if isinstance(self.why, str) else only(self.why)
        skip = tuple(column for column in self.skip if column in columns)
        return replace(
            self,
            sets=only(self.sets),
            paper=only(self.paper),
            why=why,
            encoder=only(self.encoder),
            skip=skip,
        )

    def reason(self, column: str) -> str:
        return self.why if isinstance(self.why, str) else self.why.get(column, "")


@dataclass(frozen=True, config=_STRICT)
class Claim:
    """Rows whose numbers rise in this order, in these columns (empty for all); each may be up to
    `slack` below the one before.

    With a `row`, the claim is about that row, and `rising` has columns.
    """

    rising: tuple[str, ...]
    columns: tuple[str, ...] = ()
    row: str = ""
    slack: float = 0.0


@dataclass(frozen=True, config=_STRICT)
class PictureSpec:
    """A picture of the table. The keys are described at the top of this module."""

    title: str
    kind: Literal["curves", "rows", "study"]
    reading: str
    name: str = ""
    metric: str = "accuracy"
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    series: str = ""


@dataclass(frozen=True, config=_STRICT)
class Quick:
    """What --quick changes."""

    set: Sets = ()
    samples: int | None = None


@dataclass(frozen=True, config=_STRICT)
class Table:
    """A table of a paper. The keys are described at the top of this module."""

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
    pictures: tuple[PictureSpec, ...] = ()
    quick: Quick = Quick()
    repeats: str = ""
    benchmark: str = ""

    def __post_init__(self) -> None:
        if self.study and self.study not in STUDIES:
            raise ValueError(f"study '{self.study}': unknown.{nearest(self.study, STUDIES)}")
        for row in self.rows:
            if bool(row.method) == bool(self.study):
                raise ValueError(
                    f"row '{row.name}':"
                    f" {'a study has no methods' if self.study else 'the method is missing'}"
                )
        for picture in self.pictures:
            if picture.kind == "study" and not self.study:
                raise ValueError(f"picture '{picture.title}': the table has no study")
        if len({picture.name for picture in self.pictures}) < len(self.pictures):
            raise ValueError("pictures: two pictures have the same name")

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def settings_of(self, column: Column) -> Column:
        """The column that defines the data and settings of this one."""
        return column if column.like is None else self.column(column.like)

    def metric_of(self, column: Column) -> str:
        return column.metric or self.metric

    def tolerance_of(self, column: Column) -> float:
        return self.tolerance if column.tolerance is None else column.tolerance


@cache
def tables() -> dict[str, Table]:
    """All tables by name."""
    by_name = {}
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
                by_name[name] = TypeAdapter(Table).validate_python({**content, "name": name})
    by_name |= {
        name: _part(name, by_name[content["part_of"]], content) for name, content in parts.items()
    }
    return dict(sorted(by_name.items()))


def _part(name: str, table: Table, content: dict[str, Any]) -> Table:
    """Some columns of a table as a separate table."""
    names = content["columns"]
    rows = tuple(row.only(names) for row in table.rows)
    claims = tuple(
        replace(claim, columns=tuple(column for column in claim.columns if column in names))
        for claim in table.claims
    )
    columns = tuple(table.column(column) for column in names)
    return replace(
        table,
        name=name,
        title=content["title"],
        paper=content["paper"],
        columns=columns,
        rows=rows,
        claims=claims,
        pictures=(),  # the whole table has them
        repeats=table.name,
    )


def find(name: str) -> Table:
    """The table of this name. An unknown name raises `InvalidInputError`."""
    if name not in tables():
        raise InvalidInputError(
            f"TABLE = '{name}': unknown.{nearest(name, tables())} 'fedclade list tables' lists all"
            " tables.",
            "TABLE",
        )
    return tables()[name]
