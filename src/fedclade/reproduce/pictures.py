"""The pictures of a table, from its finished runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from fedclade.reproduce.execute import Done, Plan
from fedclade.reproduce.panels import Panel, Picture, Series
from fedclade.reproduce.paper_metrics import metric_text
from fedclade.reproduce.spec import Column, PictureSpec

_MAX_POINTS = 60  # of a line

Finished = Mapping[tuple[str, str, int], Done]


def pictures(plan: Plan, done: Finished) -> tuple[Picture, ...]:
    """The pictures for which there is at least one panel.

    Args:
        plan: the planned entries.
        done: the finished entries, by row, column and seed.
    """
    found = []
    for spec in plan.table.pictures:
        columns = [
            column
            for column in plan.table.columns
            if column.like is None and (not spec.columns or column.name in spec.columns)
        ]
        panels = (
            _curves(plan, done, spec, columns)
            if spec.kind == "curves"
            else _study(plan, done, spec, columns)
        )
        if panels:
            file = "-".join(filter(None, (plan.table.name, spec.name)))
            found.append(Picture(file, spec.title, spec.reading, tuple(panels)))
    return tuple(found)


def _runs(
    plan: Plan, done: Finished, spec: PictureSpec, column: Column
) -> dict[str, tuple[str, list[Done]]]:
    """Of each distinct run of a column: the first row that has it, and its seeds in order. Rows
    that show different rounds of one run share it.
    """
    runs: dict[str, tuple[str, list[Done]]] = {}
    for row in plan.table.rows:
        seeds = sorted(
            seed for name, place, seed in done if (name, place) == (row.name, column.name)
        )
        if seeds and (not spec.rows or row.name in spec.rows):
            label = plan.entries[row.name, column.name, seeds[0]].label
            runs.setdefault(
                label, (row.name, [done[row.name, column.name, seed] for seed in seeds])
            )
    return runs


def _curves(plan: Plan, done: Finished, spec: PictureSpec, columns: list[Column]) -> list[Panel]:
    panels = []
    for column in columns:
        series = tuple(
            line
            for name, runs in _runs(plan, done, spec, column).values()
            if (line := _line(name, spec.metric, runs)) is not None
        )
        if series:
            panels.append(Panel(column.name, "lines", "round", metric_text(spec.metric), series))
    return panels


def _line(name: str, metric: str, runs: list[Done]) -> Series | None:
    """The mean over seeds of each round that has a number, with the lowest and the highest; None
    if there is no number.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.history:
            value = row.get(metric)
            if value is not None and math.isfinite(value):
                by_round.setdefault(row["round"], []).append(float(value))
    rounds = sorted(by_round)
    if len(rounds) > _MAX_POINTS:  # evenly, with the first and the last
        last = len(rounds) - 1
        rounds = [rounds[round(index * last / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]
    if not rounds:
        return None
    values = [by_round[number] for number in rounds]
    several = len(runs) > 1
    return Series(
        name,
        tuple(map(float, rounds)),
        tuple(map(statistics.fmean, values)),
        tuple(map(min, values)) if several else None,
        tuple(map(max, values)) if several else None,
    )


def _study(plan: Plan, done: Finished, spec: PictureSpec, columns: list[Column]) -> list[Panel]:
    """The panels of the first seed of each run, with the row's name if there are several runs."""
    by_run = [
        (name, runs[0].panels)
        for column in columns
        for name, runs in _runs(plan, done, spec, column).values()
        if runs[0].panels
    ]
    return [
        panel if len(by_run) == 1 else replace(panel, title=f"{name}: {panel.title}")
        for name, panels in by_run
        for panel in panels
    ]
