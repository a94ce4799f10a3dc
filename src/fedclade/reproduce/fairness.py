"""How a table's runs treat their clients: the worst tenth, the variance, and the share of clients
that are worse off than with FedAvg and with Local.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from fedclade.analysis.clients_hurt import BASELINES, shares_hurt
from fedclade.analysis.significance import Measured
from fedclade.reproduce.execute import Done, Plan

HEADINGS = {
    "accuracy_worst10": "worst tenth, %",
    "accuracy_variance": "variance, %²",
    "hurt_against_fedavg": "worse than FedAvg, %",
    "hurt_against_local": "worse than Local, %",
}
METRICS = ("accuracy", "sample_accuracy")
"""The metrics of the columns that show these numbers."""

Fairness = dict[str, float]
"""The means over the seeds, by the names of `HEADINGS`; those that the runs have."""


def fairness(plan: Plan, done: dict[tuple[str, str, int], Done]) -> dict[tuple[str, str], Fairness]:
    """The numbers of each row and column with runs of their own.

    Clients are compared with those of the rows of the methods "fedavg" and "local" in the same
    column. A table with several rows of a baseline there has no shares against it.

    Args:
        plan: the planned entries.
        done: the finished entries, by row, column and seed.
    """
    numbers: dict[tuple[str, str], Fairness] = {}
    by_column: dict[str, list[Measured]] = {}
    for (row, column, seed), run in done.items():
        if run.clients is not None and run.summary.get("accuracy") is not None:
            tables = plan.entries[row, column, seed].tables
            federation = (tables["data"], tables["partition"])
            measured = Measured(row, seed, federation, run.summary, run.clients)
            by_column.setdefault(column, []).append(measured)
    for column, runs in by_column.items():
        hurt = shares_hurt(runs)
        for row in dict.fromkeys(run.title for run in runs):
            own = [run.summary for run in runs if run.title == row]
            means: Fairness = {
                name: statistics.fmean(summary[name] for summary in own)
                for name in ("accuracy_worst10", "accuracy_variance")
                if all(summary.get(name) is not None for summary in own)
            }
            shares = {
                f"hurt_against_{baseline}": hurt[baseline][row]
                for baseline in BASELINES
                if row in hurt.get(baseline, {})
            }
            numbers[row, column] = means | shares
    return numbers


def shown(cells: Iterable[Fairness]) -> list[str]:
    """The names of `HEADINGS` that some of these cells have."""
    every = {name for cell in cells for name in cell}
    return [name for name in HEADINGS if name in every]


def texts(cell: Fairness, names: Iterable[str]) -> list[str]:
    """The numbers of a cell, as text; a dash for one that it does not have."""
    return [f"{cell[name]:.1f}" if name in cell else "–" for name in names]
