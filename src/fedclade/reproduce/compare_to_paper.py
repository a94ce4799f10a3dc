"""The results of a table's runs, compared with the numbers of the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from fedclade.core.cost_formula import evaluate_cost
from fedclade.io.environment_info import environment_info
from fedclade.reproduce.execute import Done, Plan, Sizes
from fedclade.reproduce.fairness import METRICS, Fairness, fairness
from fedclade.reproduce.panels import Picture
from fedclade.reproduce.paper_metrics import measure
from fedclade.reproduce.pictures import pictures
from fedclade.reproduce.spec import Claim, Column, Row, Table

Mark = Literal["within", "above", "below", "not reached", ""]
_LOWER_IS_BETTER = (
    *("rounds_to", "megabits_to", "perplexity", "loss", "bytes"),
    *("accuracy_variance", "train_accuracy_variance"),
)
_NEITHER_IS_BETTER = ("clusters", "groups", "models")


@dataclass(frozen=True)
class Cell:
    """One number of the paper, and ours. `mark` is empty if there is nothing to compare. `fairness`
    is empty in a column of another metric than the accuracy.
    """

    row: str
    column: str
    method: str
    metric: str
    paper: float | None
    values: tuple[float | None, ...]  # one per seed; None if the run has no such number
    mean: float | None
    std: float | None
    difference: float | None
    mark: Mark
    why: str
    imported: bool = False  # the paper's number comes from another protocol: it is not judged
    fairness: Fairness = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A claim in one column, or about one row: whether it holds, the means it is based on, and how
    far each may be below the one before.
    """

    place: str
    rising: tuple[str, ...]
    means: tuple[float, ...]
    holds: bool
    slack: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The results of a table: all cells, the checked claims, and how they were computed."""

    table: str
    title: str
    paper: str
    notes: tuple[str, ...]
    quick: bool
    data: dict[str, str | None]
    wanted: dict[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    claims: tuple[Checked, ...]
    about: dict[str, str]
    seconds: float
    pictures: tuple[Picture, ...] = ()
    # By column, the smallest and the largest value over its runs; see `execute.Sizes`.
    sizes: dict[str, tuple[Sizes, Sizes]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        content = asdict(replace(self, pictures=()))
        return content | {"pictures": [picture.as_json() for picture in self.pictures]}


def outcome(plan: Plan, done: dict[tuple[str, str, int], Done], device: str) -> Outcome:
    """Compare the runs of a plan with the paper.

    Args:
        plan: the planned entries.
        done: the finished entries, by row, column and seed.
        device: the device for runs that did not record theirs.

    Returns:
        Every cell of the plan's columns and rows, in the order of the table.
    """
    table, cells, of_clients = plan.table, [], fairness(plan, done)
    columns = [column for column in table.columns if column.name in plan.data]
    for column in columns:
        for row in table.rows:
            by_seed = sorted(done.items(), key=lambda item: item[0][2])
            place = (row.name, table.settings_of(column).name)
            runs = [_until(value, row.at) for key, value in by_seed if key[:2] == place]
            if runs and column.name not in row.skip:
                cell = _cell(plan, row, column, runs)
                if cell.metric in METRICS and row.at is None:
                    cell = replace(cell, fairness=of_clients.get(place, {}))
                cells.append(cell)
    checked = () if plan.options.quick else check_claims(table, columns, cells)
    return Outcome(
        table.name,
        table.title,
        table.paper,
        table.notes,
        plan.options.quick,
        {column.name: plan.data[column.name] for column in columns},
        {column.name: table.settings_of(column).data for column in columns},
        tuple(cells),
        checked,
        _environment(done, device),
        round(
            sum(
                {
                    plan.entries[key].label: summary["seconds"]
                    for key, (summary, *_) in done.items()
                }.values()
            ),
            1,
        ),
        pictures(plan, done),
        _sizes(done),
    )


def check_claims(
    table: Table, columns: Sequence[Column], cells: Sequence[Cell]
) -> tuple[Checked, ...]:
    """The claims of a table for which there are all numbers."""
    means = {(cell.row, cell.column): cell.mean for cell in cells}
    return tuple(
        result
        for claim in table.claims
        for place in _places(claim, columns)
        if (result := _checked(claim, place, means)) is not None
    )


def _sizes(done: dict[tuple[str, str, int], Done]) -> dict[str, tuple[Sizes, Sizes]]:
    by_column: dict[str, list[Sizes]] = {}
    for (_, column, _), run in done.items():
        if run.sizes is not None:
            by_column.setdefault(column, []).append(run.sizes)
    return {
        column: (
            Sizes(*map(min, zip(*sizes, strict=True))),
            Sizes(*map(max, zip(*sizes, strict=True))),
        )
        for column, sizes in by_column.items()
    }


def _cell(plan: Plan, row: Row, column: Column, runs: list[Done]) -> Cell:
    metric = plan.table.metric_of(column)
    if row.formula and metric == "bytes":
        return _by_formula(row, column, metric, runs)
    values = tuple(measure(metric, run.summary, run.history) for run in runs)
    known = [value for value in values if value is not None and math.isfinite(value)]
    mean = statistics.fmean(known) if len(known) == len(values) else None
    std = statistics.stdev(known) if mean is not None and len(known) > 1 else None
    paper = row.paper.get(column.name)
    # A quick run has a smaller federation, so it cannot be compared with the paper.
    difference = None if mean is None or paper is None or plan.options.quick else mean - paper
    mark: Mark = ""
    if row.imported:
        pass
    elif paper is not None and mean is None and not plan.options.quick:
        mark = "not reached"
    elif difference is not None:
        far = abs(difference) > plan.table.tolerance_of(column)
        mark = "within" if not far else "above" if difference > 0 else "below"
    return Cell(
        row.name,
        column.name,
        row.method,
        metric,
        paper,
        values,
        mean,
        std,
        difference,
        mark,
        row.reason(column.name),
        row.imported,
    )


def _environment(done: dict[tuple[str, str, int], Done], device: str) -> dict[str, str]:
    """Machine, versions and commit of the runs; all of them if they differ."""
    environments = [
        summary.get("about") or environment_info(device) for summary, *_ in done.values()
    ]
    if not environments:
        return environment_info(device)
    return {
        name: ", ".join(
            dict.fromkeys(environment[name] for environment in environments if name in environment)
        )
        for name in environments[0]
    }


def _until(done: Done, last: int | None) -> Done:
    """The run up to round `last`; None for the whole run."""
    if last is None:
        return done
    history = [row for row in done.history if row["round"] <= last]
    return Done(
        dict(history[-1]) if history and history[-1]["round"] == last else {},
        history,
        done.panels,
        done.sizes,
    )


def _by_formula(row: Row, column: Column, metric: str, runs: list[Done]) -> Cell:
    """The paper's number is the value of its formula in these runs, quick or not; ours must be
    exactly that plus `besides`.
    """
    values = tuple(measure(metric, run.summary, run.history) for run in runs)
    counted = [value for value in values if value is not None]
    symbols = runs[0].summary["symbols"]  # the same for all seeds
    paper, more = evaluate_cost(row.formula, symbols), evaluate_cost(row.besides, symbols)
    mean = statistics.fmean(counted)
    mark: Mark = (
        "within" if set(counted) == {paper + more} else "above" if mean > paper + more else "below"
    )
    letters = ", ".join(f"{name} = {value:,}" for name, value in symbols.items())
    why = (
        f"{row.formula} with {letters}. In addition {row.besides} = {more:,} bytes."
        f" {row.reason(column.name)}".rstrip()
    )
    std = statistics.stdev(counted) if len(counted) > 1 else None
    return Cell(
        row.name, column.name, row.method, metric, paper, values, mean, std, mean - paper, mark, why
    )


def _places(claim: Claim, columns: Sequence[Column]) -> list[str]:
    if claim.row:
        return [claim.row]
    return [column.name for column in columns if not claim.columns or column.name in claim.columns]


def _checked(
    claim: Claim, place: str, means: dict[tuple[str, str], float | None]
) -> Checked | None:
    """The claim in this column or about this row; None if a number is missing."""
    values = [means.get((place, name) if claim.row else (name, place)) for name in claim.rising]
    known = tuple(value for value in values if value is not None)
    if len(known) < len(values):
        return None
    holds = all(later >= earlier - claim.slack for earlier, later in pairwise(known))
    return Checked(place, claim.rising, known, holds, claim.slack)


def in_words(cell: Cell) -> str:
    """The mark as a word: "better" and "worse" depend on the metric; a number of groups only
    differs.
    """
    if cell.mark in ("above", "below"):
        if cell.metric.startswith(_NEITHER_IS_BETTER):
            return "differs"
        better = (cell.mark == "above") != cell.metric.startswith(_LOWER_IS_BETTER)
        return "better" if better else "worse"
    return cell.mark
